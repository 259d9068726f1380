"""Parameters in host memory on a GPU: checkpoints hold them, and fill them."""

from __future__ import annotations

import pytest
import torch

from titanlite.checkpoint.load import load_tensors

OPTIONS = (
    "--training.enable_cpu_offload --checkpoint.enable --checkpoint.interval=1 "
    "--checkpoint.async_mode=async_with_pinned_mem "
    "--optimizer.weight_decay=0 --debug.seed=3 --training.seq_len=64"
).split()


@pytest.mark.nightly
def test_a_resume_fills_offloaded_parameters(train_on_gpus, tmp_path):
    """A fake GPU gives no gradient, so that every step keeps the initial values."""
    for steps in (1, 2):
        ran = train_on_gpus(tmp_path, 1, [*OPTIONS, f"--training.steps={steps}"])
    assert "resumed step 1" in ran.out
    first, second = (load_tensors(ran.folder / f"checkpoint/step-{step}") for step in (1, 2))
    assert first["model.layers.0.attention.wq.weight"].std() > 0
    for name, tensor in first.items():
        if name.startswith("model."):
            assert torch.equal(tensor, second[name]), name
