"""The planner's peak beside torch's own MemTracker, which counts storages by itself."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from tests.jobs import TINY, job, trainer
from tests.lanes import sample
from tests.parallel.rows import GPT2
from titanlite.data.loader import MicroBatch
from titanlite.planner.rehearse import blank_batches, record_step
from titanlite.train.trainer import Trainer


def tracked(argv: list[str], folder: str) -> dict[str, int]:
    """Train on this rank; return the bytes at the peak of two steps, which is one of the second:
    the optimizer has its state then.
    """
    run = trainer(argv, folder)
    runner, batches = run.runner, blank_batches(run.runner)
    tracker = MemTracker()
    tracker.track_external(*run.parts, runner.optimizer, *(batch.rows for batch in batches))
    with tracker:
        for number in (1, 2):
            tracker.reset_mod_stats()
            _step(run, number, batches)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): size for kind, size in peak.items()}


def _step(run: Trainer, number: int, batches: list[MicroBatch]) -> None:
    own_tokens = run.runner.count_valid(batches)
    valid = run.guard.exchange(own_tokens)
    loss = run.runner.forward_backward(number, batches, valid)
    norm = run.runner.gradient_norm()
    run.runner.update(number, norm, run.guard.record(number, loss, norm))


@pytest.mark.parametrize("argv", sample([TINY, GPT2], TINY), ids=["llama3", "gpt2"])
def test_torchs_own_tracker_sees_the_peak_of_the_plan(pool, tmp_path, argv):
    (found,) = pool.run(tracked, argv, str(tmp_path), world=1)
    assert found["Total"] == record_step(job(argv, 1), as_on_cuda=False).peak, found
