"""A rank's step against the declarations of its job: all-gathers and reductions, a pipeline's actions, sends.

The rows of the table find a wrong number; this finds work that is done too often, or in another order.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.config.pipeline_order import parse
from titanlite.config.stages import SINGLE
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.pipeline_parallel import Pipeline, orders
from titanlite.verify.gather_order import Group, declared_gathers, declared_reductions, first_difference, recorded

Send = tuple[int, tuple[int, ...], torch.dtype]
"""The receiver's rank in the group, a shape and a type."""


class StepRecord:
    """Records a step of a job on a rank of its pipeline.

    Not the first step: FSDP2 learns the names of modules in their first forward pass, which some schedules gather
    before, and a pipeline tries its connections.
    """

    def __init__(self, job: Job, stage_rank: int) -> None:
        self.job, self.stage_rank = job, stage_rank
        self.sharded = job.layout.max_shard_degree > 1
        self.gathered: list[Group] = []
        self.reduced: list[Group] = []
        self.sent: Counter[Send] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        send = dist.ProcessGroup.send

        def send_and_count(group: dist.ProcessGroup, tensors: list[torch.Tensor], receiver: int, tag: int) -> Any:
            for tensor in tensors:
                if tensor.is_floating_point():  # torch's first step also tries connections, by integers
                    self.sent[receiver, tuple(tensor.shape), tensor.dtype] += 1
            return send(group, tensors, receiver, tag)

        recorder = recorded(self.gathered, self.reduced) if self.sharded else nullcontext()
        with patch.object(dist.ProcessGroup, "send", send_and_count), recorder:
            yield

    def differences(self, parts: Sequence[nn.Module], pipeline: Pipeline | None) -> Iterator[tuple[str, str]]:
        """Yield of each kind of record the first that is not as declared, or an empty string."""
        if pipeline:
            yield from self._pipeline_differences(parts, pipeline)
        elif self.sharded:
            gathers = declared_gathers(self.job, parts[0], "FB")
            yield "all-gathers:", first_difference(self.gathered[: len(gathers)], gathers)  # of the first micro-batch

    def _pipeline_differences(self, parts: Sequence[nn.Module], pipeline: Pipeline) -> Iterator[tuple[str, str]]:
        job = self.job
        actions = [action for cell in orders(job.stages)[self.stage_rank] for action in parse(cell)]
        declared = [f"{action.stage}{action.kind}{action.micro_batch}" for action in actions]
        yield "actions:", first_difference(pipeline.actions, declared, "done")
        yield "sends:", self._sends_difference(pipeline)
        if not self.sharded:
            return
        gathered = self.gathered
        if job.stages.schedule in SINGLE:
            gathers = declared_gathers(job, parts[0], [action.kind for action in actions])
        else:  # torch gathers all of a stage, in an order of its own
            gathered = sorted(gathered, key=sorted)
            gathers = sorted((group for part in parts for group in declared_gathers(job, part, "F")), key=sorted)
        yield "all-gathers:", first_difference(gathered, gathers)
        reductions = sorted((group for part in parts for group in declared_reductions(job, part)), key=sorted)
        yield "reductions:", first_difference(sorted(self.reduced, key=sorted), reductions, "reduced")

    def _sends_difference(self, pipeline: Pipeline) -> str:
        declared = self._declared_sends(pipeline)
        for kind in sorted(self.sent | declared, key=str):
            if self.sent[kind] != declared[kind]:
                receiver, shape, dtype = kind
                size = f"{' x '.join(map(str, shape))} of {str(dtype).removeprefix('torch.')}"
                return f"{self.sent[kind]} instead of {declared[kind]} of {size} to pipeline rank {receiver}"
        return ""

    def _declared_sends(self, pipeline: Pipeline) -> Counter[Send]:
        """Return the sends of a step: every stage its hidden states to the next, and gradients of its inputs back.

        Stages on the same rank, at the turn of a V, send each other nothing. Of a tie both ends send the gradient.
        """
        stages, layout, training = self.job.stages, self.job.layout, self.job.config.training
        rank_of = stages.rank_of
        shape = stages.size, training.seq_len // (layout.cp * layout.tp), pipeline.width
        sends = Counter[Send]()
        for neighbor in (other for stage in stages.ranks[self.stage_rank] for other in (stage - 1, stage + 1)):
            if (receiver := rank_of.get(neighbor, self.stage_rank)) != self.stage_rank:
                sends[receiver, shape, getattr(torch, training.mixed_precision_param)] += stages.micro_batches
        for parameter, receiver, _ in pipeline.tied:
            sends[receiver, tuple(local_part(parameter).shape), parameter.dtype] += 1
        return sends
