"""Parameters that stay whole on every data-parallel rank: those of parallelism.fsdp_keep_whole, or
all if there are only replicas ("DDP").

FSDP2 ignores them; this module sums their gradients over the ranks, once a step.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel.build import Context, match_parameters, named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.registry import Rule

KEY = "parallelism.fsdp_keep_whole"
_MOST = 1 << 20
"""The most elements of matrices that are summed together, such as a block's adapters: a collective
of them takes longer than to copy them.
"""


def note(context: Context) -> list[str]:
    """Return a line on how many parameters the patterns match, if there are any."""
    patterns = context.job.config.parallelism.fsdp_keep_whole
    names = kept_whole(context.job, context.table)
    if not names:
        return []
    count = f"{len(names)} of {len(context.table)}"
    return [f"Applied {KEY}: {count} parameters are replicated ({', '.join(patterns)})"]


def kept_whole(job: Job, table: Mapping[str, Rule]) -> list[str]:
    """Return the parameters that stay whole; raise a UserError if one cannot."""
    names = match_parameters(table, KEY, job.config.parallelism.fsdp_keep_whole)
    if len(names) == len(table):
        raise UserError(f"{KEY} matches every parameter: replicate instead of sharding")
    experts = [name for name in names if table[name].tensor == "expert"]
    if experts and job.layout.experts_on_own_mesh:  # their gradients are summed over other ranks
        why = "experts are always sharded with expert or tensor parallel; name the other parameters"
        raise UserError(f"{KEY} matches {experts[0]}: {why}")
    return names


def replicated_parameters(model: nn.Module, context: Context) -> list[nn.Parameter]:
    """Return the parameters of a model part that fsdp_keep_whole keeps from FSDP2."""
    names = kept_whole(context.job, context.table)
    parameters = dict(named_parameters(model, context.table))
    return [parameters[name] for name in names if name in parameters]


class GradientSum:
    """Sums the gradients of whole parameters over data-parallel ranks, in `dtype`.

    A matrix is summed in place as soon as the last backward pass has its gradient, small ones
    together with their neighbors; norms and biases in one collective at the end.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._dtype = dtype
        self._device = device
        self._bundles: list[list[nn.Parameter]] = []
        """Matrices that are summed together, in an order that all ranks share, close to that of the
        backward pass.
        """
        self._vectors: list[nn.Parameter] = []
        self._ready: set[nn.Parameter] | None = None
        """The matrices whose gradient is final; None before the last backward pass."""
        self._started: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        """The gradients whose sums have started, what is summed, and the collectives."""
        room = 0
        for parameter in reversed([*parameters]):
            if not parameter.requires_grad:
                continue
            if parameter.dim() < 2:
                self._vectors.append(parameter)
                continue
            numel = local_part(parameter).numel()
            if not self._bundles or numel > room:
                self._bundles.append([])
                room = _MOST
            self._bundles[-1].append(parameter)
            room -= numel
            parameter.register_post_accumulate_grad_hook(self._add)

    def start(self) -> None:
        """Sum what the next backward pass finishes."""
        self._ready = set()

    def _add(self, parameter: torch.Tensor) -> None:
        """Start the sums whose turn has come.

        A rank may leave a parameter unused, and all ranks must sum in the same order.
        """
        if self._ready is None:
            return
        assert isinstance(parameter, nn.Parameter)
        self._ready.add(parameter)
        while len(self._started) < len(self._bundles):
            following = self._bundles[len(self._started)]
            if not self._ready.issuperset(following):
                break
            self._start_sum([*map(_gradient_of, following)])

    def _start_sum(self, gradients: list[torch.Tensor]) -> None:
        if len(gradients) == 1:
            summed = gradients[0].to(self._dtype, memory_format=torch.contiguous_format)
        else:
            summed = torch.cat([gradient.flatten().to(self._dtype) for gradient in gradients])
        work = dist.all_reduce(summed, group=self._group, async_op=True)
        self._started.append((gradients, summed, work))

    def finish(self) -> None:
        """Sum all other gradients, and wait for all sums."""
        parameters = [*chain(*self._bundles), *self._vectors]
        used = [parameter.grad is not None for parameter in parameters]
        for bundle in self._bundles[len(self._started) :]:
            self._start_sum([*map(_gradient_of, bundle)])
        ranks_using = self._sum_vectors(used)
        for gradients, summed, work in self._started:
            work.wait()
            if summed is not gradients[0]:
                sums = summed.flatten().split([gradient.numel() for gradient in gradients])
                for gradient, one in zip(gradients, sums, strict=True):
                    gradient.copy_(one.view_as(gradient))
        self._started = []
        self._ready = None
        if not all(used):
            for parameter, ranks in zip(parameters, ranks_using.tolist(), strict=True):
                if not ranks:
                    parameter.grad = None

    def _sum_vectors(self, used: list[bool]) -> torch.Tensor:
        """Start the sum of the gradients of vectors; return what will be the number of
        ranks that use each parameter.
        """
        ranks_using = torch.ones(len(used), dtype=self._dtype, device=self._device)
        if not all(used):  # a copy from the host waits
            ranks_using.copy_(torch.tensor(used))
        self._start_sum([*map(_gradient_of, self._vectors), ranks_using])
        return ranks_using


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a gradient: zeros if its tokens do not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
