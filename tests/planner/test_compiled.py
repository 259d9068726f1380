"""A compiled step's memory is planned as a real H100 took it: torch's peak, less cuBLAS's
workspaces.
"""

import pytest

from tests.jobs import QUIET, job
from tests.lanes import sample
from tests.planner.steps import plan_step
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.parallel import fsdp
from titanlite.planner.record import KINDS
from titanlite.planner.rehearse import record_step

GIB = 1 << 30
BLAS = 64 << 20
ALL = (
    "--training.seq_len=8192 --training.local_batch_size=1 --compile.enable "
    "--training.mixed_precision_param=bfloat16 --validation.no_enable"
)
NONE, BY_OPERATION = (f"--activation_checkpoint.mode={mode}" for mode in ("none", "selective"))
WIDE = "--model.flavor=8B --model.overrides.n_layers=6"
FLOAT8 = "--quantize.linear.float8.enable"
MEASURED = {
    # torch.cuda.max_memory_allocated after a step, in GiB; torch 2.11, 26 November 2026
    f"--model.flavor=1B {BY_OPERATION}": 21.98,
    f"{WIDE} {NONE}": 37.83,
    f"{WIDE} {NONE} {FLOAT8}": 37.18,
}


@pytest.mark.parametrize("options", sample(MEASURED, nightly=[*MEASURED][::2]))
def test_the_planned_peak_of_a_compiled_step_is_that_of_an_h100(options, monkeypatch):
    """They were measured while one rank had FSDP2 as several have."""
    monkeypatch.setattr(fsdp, "is_needed", lambda job: True)
    line = parse_command_line([*ALL.split(), *options.split()], {})
    compiled = job_from(line, world=1, training=True, device="cuda")
    assert (plan_step(compiled).peak + BLAS) / GIB == pytest.approx(MEASURED[options], abs=0.015)


@pytest.mark.long
def test_uneven_shards_are_gathered_and_freed_in_a_compiled_step_as_in_one_that_is_not():
    def gathered(*options: str) -> list[int]:
        argv = [*QUIET, "--model.overrides.dim=64", "--model.overrides.n_layers=2", *options]
        operations = record_step(job([*argv, "--training.mixed_precision_param=bfloat16"], 3))
        kind = KINDS.index("gathered")
        return [operation.by_kind[kind] for operation in operations.operations]

    compiled, eager = gathered("--compile.enable"), gathered()
    assert {compiled[0], compiled[-1], eager[-1]} == {0} and max(compiled) == max(eager) > 0
