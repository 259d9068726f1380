"""`titanlite config --placements` prints what a run would have, without its processes."""

import subprocess
import sys

import pytest

from tests.jobs import QUIET, TINY, job, trainer
from tests.runs import environment
from titanlite.planner.placements import _parameters, describe

EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]


def placements_of_a_run(argv: list[str], folder: str) -> list[str]:
    run = trainer(argv, folder)
    return _parameters(run.parts, run.job).splitlines()


@pytest.mark.parametrize(
    "argv",
    [
        [*EVEN, "--parallelism.tensor_parallel_degree=2"],
        [*EVEN, "--parallelism.data_parallel_replicate_degree=2"],
        [
            *QUIET,
            "--model.name=gpt2",
            "--parallelism.tensor_parallel_degree=2",
            "--model.overrides.n_layers=2",
        ],
        [
            *EVEN,
            "--model.overrides.tied",
            "--parallelism.tensor_parallel_degree=4",
            "--model.overrides.n_heads=4",
        ]
        + ["--model.overrides.n_kv_heads=4"],
        [
            *TINY,
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=LoopedBFS",
        ],
    ],
    ids=["fsdp x tp", "hsdp", "gpt2", "tied, tp only", "pp"],
)
def test_printed_placements_equal_those_of_a_run(pool, tmp_path, argv):
    lines = describe(job(argv, 4), per_node=2).rpartition("\n\n")[2].splitlines()
    assert lines == pool.run(placements_of_a_run, argv, str(tmp_path), world=4)[0]


def test_the_list_of_stages_is_shown_with_placements():
    text = describe(job([*TINY, "--parallelism.pipeline_parallel_degree=2"], 2), per_node=2)
    assert (
        "\n1      1     layers.1, norm, output\n" in text
        and "norm.weight" not in text.split("\n\n")[-1].split()
    )


def test_groups_that_cross_nodes_are_named():
    argv = [
        *EVEN,
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.data_parallel_replicate_degree=2",
    ]
    text = describe(job(argv, 8), per_node=4)
    assert "mesh: dp_replicate 2 x dp_shard 2 x tp 2, 8 ranks" in text
    assert "nodes: 2, of 4 ranks each" in text and "node 1: ranks 4-7" in text
    assert "dp_replicate 2: across 2 nodes, e.g. ranks 0, 4" in text
    assert (
        "dp_shard 2: inside a node, e.g. ranks 0, 2" in text
        and "tp 2: inside a node, e.g. ranks 0, 1" in text
    )


def test_placements_of_70b_on_256_ranks_need_one_process():
    command = [
        sys.executable,
        "-m",
        "titanlite",
        "config",
        "--placements",
        "--config",
        "llama_70b.toml",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    assert "dp_replicate 4 x dp_shard 8 x tp 8, 256 ranks" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "attention.wo" in line]
    assert (
        row.split("  ")[-1] == "x 80"
        and "replicated over dp_replicate, dim 0 over dp_shard, dim 1 over tp" in row
    )
