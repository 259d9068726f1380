"""Plans of configs that nobody chose: drawn by number from the columns of `titanlite verify`'s
table and from further keys. TITANLITE_DRAWS is how many, TITANLITE_SEED the number of the first.
"""

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.planner.plan_check import MODELS, NAMED, PlanRow, check
from tests.planner.steps import summed
from titanlite.config.job import Job
from titanlite.config.load import ConfigError
from titanlite.planner.depth import _shallow_jobs, plan_ranks
from titanlite.planner.record import add_up
from titanlite.planner.rehearse import record_step
from titanlite.verify.model_under_test import ModelUnderTest, build_job, read_model
from titanlite.verify.table import Row, choices, is_valid

SEED = int(os.environ.get("TITANLITE_SEED", "1"))
DRAWS = os.environ.get("TITANLITE_DRAWS")
LANE = () if DRAWS else pytest.mark.nightly
"""Draws that were asked for are in every lane."""
NUMBERS = [pytest.param(number, marks=LANE) for number in range(SEED, SEED + int(DRAWS or "1"))]
MORE = [
    "--optimizer.name=SGD",
    "--optimizer.name=Muon",
    "--optimizer.state_dtype=bfloat16",
    "--optimizer.implementation=foreach",
    "--fault.on_nonfinite=skip",
    "--training.loss_chunks=4",
    "--training.local_batch_size=3",
    "--training.enable_cpu_offload",
    "--parallelism.defer_gradient_sync=true",
    "--parallelism.fsdp_blocks_per_group=2",
    "--parallelism.fsdp_blocks_per_group=3",
    "--parallelism.fsdp_keep_whole=['*norm*']",
    "--parallelism.fsdp_forward_prefetch=3",
    "--parallelism.fsdp_backward_prefetch=2",
]


@cache
def model_of(name: str, layers: int) -> ModelUnderTest:
    named, *_ = NAMED.get(name, [f"--model.name={name}"])
    overrides = [f"--model.overrides.{field}" for field in MODELS[name].split()]
    return read_model([*named.split(), *overrides, f"--model.overrides.n_layers={layers}"], {})


def drawn(
    number: int, layers: range, folder: Path, is_wanted: Callable[[Job], bool]
) -> tuple[PlanRow, Job]:
    """Draw a row for at most 4 ranks that the config's rules allow."""
    chance = random.Random(number)
    while True:
        name = chance.choice([*MODELS])
        model = model_of(name, chance.choice(layers))
        layout = chance.choice([*model.layouts])
        of = choices([layout], [*model.variants], ["off"], **model.layouts[layout])
        choice = {column: chance.choice(values) for column, values in of.items()}
        choice["compile"] = chance.choice(["off"] * 9 + [choice["compile"]])
        row = Row(**choice)
        more = (*chance.sample(MORE, chance.randrange(4)), *model.overrides[-1:])
        if row.mesh.world > 4 or not is_valid(choice):
            continue
        try:
            job = build_job([*model.command_line(row, folder), *more], row.mesh.world)
        except ConfigError:
            continue
        if is_wanted(job):
            return PlanRow(row, None, more, name), job


def is_extrapolated(job: Job) -> bool:
    return job.layout.pp == 1 and _shallow_jobs(job, 0)[1] > 0


@pytest.mark.parametrize("number", NUMBERS)
def test_two_shallow_rehearsals_equal_a_whole_one(number, tmp_path):
    plan, deep = drawn(number, range(6, 11), tmp_path, is_extrapolated)
    assert [*map(summed, plan_ranks(deep))] == [summed(add_up(record_step(deep)))], plan


@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_equals_real_processes_to_the_byte(number, pool, tmp_path):
    plan, _ = drawn(number, range(2, 5), tmp_path, bool)
    assert check(plan, tmp_path, pool) == [], plan
