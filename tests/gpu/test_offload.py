"""Parameters in host memory on a GPU: checkpoints hold them, and fill them."""

from __future__ import annotations

import pytest
import torch

from tests.lanes import sample
from titanlite.checkpoint.load import load_tensors

OPTIONS = (
    "--training.enable_cpu_offload --checkpoint.enable --checkpoint.interval=1 "
    "--optimizer.weight_decay=0 --debug.seed=3 --training.seq_len=64"
).split()


@pytest.mark.parametrize(
    "mode", sample(["disabled", "async_with_pinned_mem"], long=["async_with_pinned_mem"])
)
def test_a_resume_fills_offloaded_parameters(train_on_gpus, tmp_path, mode):
    """A fake GPU gives no gradient, so that every step keeps the initial values."""
    argv = [*OPTIONS, f"--checkpoint.async_mode={mode}"]
    for steps in (1, 2):
        ran = train_on_gpus(tmp_path, 1, [*argv, f"--training.steps={steps}"])
        assert ran.code == 0, ran.out
    assert "resumed step 1" in ran.out
    first, second = (load_tensors(ran.folder / f"checkpoint/step-{step}") for step in (1, 2))
    assert first["model.layers.0.attention.wq.weight"].std() > 0
    for name, tensor in first.items():
        if name.startswith("model."):
            assert torch.equal(tensor, second[name]), name
