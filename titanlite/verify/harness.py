"""What a rank does: the real trainer takes a few steps, is looked at, and compared with the reference.

The batch is ragged: its first half has no valid token at all, and goes to the first data-parallel ranks.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.data.loader import MicroBatch
from titanlite.errors import first_line
from titanlite.observe.metrics import StepRecord
from titanlite.optim import build_optimizer
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.parallel.build import shared_names
from titanlite.runtime.cluster import RankInfo
from titanlite.train.trainer import Trainer
from titanlite.verify import gather_order, measurements
from titanlite.verify.known_faults import FAULTS
from titanlite.verify.measurements import Finding, Observed, named
from titanlite.verify.model_under_test import build_job


def measure(words: list[str], expected: str, bound: float, fault: str = "") -> Finding:
    """The worst that this rank finds in the job of a row, a known fault put in if one is named.

    Failed is raised where it does not run: the pool then ends the ranks that wait for this one.
    """
    # In the rank itself: a process that was killed would leave its compiling children behind.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    logging.getLogger("torch").setLevel(logging.ERROR)  # it warns of every recomputed block that is compiled
    torch.compiler.reset()  # graphs of an earlier row would count against the limit of this one
    rank, world = dist.get_rank(), dist.get_world_size()
    run: InstrumentedTrainer | None = None
    try:
        with FAULTS[fault].put_in() if fault else nullcontext():
            run = InstrumentedTrainer(build_job(words, world), RankInfo(rank, world, rank, f"rank{rank}"))
            seen = run.observe()
    except Exception as error:
        where = "building" if run is None else _module_in(error.__traceback__, run.parts[0]) or "a step"
        raise Failed(f"{type(error).__name__} in {where}: {first_line(error)}") from error
    finding = measurements.compare(seen, torch.load(expected, mmap=True), bound)
    if finding.error <= bound and (difference := run.gathered_out_of_order()):
        return Finding("all-gathers:", difference)
    return finding


class Failed(Exception):
    """A row's job did not run; one line says in which module."""


class InstrumentedTrainer(Trainer):
    """The trainer itself, given its batch, and looked at while it steps."""

    def __init__(self, job: Job, place: RankInfo) -> None:
        Path(job.config.job.dump_folder).mkdir(exist_ok=True)
        super().__init__(job, place, torch.device("cpu"), logging.Logger("quiet"))
        whole = measurements.ragged_batch(job.shape.vocab_size, job.config.training.seq_len).rows
        mine = whole.chunk(self.share.ranks)[self.share.coordinate]
        self.given = [MicroBatch(rows) for rows in mine.chunk(self.share.accumulation)]
        self.seen: Observed = {}
        self.gathered: list[gather_order.Group] = []
        self.report.close()
        self.report.sinks = [_Kept(self.seen)]
        self._forward_backward = self.runner.forward_backward
        self.runner.forward_backward = self.forward_backward  # type: ignore[method-assign]

    def observe(self) -> Observed:
        """Take the steps; what was seen in them."""
        model, config = self.parts[0], self.job.config
        self.seen[measurements.INITIAL] = measurements.values(model)
        for name, steps in measurements.steps_of(config).items():
            self.runner.optimizer = build_optimizer(self.trained, named(config, name))
            for _ in range(steps):
                self.step += 1
                self.train_step()
            self.seen[measurements.after(name)] = measurements.values(model)
        return self.seen

    def next_micro_batches(self) -> list[MicroBatch]:
        return self.given

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        if step > 1:
            return self._forward_backward(step, micro_batches, valid_tokens)
        with gather_order.gathers_recorded(self.gathered) if self._gathers() else nullcontext():
            loss = self._forward_backward(step, micro_batches, valid_tokens)
        self.seen[measurements.GRADIENT] = measurements.gradients(self.parts[0])
        self.seen[measurements.NORM] = {"(p = inf)": clip_grad_norm(self.runner.parameters, math.inf, math.inf)}
        return loss

    def _gathers(self) -> bool:
        return self.job.layout.fsdp > 1

    def gathered_out_of_order(self) -> str:
        """The first group that was not gathered when the schedule says."""
        if not self._gathers():
            return ""
        return gather_order.first_difference(
            self.gathered, gather_order.declared(self.job, bool(shared_names(self.parts[0])))
        )


class _Kept:
    """The sink that keeps what the first step reports."""

    def __init__(self, seen: Observed) -> None:
        self.seen = seen

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        if record.step == 1:
            self.seen[measurements.NORM]["(p = 2)"] = torch.tensor(record.grad_norm, dtype=torch.float64)
            self.seen[measurements.LOSS] = {"": torch.tensor(record.loss, dtype=torch.float64)}

    def validation(self, step: int, loss: float) -> None: ...

    def checkpoint(self, step: int, seconds: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def _module_in(trace: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of the model that an error came through."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return found
