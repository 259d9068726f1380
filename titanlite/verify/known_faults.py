"""Known faults: mistakes that real trainers shipped, and that the table must detect.

Each names the function that it replaces, and the rows that can show it.
"""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from titanlite.data.loader import MicroBatch
from titanlite.optim import grad_norm
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.parallel import (
    context_parallel,
    fsdp,
    fsdp_schedule,
    init,
    parallelize,
    pipeline_parallel,
    tensor_parallel,
)
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.parallel.stage import Stage
from titanlite.train import loss, report, step, trainer
from titanlite.train.guard import StepGuard
from titanlite.train.step import StepRunner
from titanlite.verify import expert_faults  # noqa: F401 (registers faults)
from titanlite.verify.fault_patch import FAULTS, fault, one_at_a_time
from titanlite.verify.table import Row

__all__ = ["FAULTS"]


@fault(
    "one block's gradients are not summed over the replicas",
    fsdp,
    "_sum_gradients",
    Row("hsdp2x2"),
    Row("replicate4"),
)
def reduction_dropped(set_sums: Any, model: Any, context: Any, experts: Any) -> None:
    set_sums(model, context, experts)
    block: Any = next(iter(context.blocks(model).values()))
    block.set_requires_all_reduce(False)


@fault(
    "gradients are averaged over the ranks after the loss was divided by the global token count",
    fsdp,
    "_sum_gradients",
    Row("dp2"),
)
def divided_twice(set_sums: Any, model: Any, context: Any, experts: Any) -> None:
    set_sums(model, context, experts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(context.job.layout.batch))


@fault("every rank draws initial values with another seed", init, "fill", Row("dp2"), Row("replicate4"))
def seed_per_rank(fill: Any, parameter: Any, name: str, rule: Any, seed: int) -> None:
    fill(parameter, name, rule, seed + dist.get_rank())


@fault("every shard has the initial values of the first one", init, "shard_offset", Row("dp2"))
def same_shards(offset: Any, tensor: Tensor) -> tuple[int, ...]:
    return (0,) * tensor.dim()


@fault(
    "the gradient norm is summed in float32",
    grad_norm,
    "_exact_norm",
    Row("dp2", precision="float32", extra="large"),
)
def norm_in_float32(exact_norm: Any, part: Tensor, p: float) -> Tensor:
    return torch.linalg.vector_norm(part, p)


@fault("HSDP shards within a replica but does not sum over the replicas", trainer, "build_mesh", Row("hsdp2x2"))
def hsdp_made_fsdp(build: Any, *layout: Any) -> Any:
    mesh = build(*layout)
    return replace(mesh, fsdp=mesh.world["dp_shard"])


@fault(
    "under sequence parallel, gradients of norm weights are not summed over the ranks",
    tensor_parallel,
    "SequenceParallel",
    Row("tp2"),
)
def norms_not_reduced(style: Any, **how: Any) -> Any:
    return _Unsummed()


class _Unsummed(tensor_parallel.ReplicatedModule):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        with patch.object(tensor_parallel, "_local", local_part):
            return super()._apply(module, device_mesh)


@fault("a column row of the model's table says replicated", trainer, "build_model", Row("tp2"))
def column_made_whole(build: Any, job: Any) -> Any:
    model, table = build(job)
    columns = [rule.pattern for rule in table.values() if rule.tensor == "column"]
    wrong = next(pattern for pattern in columns if pattern.endswith("weight"))
    for name, rule in table.items():
        if rule.pattern == wrong:
            table[name] = replace(rule, tensor="replicated")
    return model, table


@fault("the output layer does not share the embedding's weight", trainer, "build_model", Row("dp2", variant="tied"))
def tie_broken(build: Any, job: Any) -> Any:
    model, table = build(job)
    for second, first in init.shared_names(model).items():
        module, _, attribute = second.rpartition(".")
        own = nn.Parameter(model.get_parameter(first).detach().clone())
        setattr(model.get_submodule(module), attribute, own)
        table[second] = table[first]
    return model, table


@fault("frozen parameters are trained", trainer, "build_model", Row("dp2", variant="frozen"))
def frozen_thawed(build: Any, job: Any) -> Any:
    model, table = build(job)
    return model.requires_grad_(True), table


@fault(
    "the prefetch schedules of the forward and backward passes are swapped",
    fsdp_schedule,
    "set_prefetch",
    Row("dp2", prefetch="2"),
)
def prefetch_reversed(set_order: Any, groups: Any, plan: fsdp_schedule.Schedule) -> None:
    set_order(groups, replace(plan, forward=plan.backward, backward=plan.forward))


def _between_micro_batches(change: Any, *call: Any) -> Tensor:
    def before(runner: StepRunner) -> None:
        for parameter in runner.parameters:
            if parameter.grad is not None:
                change(parameter.grad)

    return one_at_a_time(before, *call)


@fault(
    "gradients are rounded to bfloat16 between micro-batches",
    StepRunner,
    "forward_backward",
    Row("dp2", accumulation="3"),
)
def accumulation_in_bf16(*call: Any) -> Tensor:
    return _between_micro_batches(lambda gradient: gradient.copy_(gradient.bfloat16()), *call)


@fault(
    "each micro-batch's gradients replace those of the previous one",
    StepRunner,
    "forward_backward",
    Row("dp2", accumulation="3"),
)
def accumulation_forgotten(*call: Any) -> Tensor:
    return _between_micro_batches(Tensor.zero_, *call)


@fault(
    "gradients are clipped by the norm of the rank's shards instead of the global norm",
    step,
    "clip_grad_norm",
    Row("dp2"),
    Row("tp2"),
)
def clip_by_local_norm(clip: Any, parameters: Any, max_norm: float, p: float, *stages: Any) -> Tensor:
    norm = nn.utils.get_total_norm([local_part(parameter.grad) for parameter in parameters], p)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@fault(
    "Muon orthogonalizes each rank's shard instead of the whole matrix",
    Muon,
    "_orthogonalize",
    Row("dp2"),
    Row("tp2"),
)
def parts_orthogonalized(whole: Any, muon: Muon, names: Any, shapes: Any, parts: list[Tensor]) -> None:
    for part in parts:
        part.copy_(orthogonalize(part))


@fault(
    "the loss is divided by the rank's valid tokens instead of the global count",
    StepGuard,
    "exchange",
    Row("dp3"),
    Row("replicate4"),
)
def labels_per_rank(exchange: Any, guard: StepGuard, valid_tokens: Tensor, stop: bool = False) -> Tensor:
    return valid_tokens


@fault(
    "gradients are reduced in bfloat16 instead of float32",
    fsdp,
    "MixedPrecisionPolicy",
    Row("dp2", precision="float32"),
)
def reduction_in_bf16(policy: Any, **how: Any) -> Any:
    return policy(**(how | {"reduce_dtype": torch.bfloat16}))


@fault("attention crosses from one document to the next", MicroBatch, "documents", Row("tp2", documents="on"))
def documents_mixed(documents: Any, batch: MicroBatch) -> None:
    return None


@fault(
    "each rank keeps the gradients of its own tokens' attention to other ranks' keys and values",
    context_parallel,
    "Partial",
    Row("cp2"),
)
def keys_not_summed(partial: Any) -> Replicate:
    return Replicate()


@fault("gathered keys and values stay in the order of the ranks", context_parallel, "_in_order", Row("cp2"))
def order_forgotten(in_order: Any, chunks: Any, balanced: bool) -> Any:
    return chunks


@fault(
    "each rank counts positions from 0",
    MicroBatch,
    "positions",
    Row("cp2"),
    Row("cp2 x tp2", sequence="ulysses"),
)
def positions_restart(positions: Any, batch: MicroBatch) -> Tensor:
    return torch.arange(batch.tokens.size(1))[None]


@fault(
    "the tokens of a sequence are counted by each of the ranks that split it",
    StepRunner,
    "forward_backward",
    Row("cp2"),
)
def tokens_counted_whole(run: Any, runner: StepRunner, number: int, batches: Any, valid_tokens: Tensor) -> Tensor:
    whole = loss.count_valid(torch.stack([batch.rows[:, 1] for batch in batches]))
    dist.all_reduce(whole, group=runner.context.mesh.loss)
    return run(runner, number, batches, whole)


@fault(
    "parameters are sharded over dp_shard alone, so that nothing sums over the ranks of cp",
    trainer,
    "build_mesh",
    Row("dp2 x cp2"),
)
def context_not_reduced(build: Any, *layout: Any) -> Any:
    return hsdp_made_fsdp(build, *layout)


@fault("the documents are cut like the tokens", MicroBatch, "documents", Row("cp2", documents="on"))
def documents_cut(documents: Any, batch: MicroBatch) -> Tensor:
    own = batch.rows[:, 2, batch.own_positions]
    return own.repeat(1, batch.rows.size(2) // own.size(1))


@fault("gradients are divided by the number of micro-batches", Pipeline, "_schedule", Row("pp2"))
def microbatch_averaged(build: Any, *call: Any) -> Any:
    schedule = build(*call)
    schedule.scale_grads = True
    return schedule


@fault("each stage clips its gradients by its own norm", step, "clip_grad_norm", Row("pp2"))
def stage_norm_local(clip: Any, parameters: Any, max_norm: float, p: float, stages: Any, copies: Any) -> Tensor:
    return clip(parameters, max_norm, p, None, copies)


@fault(
    "the two stages of a tied weight do not sum its gradients",
    Pipeline,
    "sum_tied_gradients",
    Row("pp2", variant="tied"),
)
def tie_unsummed(sum_gradients: Any, pipeline: Pipeline) -> None:
    return None


@fault("a block's initial values follow its place in the stage", init, "fill", Row("pp2"))
def seed_by_stage_number(fill: Any, parameter: Any, name: str, *more: Any) -> None:
    of_two_blocks = re.sub(r"(?<=\.)\d+(?=\.)", lambda number: f"{int(number[0]) % 2}", name)
    fill(parameter, of_two_blocks, *more)


@fault(
    "gradients are taken before the last backward pass has added to them",
    Stage,
    "backward_one_chunk",
    Row("pp2"),
)
def last_microbatch_lost(backward: Any, stage: Stage, *args: Any, last_backward: bool = False, **more: Any) -> None:
    before = [(p, None if p.grad is None else p.grad.clone()) for p in stage.submod.parameters()]
    backward(stage, *args, last_backward=last_backward, **more)
    if last_backward:
        for parameter, gradient in before:
            parameter.grad = gradient


@fault("later stages count positions in their part of the sequence", MicroBatch, "positions", Row("pp2 x cp2"))
def positions_guessed(positions: Any, batch: MicroBatch) -> Tensor | None:
    is_first = dist.get_rank() < dist.get_world_size() // 2
    return positions(batch) if is_first else positions_restart(positions, batch)


@fault("two stages have each other's blocks", pipeline_parallel, "split", Row("pp2"))
def blocks_swapped(split: Any, model: Any, spec: Any, stages: Any) -> Any:
    other = {f"{spec.blocks}.{n}": f"{spec.blocks}.{(n + 2) % 4}" for n in range(4)}
    swapped = []
    for names in stages:
        swapped.append([other.get(name, name) for name in names])
    return split(model, spec, swapped)


@fault("the last stage's loss is not shared with the other stages", report, "loss_over_ranks", Row("pp2"))
def loss_on_one_rank(shared: Any, loss: Tensor, *more: Any) -> tuple[float, float]:
    total = shared(loss, *more)
    return total if loss.item() else (0.0, 0.0)


@fault(
    "tensor parallel computes the loss in the logits' bfloat16",
    loss,
    "_sharded_loss_sum",
    Row("tp2", precision="bfloat16"),
)
def loss_in_bf16(loss_sum: Any, *call: Any) -> Tensor:
    with patch.object(torch, "promote_types", lambda logits, float32: logits):
        return loss_sum(*call)


@fault(
    "a wrapper around the blocks changes their parameters' names",
    parallelize,
    "split",
    Row("dp2", recompute="full"),
)
def names_wrapped(split: Any, model: Any, context: Any) -> Any:
    blocks = model.get_submodule(context.job.spec.blocks)
    for name, block in list(blocks.named_children()):
        setattr(blocks, name, _Wrapper(block))
    return split(model, context)


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.wrapped = inner

    def forward(self, *args: Any) -> Any:
        return self.wrapped(*args)
