"""LoRA: adapters are trained alike on every mesh, all else stays, and peft reads what is
written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import FLOAT64, TINY, full, job, trainer
from tests.lanes import sample
from tests.runs import records
from titanlite import cli
from titanlite.config.load import ConfigError
from titanlite.registry.lora import is_adapter
from titanlite.verify import command
from titanlite.verify.measurements import GRADIENT
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import RowRunner
from titanlite.verify.table import Row

LORA = [*TINY, "--lora.rank=3", "--lora.alpha=12", "--optimizer.lr=0.01"]
LORA += ["--model.overrides.n_kv_heads=2", "--lr_scheduler.warmup_steps=0", "--debug.seed=3"]
DEGREE = "--parallelism."
LAYOUTS = {
    "dp2": [],
    "tp2": [f"{DEGREE}tensor_parallel_degree=2"],
    "pp2": [f"{DEGREE}pipeline_parallel_degree=2"],
    "dp2 x tp2": [f"{DEGREE}tensor_parallel_degree=2"],
    "hsdp 2 x 2, recomputed": [
        f"{DEGREE}data_parallel_replicate_degree=2",
        "--activation_checkpoint.mode=full",
    ],
    "dp2 x cp2": [f"{DEGREE}context_parallel_degree=2"],
}


def trained(argv: list[str], folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; return the losses, and the parameters of this rank's parts, whole."""
    run = trainer(argv, folder)
    run.train()
    losses = [record["loss"] for record in records(Path(folder))]
    parameters = {}
    for part in run.parts:
        for name, parameter in part.named_parameters():
            parameters[name] = full(parameter)
    return losses, parameters


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    argv = [*LORA, *FLOAT64, "--training.global_batch_size=4", "--training.local_batch_size=4"]
    return pool.run(trained, argv, str(folder), world=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_trained_as_by_one_process(pool, tmp_path, alone, layout):
    world = 4 if "x" in layout else 2
    sizes = ["--training.global_batch_size=4", "--training.local_batch_size=1"]
    if layout.startswith("pp"):
        sizes = ["--training.local_batch_size=4"]
    argv = [*LORA, *FLOAT64, *sizes, *LAYOUTS[layout]]
    ranks = pool.run(trained, argv, str(tmp_path), world=world)
    losses, expected = alone
    assert ranks[0][0] == pytest.approx(losses, rel=1e-12)
    found: dict[str, torch.Tensor] = {}
    for _, parameters in ranks:
        found |= parameters
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


def test_only_adapters_are_trained(pool, tmp_path, alone):
    _, after = alone
    argv = [*LORA, *FLOAT64, "--training.steps=1", "--optimizer.lr=1e-300"]
    before = pool.run(trained, argv, str(tmp_path), world=1)[0][1]
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if is_adapter(name)}
    assert len(changed) == 2 * 7 * 2, "A and B of seven matrices in each of two blocks"
    b = [before[name] for name in changed if name.endswith("lora_B")]
    assert max(value.abs().max() for value in b) < 1e-290, "zero, but for one tiny update"
    first = [name for name in changed if name.endswith("attention.wq.lora_A")]
    a = torch.cat([before[name].flatten() for name in first])
    assert 0.5 < a.std() * (3 * 16) ** 0.5 < 1.5, "the variance of kaiming_uniform"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lora.patterns=['*.w9']", "matches no matrix; there is layers.*.attention.wq"),
        ("--lora.patterns=[]", "no matrix has an adapter, so nothing"),
        ("--model.freeze=['output.*']", "freezes all but its adapters"),
        ("--lora.dropout=0.1 --parallelism.tensor_parallel_degree=2", "would drop other inputs"),
        ("--quantize.linear.float8.enable", "float8 converts no layer with an adapter"),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused(options, message):
    with pytest.raises(ConfigError) as error:
        job([*LORA, *options.replace("'", '"').split()], world=2)
    assert message in str(error.value)


def saved_run(argv: list[str], folder: str) -> None:
    run = trainer([*argv, "--checkpoint.enable"], folder)
    run.train()


def logits(folder: Path, tokens: torch.Tensor, adapters: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters:
        peft: Any = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        return model.eval()(tokens).logits


def test_a_trained_base_takes_adapters_and_is_exported_merged_and_for_peft(pool, tmp_path, capsys):
    """A run trains the base, a second one adapters beside it on two ranks; its step, merged, and
    its adapters in peft beside the base's export have the same logits."""
    pytest.importorskip("transformers")
    base, tuned, out = (tmp_path / name for name in ("base", "tuned", "out"))
    heads = "--model.overrides.n_kv_heads=2"
    pool.run(saved_run, [*TINY, heads], str(base), world=1)
    argv = [*LORA, f"--checkpoint.initial_load_path={base}/checkpoint"]
    pool.run(saved_run, [*argv, f"{DEGREE}tensor_parallel_degree=2"], str(tuned), world=2)
    export = ["checkpoint", "export"]
    assert cli.main([*export, str(base / "checkpoint"), str(out / "base")]) == 0
    step = str(tuned / "checkpoint")
    assert cli.main([*export, step, str(out / "merged")]) == 0
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    merged = logits(out / "merged", tokens)
    assert (merged - logits(out / "base", tokens)).abs().max() > 1e-3
    assert cli.main([*export, step, str(out / "adapters"), "--format=peft"]) == 0
    config = json.loads((out / "adapters/adapter_config.json").read_text())
    assert config["r"] == 3 and "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert cli.main([*export, str(base / "checkpoint"), str(out / "no"), "--format=peft"]) == 2
    assert "the run has no adapters" in capsys.readouterr().err
    beside = logits(out / "base", tokens, out / "adapters")
    assert (merged - beside).abs().max() < 1e-6


@pytest.mark.parametrize("layout", sample(("tp2", "dp2", "pp2", "dp2 x tp2"), "tp2", long=["pp2"]))
def test_rows_of_verify_prove_the_gradients_of_adapters(pool, layout, tmp_path):
    model = read_model(["--lora.rank=3", "--lora.dropout=0.5"], {})
    assert "frozen" not in model.variants and "lora.rank 3" in model.name
    assert not any(row.extra == "imported" for row in command.table(model).values())
    result = RowRunner(model, tmp_path, pool, pool)(Row(layout))
    assert result.passed, f"{result.what} {result.error:.1e}"
    [reference] = tmp_path.glob("*.pt")
    compared = torch.load(reference)[GRADIENT]
    assert compared and all(map(is_adapter, compared))
