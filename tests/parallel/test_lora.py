"""LoRA: only adapters are trained, and peft reads what is written.

test_runs.py proves that they are trained alike on every mesh.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import FLOAT64, trainer, weights
from tests.messages import says
from tests.parallel.rows import EVEN, LORA, TP
from titanlite import cli
from titanlite.parallel.lora import merge
from titanlite.registry.lora import is_adapter
from titanlite.verify import command
from titanlite.verify.measurements import GRADIENT
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import RowRunner
from titanlite.verify.table import Row


def trained(argv: list[str], folder: str) -> tuple[dict, dict]:
    """Return the weights before and after a run."""
    run = trainer(argv, folder)
    before = weights(run)
    run.train()
    return before, weights(run)


def test_only_adapters_are_trained(pool, tmp_path):
    argv = [*LORA, *FLOAT64, "--lr_scheduler.warmup_steps=0"]
    ((before, after),) = pool.run(trained, argv, str(tmp_path), world=1)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if is_adapter(name)}
    assert len(changed) == 2 * 7 * 2, "A and B of seven matrices in each of two blocks"
    for name in changed:
        assert name.endswith("lora_A") or not before[name].any()
    first = [name for name in changed if name.endswith("attention.wq.lora_A")]
    a = torch.cat([before[name].flatten() for name in first])
    assert 0.5 < a.std() * (3 * 16) ** 0.5 < 1.5, "the variance of kaiming_uniform"


def test_a_merge_is_rounded_once():
    torch.manual_seed(0)
    weight, a, b = (torch.randn(64, 64).bfloat16() for _ in range(3))
    exact = weight.double() + 0.5 * (b.double() @ a.double())
    assert torch.equal(merge(weight, a, b, 0.5), exact.bfloat16())


def logits(folder: Path, tokens: torch.Tensor, adapters: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters:
        peft: Any = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.long
def test_a_trained_base_takes_adapters_and_is_exported_merged_and_for_peft(pool, tmp_path, capsys):
    """A run trains the base, a second one adapters beside it on two ranks; its step, merged, and
    its adapters in peft beside the base's export have the same logits."""
    pytest.importorskip("transformers")
    base, tuned, out = (tmp_path / name for name in ("base", "tuned", "out"))
    saving = "--checkpoint.enable"
    pool.run(trained, [*EVEN, saving], str(base), world=1)
    argv = [
        *LORA,
        "--lr_scheduler.warmup_steps=0",
        f"--checkpoint.initial_load_path={base}/checkpoint",
        TP,
    ]
    pool.run(trained, [*argv, saving], str(tuned), world=2)

    def export(run: Path, name: str, *more: str) -> int:
        return cli.main(["checkpoint", "export", f"{run}/checkpoint", str(out / name), *more])

    peft = "--format=peft"
    assert export(base, "base") == export(tuned, "merged") == export(tuned, "adapters", peft) == 0
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    merged, alone = logits(out / "merged", tokens), logits(out / "base", tokens)
    assert (merged - alone).abs().max() > 1e-3
    config = json.loads((out / "adapters/adapter_config.json").read_text())
    assert config["r"] == 3 and "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert export(base, "no", peft) == 2
    says(capsys.readouterr().err, "no adapters")
    beside = logits(out / "base", tokens, out / "adapters")
    assert (merged - beside).abs().max() < 1e-6


@pytest.mark.long
def test_a_row_of_verify_proves_the_gradients_of_adapters(pool, tmp_path):
    model = read_model(["--lora.rank=3", "--lora.dropout=0.5"], {})
    assert "frozen" not in model.variants and "lora.rank 3" in model.name
    assert not any(row.extra == "imported" for row in command.table(model).values())
    result = RowRunner(model, tmp_path, pool, pool)(Row("tp2"))
    assert result.passed, f"{result.what} {result.error:.1e}"
    [reference] = tmp_path.glob("*.pt")
    compared = torch.load(reference)[GRADIENT]
    assert compared and all(map(is_adapter, compared))
