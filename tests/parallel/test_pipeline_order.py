"""The orders of all schedules run every micro-batch through every stage, and wait as long as closed
forms say.
"""

from itertools import product

import pytest

from tests.messages import says
from titanlite.cli import main
from titanlite.config.pipeline_order import COST, bubble, faults_of, most_kept, stages_of
from titanlite.config.stages import SINGLE, V_SHAPED, Stages, stages_of_ranks
from titanlite.parallel.pipeline_parallel import orders

KEPT = {
    "GPipe": [16, 16, 16, 16],
    "1F1B": [4, 3, 2, 1],
    "Interleaved1F1B": [11, 9, 7, 5],
    "LoopedBFS": [32, 32, 32, 32],
    "InterleavedZeroBubble": [8, 8, 8, 8],
    "ZBVZeroBubble": [8, 8, 8, 8],
    "DualPipeV": [9, 9, 9, 9],
}
"""The most activations of each of four ranks with 16 micro-batches, as docs say."""


def order_of(schedule: str, ranks: int, count: int) -> list[list[str]]:
    number = ranks * (1 if schedule in SINGLE else 2)
    names = tuple((f"layers.{i}",) for i in range(number))
    stages = stages_of_ranks(schedule, ranks, number)
    found = orders(Stages(names, stages, schedule, count, 1))
    assert stages_of(found) == stages
    return found


@pytest.mark.parametrize("schedule", KEPT)
def test_each_micro_batch_runs_through_all_stages_once_and_waits_as_the_closed_form_says(schedule):
    for ranks, count in product((2, 4), (8, 16)):
        found = order_of(schedule, ranks, count)
        assert list(faults_of(found, ranks, count)) == []
        work = count if schedule in SINGLE else 2 * count
        if schedule in ("InterleavedZeroBubble", *V_SHAPED):
            work *= 3  # only thirds of an action are waited for
        assert bubble(found, COST) == pytest.approx((ranks - 1) / (work + ranks - 1))
    assert [most_kept(row) for row in order_of(schedule, 4, 16)] == KEPT[schedule]


def test_longer_actions_make_ranks_wait_longer():
    row = order_of("1F1B", 2, 2)
    assert row == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert bubble(row, {"F": 1, "B": 2}) == pytest.approx(1 / 3)
    assert bubble(row, {"F": 1, "B": 0}) == pytest.approx(1 / 3)
    split = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    assert bubble(split, {"F": 1, "I": 1, "W": 4}) == pytest.approx(2 / 8)


def test_config_prints_stages_actions_and_bubble(capsys):
    degree = ["config", "--pipeline", "--world=8", "--parallelism.pipeline_parallel_degree=4"]
    assert main([*degree, "--training.local_batch_size=4"]) == 0
    out = capsys.readouterr().out
    says(out, "1F1B", "4 stages", "4 ranks", "4 micro-batches", "42.9%")
    says(out, "1      1     layers.1, layers.2\n")
    says(out, "\n3     1     3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3\n")
    assert main(["config", "--pipeline"]) == 2
    says(capsys.readouterr().err, "pipeline_parallel_degree is 1")
    assert main([*degree, "--model.flavor=8B", "--model.hf_assets_path=tests"]) == 0
    says(capsys.readouterr().out, "1      1     layers.8 … layers.16\n")
