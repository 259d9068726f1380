"""Converters: registration, when their hooks are called, what they may do; and which layers Float8
converts.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import nn

from tests.jobs import FLOAT64, TINY, job, trainer, weights
from tests.messages import refused, says
from tests.parallel.float8.jobs import (
    AG,
    BFLOAT16,
    EMULATED,
    EVERY_LAYER,
    FILTER,
    FLOAT8,
    RECIPE,
    WIDE,
)
from tests.parallel.rows import CHUNKS, RESHARD, TP, on_a_fake_rank
from tests.runs import put_driver
from titanlite.config.load import ConfigError
from titanlite.launch.nodes import gpu_capability
from titanlite.launch.preflight import check_machine
from titanlite.parallel.build import build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.float8 import Float8, check_device, plan
from titanlite.planner.placements import describe
from titanlite.verify.pool import RankFailed

LOUDER = [*TINY, "--model.package=louder", '--model.converters=["louder"]']


def louder(argv: list[str], folder: str) -> tuple[list[float], list[float], list[str]]:
    """Return the weights' sums that the converter saw, those before the first and after each step,
    and the weights' names.
    """
    run = trainer(argv, folder)
    (converter,) = run.runner.context.converters
    sums, step = list[float](), run.train_step

    def look() -> None:
        sums.append(sum(weight.double().sum().item() for weight in weights(run).values()))

    def then_look() -> None:
        step()
        look()

    look()
    run.train_step = then_look  # type: ignore[method-assign]
    run.train()
    return converter.seen, sums, list(weights(run))


@pytest.mark.parametrize("world", [1, 2])
def test_a_converter_s_hooks_are_called_before_sharding_and_names_are_kept(pool, tmp_path, world):
    """The converter itself asserts that it sees unsharded parameters on the meta device."""
    seen, expected, names = pool.run(louder, LOUDER, str(tmp_path), world=world)[0]
    assert names == [name for name, _ in build_model(job(TINY, 1))[0].named_parameters()]
    if world == 1:
        assert len(set(seen)) == 1 + 3 and seen == pytest.approx(expected, rel=1e-12)


def test_converter_that_renames_a_parameter_is_refused(pool, tmp_path):
    argv = [*TINY, "--model.package=louder", '--model.converters=["renaming"]']
    with refused("Renaming", "norm.weight", kind=RankFailed):
        pool.run(louder, argv, str(tmp_path), world=1)


def test_unknown_converter_is_refused_with_a_suggestion():
    with refused('"lauder"', "did you mean louder?", kind=ConfigError):
        job([*TINY, "--model.package=louder", '--model.converters=["lauder"]'], 1)


def test_converters_keep_their_order_and_float8_is_last_if_unlisted():
    def names(*argv: str) -> list[str]:
        return [
            type(c).__name__
            for c in build_converters(job([*WIDE, "--model.package=louder", *argv], 1))
        ]

    assert names("--model.converters=['float8','louder','float8']") == ["Float8", "Louder"]
    assert names("--model.converters=['louder']", FLOAT8) == ["Louder", "Float8"]
    assert names() == []


def test_missing_torchao_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with refused("torchao", "-m pip install"):
        build_converters(job([*WIDE, FLOAT8], 1))


# ---------------------------------------------------------------- which layers


def planned(*argv: str, world: int = 1) -> tuple[Any, Any, Any]:
    """Return what a plan needs: a model, its job and its table."""
    found = job([*WIDE, FLOAT8, *argv], world)
    model, table = build_model(found)
    return model, found, table


def results(*argv: str, world: int = 1) -> dict[str, str]:
    return {
        layer.name: layer.skip_reason or layer.gather_reason or "float8"
        for layer in plan(*planned(*argv, world=world))
    }


HIDDEN = "--model.overrides.hidden_dim="
KEPT = "--parallelism.fsdp_keep_whole=['layers.0.*']"
W1, W2, WK = "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.0.attention.wk"


@pytest.mark.parametrize(
    ("argv", "world", "reasons"),
    [
        ([], 1, {"output": "float8", W1: "float8"}),
        ([f"{FILTER}['output','0.attention.wk']"], 1, {"output": 'has "output"', W1: "float8"}),
        ([f"{FILTER}['0.attention.wk']"], 1, {"output": "float8", WK: 'has "0.attention.wk"'}),
        (["--model.overrides.tied"], 1, {"output": "shares its"}),
        ([f"{HIDDEN}40"], 1, {W2: "64 x 40"}),
        ([f"{HIDDEN}48", TP], 2, {W1: "24 x 64", W2: "64 x 24", WK: "float8"}),
        # A GPU sums a weight's gradient over tokens in multiples of 16.
        ([f"{CHUNKS}2"], 1, {"output": "float8"}),
        ([f"{CHUNKS}3"], 1, {"output": "12 tokens", W1: "float8"}),
        ([f"{CHUNKS}3", "--training.local_batch_size=16"], 1, {"output": "float8"}),
        ([AG, f"{HIDDEN}96"], 3, {W1: "float8", WK: "rows do not split"}),
        ([AG, f"{HIDDEN}96", KEPT], 3, {W1: "fsdp_keep_whole"}),
    ],
)
def test_a_layer_is_converted_or_has_a_reason(argv, world, reasons):
    found = results(*argv, world=world)
    assert len(found) == 15
    for layer, reason in reasons.items():
        assert reason in found[layer] and (reason == "float8") == (found[layer] == "float8")


def test_the_output_layer_is_not_converted_by_default():
    """A model whose head has another name than the default filter's is no error."""
    default = job([*(word for word in WIDE if word != EVERY_LAYER), FLOAT8], 1)
    model, table = build_model(default)
    skipped = {layer.name for layer in plan(model, default, table) if layer.skip_reason}
    assert skipped == {"output"}
    model.head, table["head.weight"] = model.output, table.pop("output.weight")
    del model.output
    assert not any(layer.skip_reason for layer in plan(model, default, table))


def test_subclasses_of_linear_are_not_converted():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model, *others = planned()
    model.output = Scaled(64, 256, bias=False, device="meta")
    says(plan(model, *others)[-1].skip_reason, "Scaled")


def test_a_stage_may_have_nothing_to_convert():
    """Other stages have it; the whole model must have some."""
    model, *others = planned(f"{FILTER}['layers.1.','output']")
    assert not all(layer.skip_reason for layer in plan(model, *others))
    for name in ("tok_embeddings", "output"):
        setattr(model, name, None)
    del model.layers["0"]
    assert all(layer.skip_reason for layer in plan(model, *others))


ALL_GATHER = "enable_fsdp_float8_all_gather"
ODD = ["--training.local_batch_size=3", "--training.seq_len=8"]


@pytest.mark.parametrize(
    ("argv", "world", "said"),
    [
        ([f"{FILTER}['outptu']"], 1, ("outptu", "did you mean output")),
        ([f"{FILTER}['w','output']"], 1, ("no layer", "\n  layers.0")),
        ([AG], 7, ("layers.0.attention.wq", "64 rows", "over 7")),
        ([RECIPE + "rowwise", AG], 2, (ALL_GATHER, 'recipe_name = "tensorwise"')),
        ([RECIPE + "rowwise_with_gw_hp", AG], 2, (ALL_GATHER, "other shards")),
        ([AG, f"{RESHARD}2"], 4, ("fsdp_reshard_after_forward", "float8")),
        (FLOAT64, 1, ("float8.enable", "float64")),
        (ODD, 1, ("float8.enable", "= 24 tokens")),
    ],
)
def test_float8_settings_that_are_impossible_or_without_effect_are_refused(argv, world, said):
    with refused(*said):
        results(*argv, "--model.overrides.vocab_size=256", world=world)


def test_any_token_count_works_with_emulation_or_high_precision_weight_gradients():
    for option in (RECIPE + "rowwise_with_gw_hp", EMULATED):
        assert job([*WIDE, *ODD, FLOAT8, option], 1)


def test_placements_and_notes_list_converted_layers():
    says(describe(job([*WIDE, TP, FLOAT8, AG], 4), 4), "float8 to 15 of 15", "tensorwise")
    argv = [*WIDE, FLOAT8, f"{FILTER}['output']", BFLOAT16]
    with on_a_fake_rank(argv, 1) as (model, context):
        lines = Float8(context.job).apply(model, context)
    says(lines[0], "float8", "14 of 15", "tensorwise")
    assert lines[1].split("  ")[-1].strip() == "x 2" and "layers.*.attention.wq" in lines[1]
    assert lines[-1].endswith('bfloat16: filter_fqns has "output"')


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        (f"{RECIPE}rowwise --compile.enable", True),
        (f"{RECIPE}rowwise", False),
        (f"{RECIPE}rowwise --compile.enable --compile.components=['loss']", False),
        ("--compile.enable", False),
    ],
)
def test_compiled_rows_are_scaled_by_what_eager_norms_would_give(words, rounds):
    """RMSNorm before float8 with scales of rows ends in NaN on a GPU without it: pytorch#150859."""
    from torch._inductor import config

    with (
        config.patch(emulate_precision_casts=False),
        on_a_fake_rank([*WIDE, FLOAT8, *words.split()], 1) as (model, context),
    ):
        Float8(context.job).apply(model, context)
        assert config.emulate_precision_casts == rounds


def test_old_gpu_is_refused_unless_float8_is_emulated(tmp_path, monkeypatch):
    put_driver(tmp_path, "echo 9.0; echo 8.6", monkeypatch)  # the older of two GPUs decides
    with refused("8.6", "float8", "8.9"):
        check_device(job([*WIDE, FLOAT8], 1), "cuda", gpu_capability())
    check_device(job([*WIDE, FLOAT8, EMULATED], 1), "cuda", gpu_capability())
    on_cpu = job([*WIDE, FLOAT8, f"--job.dump_folder={tmp_path}"], 1)
    check_machine(on_cpu, "cpu", 1)
    put_driver(tmp_path, "echo 9.0; echo 8.9", monkeypatch)
    check_device(job([*WIDE, FLOAT8], 1), "cuda", gpu_capability())
