"""Known faults: mistakes that real trainers shipped, and that the table must detect.

Each replaces a function on every rank, not in the reference, and takes it before its arguments."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from titanlite.models.common.moe import Router
from titanlite.optim.muon import orthogonalize
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.init import shared_names
from titanlite.train.loss import count_valid
from titanlite.verify.harness import measure
from titanlite.verify.measurements import Mismatch
from titanlite.verify.table import Row


@dataclass(frozen=True)
class Fault:
    """A mistake: the function it replaces, its replacement, and the rows that show it."""

    target: str
    rows: tuple[Row, ...]
    replacement: Callable[..., Any]

    def put_in(self) -> AbstractContextManager[Any]:
        owner, _, attribute = self.target.rpartition(".")
        original = getattr(resolve_name(owner), attribute)
        if isinstance(original, property):
            return patch(self.target, property(partial(self.replacement, original.fget)))
        # A lambda binds to an object, as a partial does not.
        return patch(self.target, lambda *args, **how: self.replacement(original, *args, **how))


FAULTS: dict[str, Fault] = {}


def fault(target: str, *layouts: str, **columns: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated replacement of a function of titanlite, and the rows that show it.

    Its docstring describes the fault.
    """
    rows = tuple(Row(layout, **columns) for layout in layouts)

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        name = replacement.__name__.replace("_", "-")
        FAULTS[name] = Fault(f"titanlite.{target}", rows, replacement)
        return replacement

    return register


def measure_with(name: str, *arguments: Any) -> Mismatch:
    """Measure a row on this rank with the named fault."""
    with FAULTS[name].put_in():
        return measure(*arguments)


def one_at_a_time(before, run, runner, step, batches, valid_tokens):
    """Run micro-batches one by one instead of all at once, with a change before each."""
    total = 0.0 * valid_tokens()
    for batch in batches:
        before(runner)
        total = total + run(runner, step, [batch], valid_tokens)
    return total


@fault("parallel.fsdp._sum_gradients", "ep2 of dp4")
def expert_sum_over_ep(set_sums, model, context, experts):
    """gradients of experts are averaged over the ranks that have tokens for them"""
    set_sums(model, context, experts)
    layout = context.job.layout
    for module in experts:
        module.set_gradient_divide_factor(float(layout.expert_fsdp * layout.ep))


@fault("parallel.tensor_parallel.forward_with_converted_params", "ep2 of tp2")
def router_unsummed(replace_forward, convert, module, own):
    """each rank of tensor parallel keeps its own tokens' gradient of the router"""
    replace_forward(local_part if isinstance(module, Router) else convert, module, own)


@fault("parallel.expert_parallel._dispatch", "ep2")
def dispatch_shifted(dispatch, group, compute, row_order, sizes, tokens, counts):
    """tokens go to the experts of the next rank"""
    experts = len(counts) // group.size()
    rows = int(counts[-experts:].sum())
    sent = dispatch(group, compute, row_order, sizes, tokens.roll(rows, 0), counts.roll(experts))
    return sent.roll(-rows, 0)


@fault("parallel.expert_parallel.order_by_expert", "ep2")
def combine_unsorted(row_order, received, total):
    """what experts make of tokens returns in the order of the experts"""
    return row_order(received, total)[0], torch.arange(total), received.sum(0)


@fault("parallel.balance.ExpertLoad.end_step", "dp2", variant="bias")
def counts_per_rank(end_step, *call):
    """biases follow the choices of each rank's own tokens"""
    with patch.object(dist, "all_reduce", lambda *args, **how: None):
        end_step(*call)


@fault("train.step.StepRunner.forward_backward", "dp2", accumulation="3", variant="bias")
def counts_per_microbatch(*call):
    """biases move after every micro-batch"""
    return one_at_a_time(
        lambda runner: runner.balance.end_step(torch.zeros((), dtype=torch.bool)), *call
    )


@fault("parallel.expert_parallel.is_recomputing", "dp2", recompute="full")
def recounted(is_recomputing):
    """a recomputed forward pass counts its choices again"""
    return False


@fault("optim.muon.Muon._orthogonalize", "1")
def experts_one_matrix(each, muon, weights, parts):
    """Muon orthogonalizes a stack of experts as one matrix"""
    for part in parts:
        part.copy_(orthogonalize(part.flatten(0, -2)).view_as(part))


@fault("checkpoint.hf.names.Translation.read", "ep2", extra="imported")
def expert_slices_swapped(read, names, name, region, read_hf):
    """a Hugging Face folder's experts are imported in the opposite order"""
    if names.table[name].tensor != "expert":
        return read(names, name, region, read_hf)
    experts = names.shapes[name][0]
    own, *rest = region
    other = slice(experts - own.stop, experts - own.start)
    return read(names, name, (other, *rest), read_hf).flip(0)


@fault("parallel.fsdp._sum_gradients", "hsdp2x2")
def reduction_dropped(set_sums, model, context, experts):
    """one block's gradients are not summed over the replicas"""
    set_sums(model, context, experts)
    first, *_ = context.blocks(model).values()
    first.set_requires_all_reduce(False)


@fault("parallel.replicated.GradientSum._sum_vectors", "replicate4")
def vectors_unsummed(sum_vectors, sums, used):
    """each replica keeps its own gradients of norms"""
    return torch.ones(len(used))


@fault("parallel.replicated.GradientSum._add", "replicate4", accumulation="3")
def summed_early(add, sums, parameter):
    """replicas sum a gradient before the last micro-batch has added to it"""
    if sums._ready is None:
        sums.start()
    add(sums, parameter)


@fault("parallel.replicated.GradientSum._start_sum", "replicate4")
def waited_too_late(start_sum, sums, gradients):
    """gradients are read before their sums over the replicas have arrived"""
    start_sum(sums, [gradient.clone() for gradient in gradients])


@fault("parallel.replicated.GradientSum.__init__", "replicate4", precision="float32")
def replicas_summed_in_bf16(make, sums, parameters, group, dtype, device):
    """replicas sum gradients in bfloat16 instead of float32"""
    make(sums, parameters, group, torch.bfloat16, device)


@fault("parallel.cast._cast_rows", "1", precision="bfloat16")
def cast_forgotten(cast, embedding, dtype):
    """without FSDP2, the rows of an embedding are not cast"""


@fault("parallel.fsdp._sum_gradients", "dp2")
def divided_twice(set_sums, model, context, experts):
    """gradients are averaged over the ranks after the loss was divided by the global token count"""
    set_sums(model, context, experts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(context.job.layout.data_parallel))


@fault("parallel.init.fill", "tp2", "dp2", "replicate4")
def seed_per_rank(fill, parameter, name, rule, seed):
    """every rank draws initial values with another seed"""
    fill(parameter, name, rule, seed + dist.get_rank())


@fault("parallel.init.shard_offset", "dp2")
def same_shards(offset, tensor):
    """every shard has the initial values of the first one"""
    return (0,) * tensor.dim()


@fault("optim.grad_norm._exact_norm", "dp2", precision="float32", extra="large")
def norm_in_float32(exact_norm, part, p):
    """the gradient norm is summed in float32"""
    return torch.linalg.vector_norm(part, p)


@fault("train.trainer.build_mesh", "hsdp2x2")
def hsdp_made_fsdp(build, *layout):
    """HSDP shards within a replica but does not sum over the replicas"""
    mesh = build(*layout)
    return replace(mesh, fsdp=mesh.world["dp_shard"])


@fault("parallel.tensor_parallel._split_module", "tp2")
def norms_not_reduced(split, module, name, role, *how):
    """under sequence parallel, gradients of norm weights are not summed over the ranks"""
    if role != "norm":
        return split(module, name, role, *how)
    own = "titanlite.parallel.tensor_parallel.LocalParameters._local"
    with patch(own, staticmethod(local_part)):
        return split(module, name, "replicated", *how)


@fault("train.trainer.build_model", "tp2")
def column_made_whole(build, job):
    """a column row of the model's table says replicated"""
    model, table = build(job)
    columns = (rule.pattern for rule in table.values() if rule.tensor == "column")
    wrong = next(pattern for pattern in columns if pattern.endswith("weight"))
    for name, rule in table.items():
        if rule.pattern == wrong:
            table[name] = replace(rule, tensor="replicated")
    return model, table


@fault("train.trainer.build_model", "dp2", variant="tied")
def tie_broken(build, job):
    """the output layer does not share the embedding's weight"""
    model, table = build(job)
    for second, first in shared_names(model).items():
        module, _, attribute = second.rpartition(".")
        own = nn.Parameter(model.get_parameter(first).detach().clone())
        setattr(model.get_submodule(module), attribute, own)
        table[second] = table[first]
    return model, table


@fault("train.trainer.build_model", "dp2", variant="frozen")
def frozen_thawed(build, job):
    """frozen parameters are trained"""
    model, table = build(job)
    return model.requires_grad_(True), table


@fault("parallel.fsdp_schedule.set_prefetch", "dp2", prefetch="2")
def prefetch_reversed(set_order, groups, plan):
    """the prefetch schedules of the forward and backward passes are swapped"""
    set_order(groups, replace(plan, forward=plan.backward, backward=plan.forward))


@fault("parallel.fsdp_schedule.set_prefetch", "dp2", "dp3", accumulation="3")
def gathered_twice(set_order, groups, plan):
    """the backward pass gathers the embedding, which it does not read"""
    set_order(groups, replace(plan, forward_only=frozenset()))


def _between_micro_batches(change, *call):
    def before(runner):
        for parameter in runner.parameters:
            if parameter.grad is not None:
                change(parameter.grad)

    return one_at_a_time(before, *call)


@fault("train.step.StepRunner.forward_backward", "dp2", accumulation="3")
def accumulation_in_bf16(*call):
    """gradients are rounded to bfloat16 between micro-batches"""
    return _between_micro_batches(lambda gradient: gradient.copy_(gradient.bfloat16()), *call)


@fault("train.step.StepRunner.forward_backward", "dp2", accumulation="3")
def accumulation_forgotten(*call):
    """each micro-batch's gradients replace those of the previous one"""
    return _between_micro_batches(Tensor.zero_, *call)


@fault("train.step.grad_norm", "dp2", "tp2")
def clip_by_local_norm(norm, parameters, p, *stages):
    """gradients are clipped by the norm of the rank's shards instead of the global norm"""
    return nn.utils.get_total_norm([local_part(parameter.grad) for parameter in parameters], p)


@fault("optim.grad_norm._norm", "tp2")
def replicas_counted(norm, gradients, p):
    """the norm counts a parameter once for each rank that holds all of it"""
    first = gradients[0]
    copies = 1
    if isinstance(first, DTensor):
        for dimension, placement in enumerate(first.placements):
            if placement.is_replicate():
                copies *= first.device_mesh.size(dimension)
    return norm(gradients, p) * copies ** (1 / p)


@fault("optim.muon.Muon._orthogonalize", "dp2", "tp2")
def parts_orthogonalized(whole, muon, weights, parts):
    """Muon orthogonalizes each rank's shard instead of the whole matrix"""
    for part in parts:
        part.copy_(orthogonalize(part))


@fault("optim.state_store.OnHost.write", "dp2", "1", extra="state on host")
def state_not_written(write, *call):
    """state on the host is read and updated, but not written back"""


@fault("train.guard.StepGuard.exchange", "dp3", "replicate4")
def labels_per_rank(exchange, guard, valid_tokens, stop=False):
    """the loss is divided by the rank's valid tokens instead of the global count"""
    return lambda: valid_tokens


@fault("parallel.fsdp.MixedPrecisionPolicy", "dp2", precision="float32")
def reduction_in_bf16(policy, **how):
    """gradients are reduced in bfloat16 instead of float32"""
    return policy(**(how | {"reduce_dtype": torch.bfloat16}))


@fault("data.loader.MicroBatch.documents", "tp2", documents="on")
def documents_mixed(documents, batch):
    """attention crosses from one document to the next"""


@fault("data.loader.MicroBatch.documents", "pp2", documents="on")
def documents_dropped(documents, batch):
    """stages of a pipeline are not told where documents end"""


@fault("parallel.context_parallel.Partial", "cp2")
def keys_not_summed(partial):
    """each rank keeps the gradients of its own tokens' attention to other ranks' keys and values"""
    return Replicate()


@fault("parallel.context_parallel._in_order", "cp2")
def order_forgotten(in_order, chunks, balanced):
    """gathered keys and values stay in the order of the ranks"""
    return chunks


@fault("data.loader.MicroBatch.positions", "cp2", "cp2 x tp2", sequence="ulysses")
def positions_restart(positions, batch):
    """each rank counts positions from 0"""
    return torch.arange(batch.tokens.size(1))[None]


@fault("train.step.StepRunner.forward_backward", "cp2")
def tokens_counted_whole(run, runner, number, batches, valid_tokens):
    """the tokens of a sequence are counted by each of the ranks that split it"""
    whole = count_valid(torch.stack([batch.rows[:, 1] for batch in batches]))
    dist.all_reduce(whole, group=runner.context.mesh.loss)
    return run(runner, number, batches, lambda: whole)


@fault("train.trainer.build_mesh", "dp2 x cp2")
def context_not_reduced(build, *layout):
    """parameters are sharded over dp_shard alone, so that nothing sums over the ranks of cp"""
    return hsdp_made_fsdp(build, *layout)


@fault("data.loader.MicroBatch.documents", "cp2", documents="on")
def documents_cut(documents, batch):
    """the documents are cut like the tokens"""
    own = batch.rows[:, 2, batch.own_positions]
    return own.repeat(1, batch.rows.size(2) // own.size(1))


@fault("parallel.pipeline_parallel.build_schedule", "pp2")
def microbatch_averaged(build, *call):
    """gradients are divided by the number of micro-batches"""
    schedule = build(*call)
    schedule.scale_grads = True
    return schedule


@fault("train.step.StepRunner.forward_backward", "pp2")
def pipeline_undivided(run, runner, step, batches, valid_tokens):
    """a pipeline divides the loss by its tokens after the backward pass"""
    total = valid_tokens()
    return run(runner, step, batches, lambda: torch.ones_like(total)) / total


@fault("train.step.grad_norm", "pp2")
def stage_norm_local(norm, parameters, p, stages, copies):
    """each stage clips its gradients by its own norm"""
    return norm(parameters, p, None, copies)


@fault("parallel.pipeline_parallel.Pipeline.sum_tied_gradients", "pp2", variant="tied")
def tie_unsummed(sum_gradients, pipeline):
    """the two stages of a tied weight do not sum its gradients"""


@fault("parallel.init.fill", "pp2")
def seed_by_stage_number(fill, parameter, name, *more):
    """a block's initial values follow its place in the stage"""
    of_two_blocks = re.sub(r"(?<=\.)\d+(?=\.)", lambda number: f"{int(number[0]) % 2}", name)
    fill(parameter, of_two_blocks, *more)


@fault("parallel.stage.Stage.backward_one_chunk", "pp2")
def last_microbatch_lost(backward, stage, *args, last_backward=False, **more):
    """gradients are taken before the last backward pass has added to them"""
    before = [(p, None if p.grad is None else p.grad.clone()) for p in stage.submod.parameters()]
    backward(stage, *args, last_backward=last_backward, **more)
    if last_backward:
        for parameter, gradient in before:
            parameter.grad = gradient


@fault("data.loader.MicroBatch.positions", "pp2 x cp2")
def positions_guessed(positions, batch):
    """later stages count positions in their part of the sequence"""
    is_first = dist.get_rank() < dist.get_world_size() // 2
    return positions(batch) if is_first else positions_restart(positions, batch)


@fault("parallel.pipeline_parallel.cut", "pp2")
def blocks_swapped(split, model, spec, stages):
    """two stages have each other's blocks"""

    def other(name):
        block = re.fullmatch(rf"{spec.blocks}\.(\d+)", name)
        return f"{spec.blocks}.{(int(block[1]) + 2) % 4}" if block else name

    return split(model, spec, [[*map(other, names)] for names in stages])


@fault("train.report.loss_over_ranks", "pp2")
def loss_on_one_rank(shared, loss, *more):
    """the last stage's loss is not shared with the other stages"""
    total = shared(loss, *more)
    return total if loss.item() else (0.0, 0.0)


@fault("train.loss._sharded_loss_sum", "tp2", precision="bfloat16")
def loss_in_bf16(loss_sum, *call):
    """tensor parallel computes the loss in the logits' bfloat16"""
    with patch.object(torch, "promote_types", lambda logits, float32: logits):
        return loss_sum(*call)


@fault("parallel.parallelize.own_parts", "dp2", recompute="full")
def names_wrapped(split, model, context):
    """a wrapper around the blocks changes their parameters' names"""
    blocks = model.get_submodule(context.job.spec.blocks)
    for name, block in [*blocks.named_children()]:
        wrapper: Any = nn.Module()
        wrapper.wrapped = block
        wrapper.forward = block.__call__
        blocks.register_module(name, wrapper)
    return split(model, context)
