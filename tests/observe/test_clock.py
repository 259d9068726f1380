"""Step times, with a clock that the test moves, and recompilations."""

import json

import pytest
import torch

from tests.jobs import TINY, run_to_end
from titanlite.observe.clock import StepClock


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_steps_are_timed_without_what_is_paused():
    time = FakeTime()
    clock = StepClock(time)
    for seconds in range(1, 21):
        with clock.waiting_for_data():
            time.seconds += 0.25
        time.seconds += seconds - 0.25
        clock.step_done()
        with clock.paused("pause"):
            time.seconds += 1000
    assert clock.seconds == pytest.approx(10.5) and clock.data_seconds == pytest.approx(0.25)
    assert clock.percentile(50) == pytest.approx(10.5) and clock.percentile(95) == pytest.approx(
        19.05
    )


def test_an_interval_starts_without_the_time_of_logging():
    time = FakeTime()
    clock = StepClock(time)
    with clock.waiting_for_data():
        time.seconds += 5
    clock.step_done()
    time.seconds += 1000  # the sinks write
    clock.restart()
    time.seconds += 2
    clock.step_done()
    assert (clock.seconds, clock.percentile(50), clock.percentile(95), clock.data_seconds) == (
        2,
        2,
        2,
        0,
    )


def recompiles(sizes: list[int]) -> list[int]:
    """Return the count after each step; `sizes` are the batch sizes of the steps."""
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager", dynamic=False)
    clock = StepClock()
    counts = []
    for size in sizes:
        compiled(torch.ones(size, 2))
        clock.step_done()
        counts.append(clock.recompiles)
    torch.compiler.reset()
    return counts


def test_recompilations_are_counted_after_the_first_step(pool):
    assert pool.run(recompiles, [3, 3, 4, 4, 5, 3], world=1) == [[0, 0, 1, 1, 2, 2]]


def recompiles_of_pauses(sizes: list[int]) -> list[int]:
    """Return the count after each step; each is followed by a pause with a batch of one of
    `sizes`.
    """
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager", dynamic=False)
    clock = StepClock()
    counts = []
    for size in sizes:
        compiled(torch.ones(2, 2))
        clock.step_done()
        counts.append(clock.recompiles)
        with clock.paused("validation"):
            compiled(torch.ones(size, 2))
    torch.compiler.reset()
    return counts


def test_the_first_pause_of_a_kind_may_compile(pool):
    assert pool.run(recompiles_of_pauses, [3, 3, 4, 3], world=1) == [[0, 0, 0, 1]]


def test_records_have_percentiles_and_the_wait_for_data(pool, tmp_path):
    lines = pool.run(
        run_to_end, [*TINY, "--metrics.log_freq=3", "--training.steps=6"], str(tmp_path), world=1
    )
    first, *later = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert first["step_seconds"] == first["step_seconds_p50"] == first["step_seconds_p95"]
    for record in later:
        assert (
            0
            < record["step_seconds_p50"]
            < record["step_seconds_p95"]
            <= 3 * record["step_seconds"]
        )
        assert 0 < record["data_seconds"] < record["step_seconds"] and record["recompiles"] == 0
    steps = [line for line in lines[0]["log"] if line.startswith("step:")]
    assert len(steps) == 3 and all("  data: " in line and line.endswith("%") for line in steps)
