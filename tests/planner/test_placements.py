"""`titanlite config --placements` prints what a run would have, without its processes."""

import pytest

from tests.jobs import QUIET, TINY, job, trainer
from tests.lanes import sample
from tests.messages import says
from titanlite.cli import main
from titanlite.planner.placements import _parameters, describe

EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]


def placements_of_a_run(argv: list[str], folder: str) -> list[str]:
    run = trainer(argv, folder)
    return _parameters(run.parts, run.job).splitlines()


TP = "--parallelism.tensor_parallel_degree=2"
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
PP = "--parallelism.pipeline_parallel_degree=2"
GPT2 = [*QUIET, "--model.name=gpt2", "--model.overrides.n_layers=2"]


RUNS = {
    "fsdp x tp": [*EVEN, TP],
    "gpt2": [*GPT2, TP],
    "pp": [*TINY, PP, "--parallelism.pipeline_parallel_schedule=LoopedBFS"],
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
        describe(job([*EVEN, TP, REPLICAS], 8), per_node=4),
        "dp_replicate 2 x dp_shard 2 x tp 2, 8 ranks",
        "node 1: ranks 4-7",
        "dp_replicate 2: across 2 nodes, e.g. ranks 0, 4",
        "dp_shard 2: inside a node, e.g. ranks 0, 2",
        "tp 2: inside a node, e.g. ranks 0, 1",
    )


@pytest.mark.long
def test_placements_of_70b_on_256_ranks_need_one_process(capsys):
    assert main(["config", "--placements", "--config", "llama_70b.toml"]) == 0
    out = capsys.readouterr().out
    says(out, "dp_replicate 4 x dp_shard 8 x tp 8, 256 ranks")
    (row,) = [line for line in out.splitlines() if "attention.wo" in line]
    assert row.endswith("  x 80")
    says(row, "over dp_replicate,", "0 over dp_shard", "1 over tp")
