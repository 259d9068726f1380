"""A step that is not logged does not wait for the device."""

import logging
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.jobs import TINY, job, trainer
from tests.lanes import needs_gpus, sample
from tests.parallel.rows import operations, own_batches
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import process_group
from titanlite.train.loss import count_valid
from titanlite.train.trainer import Trainer

STEPS = ["--training.steps=5", "--metrics.log_freq=100"]  # logged: the first and the last
TECHNIQUES = {
    "plain": "",
    "Muon, bfloat16 state": "--optimizer.name=Muon --optimizer.state_dtype=bfloat16",
    "SGD": "--optimizer.name=SGD",
    "chunks, recomputed": "--training.loss_chunks=4 --activation_checkpoint.mode=selective",
    "bfloat16": (
        "--training.dtype=bfloat16 --training.mixed_precision_param=bfloat16 "
        "--training.global_batch_size=8"
    ),
    "experts": "--model.name=qwen3 --model.flavor=debugmodel_moe --model.overrides.expert_dim=8",
    "experts, bias": (
        "--model.name=qwen3 --model.flavor=debugmodel_moe --model.overrides.balance=bias"
    ),
    "mixed precision": "--training.mixed_precision_param=bfloat16",
}
SKIPPING = "--fault.on_nonfinite=skip --fault.spike_sigma=6.0 --fault.on_spike=skip"
JUDGED = {
    "skips": SKIPPING,
    "skips, SGD": f"{SKIPPING} --optimizer.name=SGD",
    "skips, Muon": f"{SKIPPING} --optimizer.name=Muon",
    "skips, bfloat16 state": f"{SKIPPING} --optimizer.state_dtype=bfloat16",
}
READS = "_local_scalar_dense is_nonzero nonzero equal masked_select unique _unique2".split()
"""Operations that make the host wait for their result or its size."""


def reads_of_steps(argv: list[str], folder: str) -> list[Counter[str]]:
    """Count the reads of each step."""
    run = trainer([*argv, *STEPS], folder)
    original, counts = run.train_step, []

    def counted() -> None:
        with operations() as seen:
            original()
            run.guard.read()
        names = [func.overloadpacket.__name__ for func, *_ in seen]
        counts.append(Counter(name for name in names if name in READS))

    run.train_step = counted  # type: ignore[method-assign]
    run.train()
    return counts


@pytest.mark.parametrize(
    "technique",
    sample([*TECHNIQUES, *JUDGED], "skips"),
)
def test_the_host_reads_only_the_flags_that_came_with_the_valid_tokens(pool, tmp_path, technique):
    """On a GPU these were copied to host memory without waiting; where steps are judged, so were
    the gradient norm, the loss and their limits.
    """
    argv = [*TINY, *(TECHNIQUES | JUDGED)[technique].split()]
    for counts in pool.run(reads_of_steps, argv, str(tmp_path), world=2):
        read = 6 if technique in JUDGED else 2
        assert counts[2] == counts[3] == {"_local_scalar_dense": read}, counts


def exchange_in_turn(argv: list[str], folder: str) -> list[str]:
    """Start the second rank's exchange after the first one's has returned; name what comes next."""
    run = trainer(argv, folder)
    turns: Any = dist.new_group(timeout=timedelta(seconds=20))
    order: list[str] = []
    batches = own_batches(run)
    if dist.get_rank() == 1:
        dist.barrier(turns)
    valid_tokens = run.guard.exchange(count_valid(torch.stack([each.labels for each in batches])))
    if dist.get_rank() == 0:
        dist.barrier(turns)

    def waited() -> torch.Tensor:
        order.append("wait")
        return valid_tokens()

    run.parts[0].register_forward_hook(lambda *_: order.append("model"))
    run.runner.forward_backward(1, batches, waited)
    return order


def test_the_sum_of_valid_tokens_is_waited_for_after_the_forward_pass(pool, tmp_path):
    for order in pool.run(exchange_in_turn, TINY, str(tmp_path), world=2):
        assert order[:2] == ["model", "wait"]


class Copies(TorchFunctionMode):
    """Counts what hands a tensor's values to Python; on a CPU no operation shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := func.__name__) in "tolist item numpy cpu __bool__ __int__ __float__".split():
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def copies_of_steps(argv: list[str], folder: str) -> list[Counter[str]]:
    """Count the copies to the host in the forward and backward pass of each step."""
    run = trainer([*argv, *STEPS], folder)
    original, counts = run.runner.forward_backward, []

    def counted(*args: Any) -> torch.Tensor:
        with Copies() as copies:
            loss = original(*args)
        counts.append(copies.counts)
        return loss

    run.runner.forward_backward = counted  # type: ignore[method-assign]
    run.train()
    return counts


EP = "--parallelism.expert_parallel_degree=2"


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ("", {}),
        (f"{EP} --activation_checkpoint.mode=selective", {"tolist": 2}),
    ],
)
def test_the_host_reads_once_per_layer_with_experts_where_they_exchange_tokens(
    pool, tmp_path, options, copies
):
    """The sizes of all-to-alls are numbers of the host. Without expert parallel nothing is read."""
    argv = [*TINY, *TECHNIQUES["experts"].split(), *options.split()]
    for counts in pool.run(copies_of_steps, argv, str(tmp_path), world=2):
        assert counts[2] == counts[3] == copies


@needs_gpus(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("technique", [*TECHNIQUES, *JUDGED])
def test_no_call_of_a_step_synchronizes_with_a_gpu(tmp_path, technique, compiled):
    options = (TECHNIQUES | JUDGED)[technique].split()
    if technique.startswith("experts"):
        # In float32 grouped_mm is a loop, whose sizes the host reads
        options.append("--training.mixed_precision_param=bfloat16")
    argv = [*TINY, *STEPS, *options, "--job.device=cuda", f"--job.dump_folder={tmp_path}"]
    tested = job([*argv, *["--compile.enable"] * compiled], 1)
    rank_info, device = RankInfo(0, 1, 0, "localhost"), torch.device("cuda", 0)
    try:
        with process_group(rank_info, device, tested.config.comm, Path(tmp_path), {}):
            run = Trainer.start(tested, rank_info, device, logging.Logger("quiet"))
            original = run.train_step

            def checked() -> None:
                torch.cuda.set_sync_debug_mode("error" if run.step in (3, 4) else "default")
                try:
                    original()
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            run.train_step = checked  # type: ignore[method-assign]
            run.train()
    finally:  # of a test that fails too, or all that follow it would
        if dist.is_initialized():
            dist.destroy_process_group()
