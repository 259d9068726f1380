"""Known faults of expert parallelism: placement, dispatch, balance."""

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from titanlite.checkpoint.hf.names import Translation
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.parallel import expert_parallel, fsdp, tensor_parallel
from titanlite.parallel.balance import Balance
from titanlite.parallel.build import Context
from titanlite.train.step import StepRunner
from titanlite.verify.fault_patch import Patch, after, fault
from titanlite.verify.table import Row


@fault("gradients of experts are averaged over the ranks that have tokens for them", Row("ep2 of dp4"))
def _expert_sum_over_ep() -> Patch:
    def average(model: torch.nn.Module, context: Context) -> None:
        for module in expert_parallel.expert_modules(model, context.table).values():
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(float(context.job.layout.expert_fsdp * context.job.layout.ep))

    return after(fsdp.apply, average)


@fault("each rank of tensor parallel keeps its own tokens' gradient of the router", Row("ep2 of tp2"))
def _router_unsummed() -> Patch:
    def of_own_tokens(style: Any, module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        if not expert_parallel.is_router(module):
            return apply(style, module, mesh)
        with patch.multiple(
            tensor_parallel, _local=lambda parameter: parameter.to_local(grad_placements=(Replicate(),))
        ):
            return apply(style, module, mesh)

    apply = tensor_parallel.ReplicatedModule._apply
    return patch.multiple(tensor_parallel.ReplicatedModule, _apply=of_own_tokens)


@fault("tokens go to the experts of the next rank", Row("ep2"))
def _dispatch_shifted() -> Patch:
    def to_next(group: dist.ProcessGroup, compute: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        experts = len(counts) // group.size()
        rows = int(counts[-experts:].sum())
        return exchange(group, compute, tokens.roll(rows, 0), counts.roll(experts)).roll(-rows, 0)

    exchange = expert_parallel._dispatch
    return patch.multiple(expert_parallel, _dispatch=to_next)


@fault("the outputs of experts return in the order of the experts", Row("ep2"))
def _combine_unsorted() -> Patch:
    sort, is_first = expert_parallel.GatherRows.apply, cycle((True, False))

    def only_first(rows: Tensor, *orders: Tensor) -> Any:
        return sort(rows, *orders) if next(is_first) else rows.clone()

    return patch.multiple(expert_parallel, GatherRows=SimpleNamespace(apply=only_first))


@fault("biases follow the choices of each rank's own tokens", Row("dp2", variant="bias"))
def _counts_per_rank() -> Patch:
    def of_own_tokens(self: Balance, skipped: Tensor) -> None:
        with patch.object(dist, "all_reduce", lambda *args, **how: None):
            end_step(self, skipped)

    end_step = Balance.end_step
    return patch.multiple(Balance, end_step=of_own_tokens)


@fault("biases move after every micro-batch", Row("dp2", accumulation="3", variant="bias"))
def _counts_per_microbatch() -> Patch:
    def moving(self: StepRunner, number: int, batches: Any, valid_tokens: Tensor) -> Tensor:
        losses = []
        for batch in batches:
            losses.append(forward_backward(self, number, [batch], valid_tokens))
            self.balance.end_step(torch.zeros((), dtype=torch.bool))
        return torch.stack(losses).sum()

    forward_backward = StepRunner.forward_backward
    return patch.multiple(StepRunner, forward_backward=moving)


@fault("a recomputed forward pass counts its choices again", Row("dp2", "full"))
def _recounted() -> Patch:
    return patch.multiple(expert_parallel, is_recomputing=lambda: False)


@fault("Muon orthogonalizes a stack of experts as one matrix", Row("1"))
def _experts_one_matrix() -> Patch:
    def as_one(self: Muon, names: list[str], shapes: list[torch.Size], parts: list[Tensor]) -> None:
        for part in parts:
            part.copy_(orthogonalize(part.flatten(0, -2)).view_as(part))

    return patch.multiple(Muon, _orthogonalize=as_one)


@fault("a Hugging Face folder's experts are imported in the opposite order", Row("ep2", extra="imported"))
def _expert_slices_swapped() -> Patch:
    def mirrored(self: Translation, name: str, region: Any, read_hf: Callable[..., Tensor]) -> Tensor:
        if self.table[name].tensor != "expert":
            return read(self, name, region, read_hf)
        experts, (own, *rest) = self.shapes[name][0], region
        other = slice(experts - own.stop, experts - own.start)
        return read(self, name, (other, *rest), read_hf).flip(0)

    read = Translation.read
    return patch.multiple(Translation, read=mirrored)
