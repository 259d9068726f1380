"""Converters: registration, when their hooks are called, what they may do; and which layers Float8
converts.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from tests.jobs import FLOAT64, TINY, fake_world, job, trainer, weights
from tests.parallel.float8.jobs import (
    AG,
    BFLOAT16,
    EVERY_LAYER,
    FLOAT8,
    PRECOMPUTED,
    RECIPE,
    TP2,
    WIDE,
)
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.launch.nodes import gpu_capability
from titanlite.launch.preflight import check_machine
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.float8 import Float8, check_device, plan
from titanlite.planner.placements import describe
from titanlite.verify.pool import RankFailed

LOUDER = [*TINY, "--model.package=louder", '--model.converters=["louder"]']


def louder(argv: list[str], folder: str) -> tuple[list[float], list[float]]:
    """Return the weights' sums that the converter saw, and those before the first and after each
    step.
    """
    run = trainer(argv, folder)
    (converter,) = run.runner.context.converters
    now = lambda: sum(w.double().sum().item() for w in weights(run).values())  # noqa: E731
    expected, step = [now()], run.train_step

    def then_look() -> None:
        step()
        expected.append(now())

    run.train_step = then_look  # type: ignore[method-assign]
    run.train()
    return converter.seen, expected


def test_custom_converter_hooks_are_called(pool, tmp_path):
    seen, expected = pool.run(louder, LOUDER, str(tmp_path), world=1)[0]
    assert len(seen) == 1 + 3 and seen == pytest.approx(expected, rel=1e-12) and len(set(seen)) == 4


def names_of(argv: list[str], folder: str) -> list[str]:
    return list(weights(trainer(argv, folder)))


def test_converter_runs_before_sharding_and_keeps_names(pool, tmp_path):
    """The converter itself asserts that it sees unsharded parameters on the meta device."""
    for world in (1, 2):
        names = pool.run(names_of, LOUDER, str(tmp_path / str(world)), world=world)[0]
        assert names == pool.run(names_of, TINY, str(tmp_path / "plain"), world=world)[0]


def test_converter_that_renames_a_parameter_is_refused(pool, tmp_path):
    argv = [*TINY, "--model.package=louder", '--model.converters=["renaming"]']
    with pytest.raises(
        RankFailed, match=r"the converter Renaming removed the parameter norm.weight"
    ):
        pool.run(names_of, argv, str(tmp_path), world=1)


def test_unknown_converter_is_refused_with_a_suggestion():
    with pytest.raises(
        ConfigError, match=r'no converter is registered as "lauder"; did you mean louder\?'
    ):
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
    with pytest.raises(UserError, match=r"torchao is not installed; .*-m pip install .torchao"):
        build_converters(job([*WIDE, FLOAT8], 1))


# ---------------------------------------------------------------- which layers


def results(*argv: str, world: int = 1) -> dict[str, str]:
    found = job([*WIDE, FLOAT8, *argv], world)
    model, table = build_model(found)
    return {
        layer.name: layer.skip_reason or layer.gather_reason or "float8"
        for layer in plan(model, found, table)
    }


def test_every_unconverted_layer_has_a_reason():
    assert set(results().values()) == {"float8"} and len(results()) == 15
    unconverted = results("--quantize.linear.float8.filter_fqns=['output','1.attention.wk']")
    assert (
        unconverted["output"] == 'filter_fqns has "output"'
        and unconverted["layers.0.attention.wk"] == "float8"
    )
    assert unconverted["layers.1.attention.wk"] == 'filter_fqns has "1.attention.wk"'
    assert results("--model.overrides.tied")["output"] == "it shares its weight"
    assert results("--model.overrides.hidden_dim=40")["layers.1.feed_forward.w2"] == (
        "64 x 40 on a rank, and 16 must divide both"
    )


def test_the_output_layer_is_not_converted_by_default():
    """A model whose head has another name than the default filter's is no error."""
    default = [*(word for word in WIDE if word != EVERY_LAYER), FLOAT8]
    model, table = build_model(job(default, 1))
    layers = plan(model, job(default, 1), table)
    assert {layer.name: layer.skip_reason for layer in layers if layer.skip_reason} == {
        "output": 'filter_fqns has "output"'
    }
    model.head, table["head.weight"] = model.output, table.pop("output.weight")
    del model.output
    assert not any(layer.skip_reason for layer in plan(model, job(default, 1), table))


def test_odd_loss_chunks_keep_the_head_in_high_precision():
    """A GPU sums a weight's gradient over tokens in multiples of 16."""
    chunks = "--training.loss_chunks="
    assert (
        results(chunks + "2")["output"]
        == "float8"
        == results(chunks + "3", "--training.local_batch_size=16")["output"]
    )
    assert (
        results(chunks + "3")["output"]
        == "training.loss_chunks has one of 12 tokens, and 16 must divide all"
    )
    assert results(chunks + "3", "--quantize.linear.float8.emulate")["output"] == "float8"
    assert set(results(chunks + "3").values()) - {results(chunks + "3")["output"]} == {"float8"}


def test_tensor_parallel_slices_must_be_wide_enough():
    found = results("--model.overrides.hidden_dim=48", TP2, world=2)
    assert found["layers.0.feed_forward.w1"] == "24 x 64 on a rank, and 16 must divide both"
    assert found["layers.0.feed_forward.w2"] == "64 x 24 on a rank, and 16 must divide both"
    assert found["layers.0.attention.wk"] == found["output"] == "float8"
    assert results("--model.overrides.hidden_dim=48")["layers.0.feed_forward.w1"] == "float8"


def test_subclasses_of_linear_are_not_converted():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    found = job([*WIDE, FLOAT8], 1)
    model, table = build_model(found)
    model.output = Scaled(64, 256, bias=False, device="meta")
    assert plan(model, found, table)[-1].skip_reason == "Scaled is more than a linear layer"


def test_uneven_or_replicated_weights_are_gathered_in_high_precision():
    kept = "--parallelism.fsdp_keep_whole=['layers.0.*']"
    found = results(AG, kept, "--model.overrides.hidden_dim=96", world=3)
    assert found["layers.1.feed_forward.w1"] == "float8"
    assert found["layers.1.attention.wq"] == "64 rows do not split evenly over 3 ranks"
    assert found["layers.0.attention.wq"] == "parallelism.fsdp_keep_whole replicates it"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--quantize.linear.float8.filter_fqns=['outptu']"],
            r"is not in the name of any linear layer; did you mean output",
        ),
        (
            ["--quantize.linear.float8.filter_fqns=['w','output']"],
            r"no layer can be converted:\n  layers.0",
        ),
        (
            [AG],
            r"no weight can be gathered in float8:\n"
            r"  layers.0.attention.wq: 64 rows do not split evenly over 7",
        ),
    ],
)
def test_float8_settings_without_effect_are_refused(argv, message):
    with pytest.raises(UserError, match=message):
        results(*argv, "--model.overrides.vocab_size=256", world=7 if AG in argv else 1)


@pytest.mark.parametrize(
    ("argv", "world", "key", "says"),
    [
        (
            [RECIPE + "rowwise", AG],
            2,
            "enable_fsdp_float8_all_gather",
            'or use recipe_name = "tensorwise"',
        ),
        (
            [RECIPE + "rowwise_with_gw_hp", AG],
            2,
            "enable_fsdp_float8_all_gather",
            "rows of other shards",
        ),
        (
            [AG, "--parallelism.fsdp_reshard_after_forward=2"],
            4,
            "fsdp_reshard_after_forward",
            "lose their float8",
        ),
        (
            [PRECOMPUTED],
            2,
            "precompute_float8_dynamic_scale_for_fsdp",
            "for weights that are gathered in float8",
        ),
        (
            [AG, PRECOMPUTED, "--training.enable_cpu_offload"],
            2,
            "precompute_float8",
            "lost in the copy",
        ),
        (FLOAT64, 1, "float8.enable", "not in float64"),
        (
            ["--training.local_batch_size=3", "--training.seq_len=8"],
            1,
            "float8.enable",
            "= 24 tokens",
        ),
    ],
)
def test_impossible_float8_settings_are_refused(argv, world, key, says):
    with pytest.raises(ConfigError) as caught:
        job([*WIDE, FLOAT8, *argv], world)
    assert key in str(caught.value) and says in str(caught.value)


def test_any_token_count_works_with_emulation_or_high_precision_weight_gradients():
    odd = ["--training.local_batch_size=3", "--training.seq_len=8", FLOAT8]
    assert job([*WIDE, *odd, RECIPE + "rowwise_with_gw_hp"], 1)
    assert job([*WIDE, *odd, "--quantize.linear.float8.emulate"], 1)


def test_placements_list_converted_layers():
    argv = ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    plain = describe(job([*WIDE, *argv], 4), 4).splitlines()
    found = describe(job([*WIDE, *argv, FLOAT8, AG], 4), 4).splitlines()
    assert [line for line in found if line in plain] == plain
    said = [line for line in found if line not in plain]
    assert said[0] == "Applied float8 to 15 of 15 linear layers (tensorwise)" and len(said) == 9


def test_notes_list_converted_layers():
    found = job([*WIDE, FLOAT8, "--quantize.linear.float8.filter_fqns=['output']", BFLOAT16], 1)
    model, table = build_model(found)
    with fake_world(found.layout) as mesh:
        lines = Float8(found).apply(model, Context(found, mesh, table, torch.device("cpu")))
    assert lines[0] == "Applied float8 to 14 of 15 linear layers (tensorwise)"
    assert lines[1].split("  ")[-1].strip() == "x 2" and "layers.*.attention.wq" in lines[1]
    assert lines[-1].endswith('bfloat16: filter_fqns has "output"')


@pytest.mark.parametrize(
    ("argv", "rounds"),
    [
        ([RECIPE + "rowwise", "--compile.enable"], True),
        ([RECIPE + "rowwise"], False),
        ([RECIPE + "rowwise", "--compile.enable", "--compile.components=['loss']"], False),
        (["--compile.enable"], False),
    ],
)
def test_compiled_rows_are_scaled_by_what_eager_norms_would_give(argv, rounds):
    """RMSNorm before float8 with scales of rows ends in NaN on a GPU without it: pytorch#150859."""
    from torch._inductor import config

    found = job([*WIDE, FLOAT8, *argv], 1)
    model, table = build_model(found)
    with config.patch(emulate_precision_casts=False), fake_world(found.layout) as mesh:
        Float8(found).apply(model, Context(found, mesh, table, torch.device("cpu")))
        assert config.emulate_precision_casts == rounds


def test_this_cpu_multiplies_float8():
    one = torch.eye(16).to(torch.float8_e4m3fn)
    scale = torch.ones(())
    product = torch._scaled_mm(one, one.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(product, torch.eye(16))


def test_old_gpu_is_refused_unless_float8_is_emulated(tmp_path, monkeypatch):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 9.0\necho 8.6\n")  # the older of two GPUs decides
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match=r"compute capability 8\.6, and float8 needs 8\.9"):
        check_device(job([*WIDE, FLOAT8], 1), "cuda", gpu_capability())
    check_device(
        job([*WIDE, FLOAT8, "--quantize.linear.float8.emulate"], 1), "cuda", gpu_capability()
    )
    check_machine(
        job([*WIDE, FLOAT8, f"--job.dump_folder={tmp_path}"], 1), "cpu", 1
    )  # the run is on the CPU
    driver.write_text("#!/bin/sh\necho 9.0\necho 8.9\n")
    check_device(job([*WIDE, FLOAT8], 1), "cuda", gpu_capability())
