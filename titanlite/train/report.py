"""What a run logs: a line and a record per logged step, validation losses, saves.

Every rank has a Report, since the loss is reduced over all of them; only rank 0 has sinks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.saver import PendingSave
from titanlite.errors import RunFailed, some_of
from titanlite.observe.clock import StepClock
from titanlite.observe.memory import memory_tags, peak_memory, retries_warning
from titanlite.observe.progress import progress_lines
from titanlite.observe.run_folder import METRICS, describe_run
from titanlite.observe.sinks import JsonLines, StepRecord, TensorBoard, Values
from titanlite.observe.throughput import peak_tflops
from titanlite.observe.trackers import Background, open_trackers
from titanlite.optim.build import TrainedParam
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.balance import ExpertLoad
from titanlite.parallel.build import Context
from titanlite.runtime.cluster import RankInfo
from titanlite.train.validate import Cost


@dataclass
class Report:
    """The log and the metrics sinks of a run, and the clock of its steps."""

    context: Context
    rank_info: RankInfo
    log: logging.Logger
    flops_per_token: int
    validation: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        self.job = self.context.job
        self.device = self.context.device
        self.peak = peak_tflops(self.device)
        self.retries = 0.0
        self.clock = StepClock()
        self.sinks: list[Any] = []
        self.trackers: list[Background] = []
        self.validation_began = 0.0
        self.validation_seconds = 0.0

    def open_sinks(self, seed: int, step: int) -> None:
        """Describe the run in its folder and open the sinks, or open them again; files drop records
        after `step`.
        """
        if self.rank_info.rank == 0:
            config = self.job.config
            folder = Path(config.job.dump_folder)
            describe_run(folder, self.job, seed, self.device.type)
            for sink in self.sinks:
                sink.close()
            self.sinks = [JsonLines(folder / METRICS, after=step)]
            if config.metrics.enable_tensorboard:
                self.sinks.append(TensorBoard(folder / config.metrics.save_tb_folder, after=step))
            self.trackers = self.trackers or open_trackers(config, self.log, after=step)

    def name_unused(self, trained: Sequence[TrainedParam]) -> None:
        """Warn about parameters that got no gradient in the first step."""
        names = [item.name for item in trained if item.parameter.grad is None]
        if names:
            self.log.warning(
                f"these get no gradient, as forward does not use them:{some_of(names)}"
            )

    def is_logged(self, step: int) -> bool:
        """Whether this step is logged: the first, every metrics.log_freq-th and the last."""
        config = self.job.config
        return step == 1 or step % config.metrics.log_freq == 0 or step == config.training.steps

    def end_step(
        self,
        step: int,
        tokens: int,
        loss: Tensor,
        norm: Tensor,
        valid_tokens: Tensor,
        balance: ExpertLoad,
    ) -> None:
        """Time the step, and log it if due: only then the host waits for the device.

        `tokens` counts from the start of the run; `loss` and `valid_tokens` are this rank's.
        """
        job = self.job
        clock = self.clock
        if not self.is_logged(step):
            clock.step_done()
            return
        global_loss, max_loss = loss_over_ranks(loss, valid_tokens, self.context.mesh.loss)
        of_experts = balance.load()
        clock.step_done()
        memory, memory_percent = peak_memory(self.device)
        tps = job.batch.total * job.config.training.seq_len / clock.seconds / job.layout.world
        tflops = tps * self.flops_per_token / 1e12
        record = StepRecord(
            step=step,
            loss=global_loss,
            max_loss=max_loss,
            grad_norm=norm.item(),
            lr=learning_rate(job.config, step),
            tokens=tokens,
            tps=tps,
            tflops=tflops,
            mfu=self._mfu(tflops),
            step_seconds=clock.seconds,
            step_seconds_p50=clock.percentile(50),
            step_seconds_p95=clock.percentile(95),
            data_seconds=clock.data_seconds,
            memory_gib=memory,
            recompiles=clock.recompiles,
            eta_seconds=self._seconds_left(step),
        )
        self.log.info(record.line(job.config.training.steps, memory_percent))
        tags = memory_tags(self.device)
        self._warn_of_retries(tags)
        tags |= record.tags() | {f"moe/{name}": value for name, value in of_experts.items()}
        self._write(step, asdict(record) | of_experts, tags)
        clock.restart()

    def _mfu(self, tflops: float) -> float | None:
        """Return the percentage of the device's peak, if that is known."""
        if self.peak:
            return 100 * tflops / self.peak
        return None

    def _warn_of_retries(self, tags: Values) -> None:
        retries = tags.get("memory/num_alloc_retries", 0.0)  # a CPU has no such allocator
        warning = retries_warning(retries, self.retries)
        if warning:
            self.log.warning(warning)
        self.retries = retries

    def _seconds_left(self, step: int) -> float:
        """Return the time that the remaining steps and validations take."""
        a_step = self.clock.seconds
        cost = self.validation
        a_validation = self.validation_seconds or cost.steps * a_step
        left = 0
        if self.job.config.validation.enable:
            left = cost.left(step, self.job)
        return (self.job.config.training.steps - step) * a_step + left * a_validation

    def begin_validation(self) -> Callable[[int], None]:
        """Return a function that logs a validation's progress when called with a batch's number."""
        self.validation_began = time.monotonic()
        total = self.validation.batches
        show = progress_lines(self.log.info, "validation: ", "batches")
        return lambda number: show(number - 1, max(total, number))

    def log_validation(self, step: int, loss: float) -> None:
        self.validation_seconds = time.monotonic() - self.validation_began
        self.log.info(f"validation at step {step}: loss {loss:.5f}")
        self._write(step, {"validation_loss": loss}, {"validation_metrics/loss": loss})

    def log_bad_step(self, step: int, line: str, values: Values) -> None:
        self.log.warning(line)
        self._write(step, values, {f"bad_steps/{name}": value for name, value in values.items()})

    def log_saves(self, records: list[PendingSave]) -> None:
        """Record what the committed saves cost, and empty the list."""
        while records:
            save = records.pop(0)
            values = {}
            tags = {}
            for name, seconds in save.costs.items():
                values[f"checkpoint_{name}_seconds"] = seconds
                tags[f"time_metrics/checkpoint_{name}(s)"] = seconds
            self._write(save.step, values, tags)
            grace = self.job.config.fault.grace_seconds
            written = save.costs["write"]
            if written > grace:
                self.log.warning(
                    f"step {save.step} took {written:.0f} s to write, but a stopping run has only "
                    f"fault.grace_seconds = {grace}: raise it, or a stop may lose its save"
                )

    def _write(self, step: int, values: Values, tags: Values) -> None:
        """Record numbers. A full disk ends the run only if a failed save would."""
        for tracker in self.trackers:
            tracker.write(step, tags)
        for sink in self.sinks:
            try:
                sink.write(step, values, tags)
            except OSError as error:
                checkpoint = self.job.config.checkpoint
                if checkpoint.enable and checkpoint.on_failure == "stop":
                    raise RunFailed(
                        f'metrics: {error} (checkpoint.on_failure = "warn" would continue)'
                    ) from error
                self.log.warning(f"metrics of step {step} are lost: {error}; training continues")

    def close(self, state: str = "") -> None:
        for sink in self.sinks:
            sink.close()
        for tracker in self.trackers:
            tracker.close(state)


def loss_over_ranks(
    loss: Tensor, valid_tokens: Tensor, group: dist.ProcessGroup
) -> tuple[float, float]:
    """Return the global loss, and the largest mean loss of a rank that had valid tokens."""
    sums = torch.stack([loss, valid_tokens.double()])
    dist.all_reduce(sums, group=group)
    mean = torch.where(valid_tokens > 0, loss * sums[1] / valid_tokens, -torch.inf)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=group)
    return sums[0].item(), mean.item()
