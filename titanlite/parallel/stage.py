"""A pipeline stage as torch's schedules run it: its shapes, what it receives, and what it did.

Imported where there is a pipeline only: torch needs a second for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from titanlite.runtime import torch_private

if TYPE_CHECKING:
    from titanlite.parallel.pipeline import Pipeline


class Stage(PipelineStage):
    """One stage on this rank, which looks its inputs up by the number of the micro-batch."""

    def __init__(self, part: nn.Module, index: int, pipeline: "Pipeline") -> None:
        """Give the shapes of what is received and sent, or torch would run a hidden pass to find them."""
        stages = pipeline.job.stages
        tokens = torch.empty(pipeline.shape, dtype=torch.int64, device="meta")
        hidden, is_last = pipeline.hidden(*pipeline.shape, "meta"), index == len(stages.names) - 1
        loss = torch.empty((), dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta")
        super().__init__(
            submodule=part,
            stage_index=index,
            num_stages=len(stages.names),
            device=pipeline.context.device,
            input_args=hidden if index else tokens,
            output_args=loss if is_last else hidden,
            group=pipeline.group,
        )
        self.pipeline = pipeline

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = False
    ) -> Any:
        with self._acting("F", fwd_chunk_id, "forward"):
            tokens = (self.pipeline.micro_batches[fwd_chunk_id].tokens,) if self.is_first else ()
            return super().forward_one_chunk(fwd_chunk_id, tokens, {}, save_forward_output=False)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        batch = self.pipeline.micro_batches[self.number]
        if self.is_last:
            return self.pipeline.loss(self.submod, batch, args[0])
        return self.submod(args[0], batch.positions, batch.documents)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._acting("B" if full_backward else "I", bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._acting("W", bwd_chunk_id, "backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            # FSDP's hooks do not run here, and the next W would add to these gradients in bfloat16.
            torch_private.accumulate_gradients(self.submod)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 begins with sends to all neighbors. In the middle of a V that is this rank, and gloo can't.
        return [operation for operation in super()._get_init_p2p_neighbors_ops() if operation.peer != dist.get_rank()]

    @contextmanager
    def _acting(self, kind: str, number: int, name: str) -> Iterator[None]:
        """Record an action; let an error inside of it be what it is, which torch hides in a RuntimeError."""
        self.number = number
        self.pipeline.begin(self.stage_index, kind, number)
        try:
            with record_function(name):
                yield
        except RuntimeError as error:
            raise error.__cause__ or error from None
