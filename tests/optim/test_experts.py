"""Experts are on a mesh of their own, which every optimizer takes beside that of other
parameters.
"""

from __future__ import annotations

import pytest
import torch

from tests.jobs import FLOAT64, MOE, relative_error, trainer, weights
from tests.lanes import sample


def weights_after_steps(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    run = trainer(argv, folder)
    run.train()
    return weights(run)


OPTIMIZERS = {
    "fused": "",
    "foreach": "--optimizer.implementation=foreach",
    "loop": "--optimizer.implementation=for-loop",
    "SGD": "--optimizer.name=SGD --optimizer.implementation=foreach",
    "bfloat16 state": "--optimizer.state_dtype=bfloat16",
    "Muon, bfloat16 state": "--optimizer.name=Muon --optimizer.state_dtype=bfloat16",
}


@pytest.mark.parametrize("name", sample(OPTIMIZERS, "Muon, bfloat16 state"))
def test_steps_equal_one_process(pool, tmp_path, name):
    """One group of parameters has both meshes; 3 experts a rank on 2 ranks of FSDP are split along
    dimension 1.
    """
    argv = [*MOE, *FLOAT64, *OPTIMIZERS[name].split(), "--training.global_batch_size=4"]
    argv += ["--model.overrides.experts=6", "--lr_scheduler.warmup_steps=0"]
    argv += ["--optimizer.eps=1e-3"] * (name != "SGD")
    one = [*argv, "--training.local_batch_size=4"]
    expected = pool.run(weights_after_steps, one, str(tmp_path / "one"), world=1)[0]
    argv += [f"--parallelism.{kind}_parallel_degree=2" for kind in ("expert", "tensor")]
    for result in pool.run(weights_after_steps, argv, str(tmp_path / "many"), world=4):
        for weight, wanted in expected.items():
            assert relative_error(result[weight], wanted) <= 1e-10, weight
