"""One rank: run a few steps of the real trainer, measure them, and compare with the reference.

The first half of the batch has no valid token at all, and goes to the first data-parallel ranks.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.data.loader import MicroBatch
from titanlite.errors import first_line
from titanlite.observe.sinks import Values
from titanlite.optim import build_optimizer
from titanlite.parallel.build import named_parameters, persistent_buffers
from titanlite.registry import Role
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import pick_device
from titanlite.train.forward import take
from titanlite.train.trainer import Trainer
from titanlite.verify import measurements
from titanlite.verify.measurements import Measured, Mismatch, with_optimizer
from titanlite.verify.model_under_test import build_job
from titanlite.verify.step_record import StepRecorder
from titanlite.verify.table import Row


def measure(
    overrides: list[str],
    reference: str,
    row: Row,
    role: tuple[str, Role] | None,
) -> Mismatch:
    """Run a row's job, and return this rank's worst mismatch with the file `reference`.

    `role` is a row of the model's table and the role that replaces its own. If the job does not
    run, raise RowFailed, so that the pool ends the ranks that wait for this one."""
    # Compile in the rank itself: a killed process would leave its compiling children behind.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # torch warns about every block that is recomputed and compiled.
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.compiler.reset()  # graphs of earlier rows would count against this one's limit
    rank = dist.get_rank()
    world = dist.get_world_size()
    trainer: InstrumentedTrainer | None = None
    try:
        gpus = torch.cuda.device_count() or world
        rank_info = RankInfo(rank, world, rank % gpus, f"rank{rank}")
        job = build_job(overrides, world)
        if role:
            job = with_role(job, *role)
        Path(job.config.job.dump_folder).mkdir(exist_ok=True)
        device = pick_device(job.config.job.device, rank_info.local_rank)
        trainer = InstrumentedTrainer.start(job, rank_info, device, logging.Logger("quiet"))
        trainer.instrument(row.batch)
        measured = trainer.measure_steps()
    except Exception as error:
        module = "building"
        if trainer:
            module = _innermost_module(error.__traceback__, trainer.parts[0])
        raise RowFailed(
            f"{type(error).__name__} in {module or 'a step'}: {first_line(error)}"
        ) from error
    mismatch = measurements.compare(
        measured, torch.load(reference, mmap=True, weights_only=True), row.precision, trainer.owns
    )
    if device.type == "cpu" and mismatch[0] <= measurements.BOUNDS[row.precision]:
        for what, difference in trainer.recorder.differences(trainer.parts, trainer.runner.model):
            if difference:
                return math.inf, f"{what} {difference}"
    return mismatch


def with_role(job: Job, pattern: str, role: Role) -> Job:
    """Return the job with another role in one row of the model's table, and the matching role in
    its bias's row.
    """
    bias_role: Role = "replicated"
    if role == "column":
        bias_role = "column"
    roles: dict[str, Role] = {pattern: role, f"{pattern.removesuffix('.weight')}.bias": bias_role}
    rules = tuple(
        replace(rule, tensor=roles.get(rule.pattern, rule.tensor))
        for rule in job.spec.rules(job.model_config)
    )
    return replace(job, spec=replace(job.spec, rules=lambda flavor: rules))


class RowFailed(Exception):
    """A row's job did not run; the message is one line that names the module."""


class InstrumentedTrainer(Trainer):
    """The trainer on a fixed batch, which measures its steps."""

    def instrument(self, batch: str) -> None:
        """Prepare to take measured steps on a batch."""
        job = self.job
        rank_slice = self.data.rank_slice
        whole = measurements.ragged_batch(job.shape.vocab_size, job.config.training.seq_len, batch)
        own_rows = whole.rows.chunk(rank_slice.ranks)[rank_slice.coordinate]
        batches = map(MicroBatch, own_rows.chunk(rank_slice.accumulation))
        self.micro_batches = [take(self.runner.model, each) for each in batches]
        self.measured: Measured = {}
        self.recorder = StepRecorder(job, job.layout.coordinates(self.rank_info.rank)["pp"])
        self.report.close()
        self.report.sinks = [SimpleNamespace(write=self.keep_first)]
        self._forward_backward = self.runner.forward_backward
        self.runner.forward_backward = self.forward_backward  # type: ignore[method-assign]

    def measure_steps(self) -> Measured:
        """Take the steps of each optimizer, and return the measurements."""
        config = self.job.config
        self.measured[measurements.INITIAL] = measurements.values(self.own_tensors())
        for name, steps in measurements.steps_of(config).items():
            self.runner.optimizer = build_optimizer(
                self.runner.trained, with_optimizer(config, name), mesh=self.runner.context.mesh
            )
            for _ in range(steps):
                self.step += 1
                self.train_step()
            self.measured[measurements.after_steps(name, steps)] = measurements.values(
                self.own_tensors()
            )
        return self.measured

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's parts by their names in the model."""
        found = dict[str, nn.Parameter]()
        for part in self.parts:
            for name, p in named_parameters(part, self.runner.context.table):
                found[name] = p
        return found

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters, and the buffers that a checkpoint stores."""
        buffers = {}
        for part in self.parts:
            buffers.update(persistent_buffers(part))
        return {**self.own_parameters(), **buffers}

    def owns(self, name: str) -> bool:
        """Return whether this rank should have a parameter or module, because one of its stages
        has; a tied one counts by either name.
        """
        stages = self.job.stages
        rule = self.runner.context.table.get(name)
        if self.job.layout.pp == 1:
            return True
        own = list[str]()
        for stage in stages.ranks[self.recorder.stage_rank]:
            own += [f"{path}." for path in stages.names[stage]]
        modules = tuple(own)
        return name.startswith(modules) or bool(rule and rule.tied.startswith(modules))

    def keep_first(self, step: int, values: Values, tags: dict[str, float]) -> None:
        """Keep what the first step logs."""
        if step == 1:
            self.measured[measurements.NORM]["(p = 2)"] = torch.tensor(
                values["grad_norm"], dtype=torch.float64
            )
            self.measured[measurements.LOSS] = {
                "": torch.tensor(values["loss"], dtype=torch.float64)
            }

    def next_micro_batches(self) -> list[MicroBatch]:
        return self.micro_batches

    def forward_backward(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        valid_tokens: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        # The declarations describe gloo's calls, and are the same on each device.
        recorded = step == 2 and self.runner.context.device.type == "cpu"
        with self.recorder.recording() if recorded else nullcontext():
            loss = self._forward_backward(step, micro_batches, valid_tokens)
        if step == 1:
            self.measured[measurements.GRADIENT] = measurements.gradients(self.own_parameters())
            self.measured[measurements.NORM] = {
                "(p = inf)": self.runner.gradient_norm(math.inf).cpu()
            }
            self.measured |= measurements.routed(
                *self.parts, add=partial(dist.all_reduce, group=self.runner.context.mesh.stage)
            )
        return loss


def _innermost_module(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the name of the innermost module that an error passed through, or an empty string."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    while trace is not None:
        innermost = names.get(id(trace.tb_frame.f_locals.get("self")), "") or innermost
        trace = trace.tb_next
    return innermost
