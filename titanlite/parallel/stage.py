"""A pipeline stage as torch's schedules run it: its shapes, its receive buffers, and its actions.

Imported only under pipeline parallel, since importing torch's schedules takes a second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from titanlite.parallel.mesh import new_groups
from titanlite.runtime import torch_private
from titanlite.runtime.page import phase


def build_lanes(columns: Tensor, ranks: list[int]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return the group of each directed edge between neighbors in the pipeline.

    On a shared NCCL communicator, a send that waits for its receiver blocks all later ones.
    `columns` has the ranks of each pipeline rank, `ranks` the pipeline rank of each stage. The
    group of an edge that does not touch this rank must not be used.
    """
    edges = {*pairwise(ranks), *pairwise(ranks[::-1])} - {(rank, rank) for rank in ranks}
    lanes = {}
    while edges:
        apart = []  # no rank twice, so that one split creates all their groups
        for edge in sorted(edges):
            if not {*edge} & {*chain(*apart)}:
                apart.append(edge)
        edges -= {*apart}
        pairs = columns[torch.tensor(apart)].transpose(1, 2).flatten(0, 1)
        group = new_groups(f"pipeline edges {apart}", pairs, gpu_only=True)
        lanes |= dict.fromkeys(apart, group)
    return lanes


class Received(dict[int, Any]):
    """A stage's receive buffers, by micro-batch, allocated only between receive and use.

    torch would keep the buffers of all micro-batches from the first step to the end of the run.
    """

    def __setitem__(self, number: int, buffers: Any) -> None:
        _reallocate(buffers, "meta")
        super().__setitem__(number, buffers)


def _reallocate(buffers: Any, device: torch.device | str) -> None:
    """Replace the buffers of a micro-batch with new ones."""
    for each in buffers:
        old = getattr(each, "buffer", None)
        if old is not None:  # the first stage has no buffer: it does not receive its tokens
            each.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


class StageRunner(Protocol):
    """Runs a stage: this rank's pipeline."""

    group: dist.ProcessGroup
    lanes: dict[tuple[int, int], dist.ProcessGroup]

    def begin(self, stage: int, kind: str, number: int) -> None:
        """Record that an action begins."""

    def tokens(self, number: int) -> Tensor:
        """Return the tokens of a micro-batch."""

    def compute(self, stage: "Stage", inputs: Tensor) -> Tensor:
        """Return the stage's output for its current micro-batch."""


class Stage(PipelineStage):
    """One stage on this rank, which looks up its inputs by the number of the micro-batch."""

    def __init__(
        self,
        part: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        inputs: Tensor,
        output: Tensor,
        pipeline: StageRunner,
    ) -> None:
        """Tell torch the shapes of inputs and output; otherwise it would run a hidden pass."""
        super().__init__(
            submodule=part,
            stage_index=index,
            num_stages=count,
            device=device,
            input_args=inputs,
            output_args=output,
            group=pipeline.group,
        )
        self.pipeline = pipeline
        self.runs_again = False
        """True in the first half of a backward pass, which leaves out the gradients of weights."""
        self.args_recv_info = Received()
        self.grad_recv_info = Received()
        torch_private.send_nothing_to_this_rank(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _reallocate(self.args_recv_info[fwd_chunk_id], self.device)
        return self._in_lanes(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _reallocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return self._in_lanes(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._in_lanes(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._in_lanes(super().get_bwd_send_ops(bwd_chunk_id))

    def _in_lanes(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Move operations to the groups of their edges, if those have groups."""
        for each in operations:
            edge = self.group_rank, each.group_peer
            if each.op is dist.irecv:
                edge = edge[::-1]
            each.group = self.pipeline.lanes.get(edge, each.group)
            each.group_peer = dist.get_group_rank(each.group, each.peer)
        return operations

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = False
    ) -> Any:
        with self._acting("F", fwd_chunk_id, "forward"):
            tokens: tuple[Tensor, ...] = ()
            if self.is_first:
                tokens = (self.pipeline.tokens(fwd_chunk_id),)
            output = super().forward_one_chunk(fwd_chunk_id, tokens, {}, save_forward_output=False)
            _reallocate(self.args_recv_info[fwd_chunk_id], "meta")
            return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.pipeline.compute(self, args[0])

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        kind = "B"
        if not full_backward:
            kind = "I"
        with self._acting(kind, bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            _reallocate(self.grad_recv_info[bwd_chunk_id], "meta")
            if loss is not None:
                # torch keeps the losses of a step, and their graphs would keep the stage's inputs.
                loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._acting("W", bwd_chunk_id, "backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            # FSDP's hooks don't run here, and the next W would add to these gradients in bfloat16.
            torch_private.accumulate_gradients(self.submod)

    @contextmanager
    def _acting(self, kind: str, number: int, name: str) -> Iterator[None]:
        """Record an action; raise its error, which torch wraps in a RuntimeError."""
        self.number = number
        self.runs_again = kind == "I"
        self.pipeline.begin(self.stage_index, kind, number)
        try:
            with phase(name):
                yield
        except RuntimeError as error:
            raise error.__cause__ or error from None
