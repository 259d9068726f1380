"""The orders of all schedules run every micro-batch through every stage, and wait as long as closed
forms say.
"""

from collections import defaultdict
from itertools import product

import pytest

from tests.messages import says
from titanlite.cli import main
from titanlite.config.pipeline_order import Action, bubble, most_kept, parse
from titanlite.config.stages import SINGLE, Stages, stages_of_ranks
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


COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def stages_of(schedule: str, ranks: int, count: int) -> Stages:
    number = ranks * (1 if schedule in SINGLE else 2)
    names = tuple((f"layers.{i}",) for i in range(number))
    return Stages(names, stages_of_ranks(schedule, ranks, number), schedule, count, 1)


def waited(rows: list[list[list[Action]]]) -> float:
    """Return the fraction of time that ranks wait if their cells of actions run as they can."""
    left = [[*row] for row in rows]
    last = max(action.stage for row in rows for cell in row for action in cell)
    ends = dict[tuple[int, str, int], float]()
    clocks = [0.0] * len(rows)

    def starts(action: Action, own: set[int]) -> list[float | None]:
        """Return when what the action waits for has ended, None for what has not."""
        stage, kind, number = action
        if kind == "W" or stage in own:
            return []
        if kind == "F":
            return [ends.get((stage - 1, "F", number))] if stage else []
        return [ends.get((stage + 1, "B", number))] if stage < last else []

    while any(left):
        before = len(ends)
        for rank, row in enumerate(left):
            while row:
                stages = [action.stage for action in row[0]]
                inputs = [
                    each
                    for place, action in enumerate(row[0])
                    for each in starts(action, {*stages[:place]})
                ]
                if None in inputs:
                    break
                for action in row.pop(0):
                    known = [each for each in starts(action, set()) if each is not None]
                    clocks[rank] = max([clocks[rank], *known]) + COST[action.kind]
                    kind = "B" if action.kind == "I" else action.kind
                    ends[action.stage, kind, action.micro_batch] = clocks[rank]
        assert len(ends) > before or not any(left), "the actions wait for each other forever"
    cost = sum(COST[action.kind] for row in rows for cell in row for action in cell)
    return 1 - cost / (len(rows) * max(clocks))


@pytest.mark.parametrize("schedule", KEPT)
def test_each_micro_batch_runs_through_all_stages_once_and_waits_as_the_closed_form_says(schedule):
    for ranks, count in product((2, 4), (8, 16)):
        stages = stages_of(schedule, ranks, count)
        rows = [[parse(cell) for cell in row] for row in orders(stages)]
        kinds = defaultdict[tuple[int, int], str](str)
        for rank, row in enumerate(rows):
            for action in (action for cell in row for action in cell):
                kinds[action.stage, action.micro_batch] += action.kind
                assert action.stage in stages.ranks[rank]
        assert kinds.keys() == {*product(range(len(stages.names)), range(count))}
        assert {*kinds.values()} <= {"FB", "FIW"}
        assert bubble(stages) == pytest.approx(waited(rows))
    assert [most_kept(row) for row in orders(stages_of(schedule, 4, 16))] == KEPT[schedule]


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
