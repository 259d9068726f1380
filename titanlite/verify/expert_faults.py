"""Known faults of expert parallelism: placement, dispatch, balance."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.hf.names import Translation
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.parallel import expert_parallel, fsdp, tensor_parallel
from titanlite.parallel.balance import Balance
from titanlite.parallel.dtensor import local_part
from titanlite.train.step import StepRunner
from titanlite.verify.fault_patch import fault, one_at_a_time
from titanlite.verify.table import Row


@fault(
    "gradients of experts are averaged over the ranks that have tokens for them",
    fsdp,
    "_sum_gradients",
    Row("ep2 of dp4"),
)
def expert_sum_over_ep(set_sums: Any, model: Any, context: Any, experts: Any) -> None:
    set_sums(model, context, experts)
    layout = context.job.layout
    for module in experts:
        module.set_gradient_divide_factor(float(layout.expert_fsdp * layout.ep))


@fault(
    "each rank of tensor parallel keeps its own tokens' gradient of the router",
    tensor_parallel,
    "forward_with_converted_params",
    Row("ep2 of tp2"),
)
def router_unsummed(replace_forward: Any, convert: Any, module: Any, own: Any) -> None:
    replace_forward(local_part if expert_parallel.is_router(module) else convert, module, own)


@fault("tokens go to the experts of the next rank", expert_parallel, "_dispatch", Row("ep2"))
def dispatch_shifted(dispatch: Any, group: dist.ProcessGroup, compute: Any, tokens: Tensor, counts: Tensor) -> Tensor:
    experts = len(counts) // group.size()
    rows = int(counts[-experts:].sum())
    return dispatch(group, compute, tokens.roll(rows, 0), counts.roll(experts)).roll(-rows, 0)


@fault("what experts make of tokens returns in the order of the experts", expert_parallel, "inverse", Row("ep2"))
def combine_unsorted(inverse: Any, order: Tensor) -> Tensor:
    return torch.arange(len(order))


@fault("biases follow the choices of each rank's own tokens", Balance, "end_step", Row("dp2", variant="bias"))
def counts_per_rank(end_step: Any, *call: Any) -> None:
    with patch.object(dist, "all_reduce", lambda *args, **how: None):
        end_step(*call)


@fault(
    "biases move after every micro-batch",
    StepRunner,
    "forward_backward",
    Row("dp2", accumulation="3", variant="bias"),
)
def counts_per_microbatch(*call: Any) -> Tensor:
    return one_at_a_time(lambda runner: runner.balance.end_step(torch.zeros((), dtype=torch.bool)), *call)


@fault("a recomputed forward pass counts its choices again", expert_parallel, "is_recomputing", Row("dp2", "full"))
def recounted(is_recomputing: Any) -> bool:
    return False


@fault("Muon orthogonalizes a stack of experts as one matrix", Muon, "_orthogonalize", Row("1"))
def experts_one_matrix(each: Any, muon: Muon, names: Any, shapes: Any, parts: list[Tensor]) -> None:
    for part in parts:
        part.copy_(orthogonalize(part.flatten(0, -2)).view_as(part))


@fault(
    "a Hugging Face folder's experts are imported in the opposite order",
    Translation,
    "read",
    Row("ep2", extra="imported"),
)
def expert_slices_swapped(read: Any, names: Translation, name: str, region: Any, read_hf: Any) -> Tensor:
    if names.table[name].tensor != "expert":
        return read(names, name, region, read_hf)
    experts = names.shapes[name][0]
    own, *rest = region
    other = slice(experts - own.stop, experts - own.start)
    return read(names, name, (other, *rest), read_hf).flip(0)
