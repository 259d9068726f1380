"""What a run logs: the description at the start, a line and a record per logged step, validation losses, saves.

Every rank makes a Report, since the loss is reduced over all of them; only rank 0 has sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint.manager import SaveRecord
from titanlite.config.job import Job
from titanlite.data.loader import MicroBatch
from titanlite.data.stream import Stream
from titanlite.data.windows import Windows
from titanlite.observe.clock import StepClock
from titanlite.observe.memory import Retries, allocator_tags, used
from titanlite.observe.metrics import Sink, StepRecord, open_sinks
from titanlite.observe.run_folder import describe_run
from titanlite.observe.summary import describe_start
from titanlite.observe.throughput import peak_tflops
from titanlite.optim import TrainedParam, implementation, optimizer_bytes
from titanlite.optim.lr_schedule import learning_rate
from titanlite.registry import Rule
from titanlite.runtime.cluster import RankInfo
from titanlite.train.loss import count_valid


class Report:
    """The log and the metrics sinks of a run, and the clock of its steps."""

    def __init__(
        self,
        job: Job,
        rank_info: RankInfo,
        device: torch.device,
        log: logging.Logger,
        loss_group: dist.ProcessGroup,
        flops_per_token: int,
    ) -> None:
        self._job, self._rank_info, self._device, self._log = job, rank_info, device, log
        self._loss_group, self._flops = loss_group, flops_per_token
        self._peak, self._retries = peak_tflops(device), Retries()
        self.clock = StepClock()
        self.sinks: list[Sink] = []

    def open_sinks(self, seed: int, step: int) -> None:
        """Describe the run in its folder and open the sinks, which drop what is recorded after `step`."""
        if self._rank_info.rank == 0:
            folder = Path(self._job.config.job.dump_folder)
            describe_run(folder, self._job, seed, self._device.type)
            self.sinks = open_sinks(folder, self._job.config, after=step)

    def describe_start(
        self,
        parts: Sequence[nn.Module],
        table: dict[str, Rule],
        trained: Sequence[TrainedParam],
        data: Windows | Stream,
        seed: int,
    ) -> list[str]:
        """Return the lines that the start of the run prints; call it on all ranks."""
        hosts: list[str] = [""] * self._rank_info.world
        dist.all_gather_object(hosts, self._rank_info.host)
        return describe_start(
            self._job,
            parts,
            table,
            device=self._device,
            hosts=hosts,
            seed=seed,
            samples=data.samples,
            fingerprint=data.fingerprint,
            flops=self._flops,
            decayed=sum(item.decays for item in trained),
            exempt=sum(not item.decays for item in trained),
            optimizer_bytes=optimizer_bytes(trained, self._job.config),
            implementation=implementation(self._job.config.optimizer),
        )

    def is_logged(self, step: int) -> bool:
        """Whether this step is logged: the first, every metrics.log_freq-th and the last."""
        config = self._job.config
        return step == 1 or step % config.metrics.log_freq == 0 or step == config.training.steps

    def end_step(
        self, step: int, tokens: int, loss: torch.Tensor, norm: torch.Tensor, micro_batches: Sequence[MicroBatch]
    ) -> None:
        """Take the step's time and log it if due. `tokens` counts from the start of the run."""
        if self.is_logged(step):
            self._log_step(step, tokens, loss, norm, micro_batches)
            self.clock.restart()
        else:
            self.clock.step_done()

    def _log_step(
        self, step: int, tokens: int, loss: torch.Tensor, norm: torch.Tensor, micro_batches: Sequence[MicroBatch]
    ) -> None:
        """Log a step: the only place where the host waits for the device."""
        job = self._job
        labels = torch.stack([batch.labels for batch in micro_batches])
        total, largest = loss_over_ranks(loss, count_valid(labels), self._loss_group)
        self.clock.step_done()
        per_second = job.batch.total * job.config.training.seq_len / self.clock.seconds / job.layout.world
        tflops = per_second * self._flops / 1e12
        memory = used(self._device)
        record = StepRecord(
            step=step,
            loss=total,
            max_loss=largest,
            grad_norm=norm.item(),
            lr=learning_rate(job.config, step),
            tokens=tokens,
            tps=per_second,
            tflops=tflops,
            mfu=100 * tflops / self._peak if self._peak else None,
            step_seconds=self.clock.seconds,
            step_seconds_p50=self.clock.percentile(50),
            step_seconds_p95=self.clock.percentile(95),
            data_seconds=self.clock.data_seconds,
            memory_gib=memory.gib,
            recompiles=self.clock.recompiles,
        )
        self._log.info(record.line(job.config.training.steps, memory.percent))
        tags = allocator_tags(self._device)
        if warning := self._retries.news(tags):
            self._log.warning(warning)
        for sink in self.sinks:
            sink.step(record, tags)

    def log_validation(self, step: int, loss: float) -> None:
        self._log.info(f"validation at step {step}: loss {loss:.5f}")
        for sink in self.sinks:
            sink.validation(step, loss)

    def log_saves(self, records: list[SaveRecord]) -> None:
        """Record what finished saves cost, and empty the list."""
        while records:
            record = records.pop(0)
            for sink in self.sinks:
                sink.checkpoint(record.step, record.costs)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def loss_over_ranks(loss: torch.Tensor, valid_tokens: torch.Tensor, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the global loss, and the largest mean loss of a rank that had valid tokens."""
    sums = torch.stack([loss, valid_tokens.double()])
    dist.all_reduce(sums, group=group)
    mean = torch.where(valid_tokens > 0, loss * sums[1] / valid_tokens, -torch.inf)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=group)
    return sums[0].item(), mean.item()
