"""Experts are on a mesh of their own, which every optimizer takes beside that of other
parameters.
"""

import pytest

from tests.jobs import FLOAT64, MOE, require_close, run_to_end
from tests.lanes import sample

CASES = {  # experts, and an optimizer
    "AdamW, foreach": (6, "--optimizer.implementation=foreach"),
    "Muon": (4, "--optimizer.name=Muon"),
    "Muon, bfloat16 state": (6, "--optimizer.name=Muon --optimizer.state_dtype=bfloat16"),
}


@pytest.mark.parametrize("case", sample(CASES, "Muon, bfloat16 state"))
def test_steps_equal_one_process(pool, tmp_path, case):
    """One group of parameters has both meshes; 3 experts a rank on 2 ranks of FSDP are split along
    dimension 1, 2 experts along dimension 0.
    """
    experts, options = CASES[case]
    argv = [*MOE, *FLOAT64, *options.split(), f"--model.overrides.experts={experts}"]
    argv += ["--training.global_batch_size=4", "--lr_scheduler.warmup_steps=0"]
    argv += ["--optimizer.eps=1e-3"]
    one = [*argv, "--training.local_batch_size=4"]
    expected = pool.run(run_to_end, one, str(tmp_path / "one"), world=1)[0]
    argv += [f"--parallelism.{kind}_parallel_degree=2" for kind in ("expert", "tensor")]
    for rank in pool.run(run_to_end, argv, str(tmp_path / "many"), world=4):
        require_close(rank["weights"], expected["weights"], 1e-10)
