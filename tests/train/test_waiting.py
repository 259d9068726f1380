"""A step that is not logged waits for no device."""

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.jobs import TINY, job, trainer
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import process_group
from titanlite.train.trainer import Trainer

STEPS = ["--training.steps=5", "--metrics.log_freq=100"]  # logged: the first and the last
TECHNIQUES = {
    "plain": "",
    "narrow state": "--optimizer.state_dtype=bfloat16",
    "Muon": "--optimizer.name=Muon",
    "Muon, narrow": "--optimizer.name=Muon --optimizer.state_dtype=bfloat16",
    "SGD": "--optimizer.name=SGD",
    "chunks, recomputed": "--training.loss_chunks=4 --activation_checkpoint.mode=selective",
    "bfloat16": "--training.dtype=bfloat16 --training.mixed_precision_param=bfloat16 --training.global_batch_size=8",
    "mixed precision": "--training.mixed_precision_param=bfloat16",  # on one GPU too FSDP2 casts for it
}
READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2"}
"""Operations whose result, or its size, the host must wait for."""


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def reads_of_steps(argv: list[str], folder: str) -> list[Counter[str]]:
    """What each step read."""
    run = trainer([*argv, *STEPS], folder)
    step, found = run.train_step, []

    def watched() -> None:
        with Reads() as reads:
            step()
        found.append(reads.seen)

    run.train_step = watched  # type: ignore[method-assign]
    run.train()
    return found


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_host_reads_nothing_but_the_flag_of_the_step_before(pool, tmp_path, technique):
    """On a GPU that flag is in host memory, where it was copied to without waiting."""
    for found in pool.run(reads_of_steps, [*TINY, *TECHNIQUES[technique].split()], str(tmp_path), world=2):
        assert found[2] == found[3] == {"_local_scalar_dense": 1}, found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has something to wait for")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_no_call_of_a_step_synchronises_with_a_gpu(tmp_path, technique, compiled):
    argv = [*TINY, *STEPS, *TECHNIQUES[technique].split(), "--job.device=cuda", f"--job.dump_folder={tmp_path}"]
    found = job([*argv, *["--compile.enable"] * compiled], 1)
    place, device = RankInfo(0, 1, 0, "here"), torch.device("cuda", 0)
    with process_group(place, device, found.config.comm, Path(tmp_path), {}):
        run = Trainer(found, place, device, logging.Logger("quiet"))
        step = run.train_step

        def watched() -> None:
            torch.cuda.set_sync_debug_mode("error" if run.step in (3, 4) else "default")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        run.train_step = watched  # type: ignore[method-assign]
        run.train()
