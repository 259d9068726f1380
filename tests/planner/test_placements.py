"""`titanlite config --placements` prints what a run would have, without its processes."""

import pytest

from tests.jobs import TINY, job, trainer
from tests.lanes import sample
from tests.messages import says
from tests.parallel.rows import EVEN, GPT2, HSDP, PP, SCHEDULE, TP
from titanlite.planner.placements import _parameters, describe


def placements_of_a_run(argv: list[str], folder: str) -> list[str]:
    run = trainer(argv, folder)
    return _parameters(run.parts, run.job).splitlines()


RUNS = {
    "fsdp x tp": [*EVEN, TP],
    "gpt2": [*GPT2, TP],
    "pp": [*TINY, PP, f"{SCHEDULE}LoopedBFS"],
}


@pytest.mark.parametrize("name", sample(RUNS, "fsdp x tp"))
def test_printed_placements_equal_those_of_a_run(pool, tmp_path, name):
    lines = describe(job(RUNS[name], 4), per_node=2).rpartition("\n\n")[2].splitlines()
    assert lines == pool.run(placements_of_a_run, RUNS[name], str(tmp_path), world=4)[0]


def test_the_list_of_stages_is_shown_with_placements():
    text = describe(job([*TINY, PP], 2), per_node=2)
    assert "\n1      1     layers.1, norm, output\n" in text
    assert "norm.weight" not in text.split("\n\n")[-1].split()


def test_groups_that_cross_nodes_are_named():
    says(
        describe(job([*EVEN, TP, HSDP], 8), per_node=4),
        "dp_replicate 2 x dp_shard 2 x tp 2, 8 ranks",
        "node 1: ranks 4-7",
        "dp_replicate 2: across 2 nodes, e.g. ranks 0, 4",
        "dp_shard 2: inside a node, e.g. ranks 0, 2",
        "tp 2: inside a node, e.g. ranks 0, 1",
    )
