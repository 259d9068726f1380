"""Step times, with a clock that the test moves, and recompilations."""

import pytest
import torch

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
    assert (clock.seconds, clock.data_seconds) == pytest.approx((10.5, 0.25))
    assert (clock.percentile(50), clock.percentile(95)) == pytest.approx((10.5, 19.05))


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
    assert clock.seconds == clock.percentile(50) == clock.percentile(95) == 2
    assert clock.data_seconds == 0


def recompiles(step_sizes: list[int], pause_sizes: list[int]) -> list[int]:
    """Return the count after each step, each with a batch of a size, and each but the last one
    followed by a pause with a batch of a size.
    """
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager", dynamic=False)
    clock = StepClock()
    counts = []
    for number, size in enumerate(step_sizes):
        compiled(torch.ones(size, 2))
        clock.step_done()
        counts.append(clock.recompiles)
        with clock.paused("validation"):
            for pause_size in pause_sizes[number : number + 1]:
                compiled(torch.ones(pause_size, 2))
    torch.compiler.reset()
    return counts


@pytest.mark.parametrize(
    ("step_sizes", "pause_sizes", "counts"),
    [([3, 3, 4, 4, 5, 3], [], [0, 0, 1, 1, 2, 2]), ([2] * 4, [3, 3, 4], [0, 0, 0, 1])],
)
def test_recompilations_are_counted_after_the_first_step_and_the_first_pause_of_a_kind(
    pool, step_sizes, pause_sizes, counts
):
    assert pool.run(recompiles, step_sizes, pause_sizes, world=1) == [counts]
