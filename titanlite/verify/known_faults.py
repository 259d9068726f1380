"""Known faults as patches: mistakes that real trainers shipped, and that the table must detect.

Each is put into the trainer on every rank, never into the reference. A fault names the rows that can show it.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

import titanlite.optim.grad_norm as grad_norm
import titanlite.train.loss as loss
import titanlite.train.report as report
import titanlite.train.step as step
import titanlite.train.trainer as trainer
from titanlite.data.loader import MicroBatch
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.parallel import (
    context_parallel,
    fsdp,
    fsdp_schedule,
    init,
    parallelize,
    pipeline_parallel,
    recompute,
    tensor_parallel,
)
from titanlite.parallel.build import Context
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.parallel.stage import Stage
from titanlite.train.guard import StepGuard
from titanlite.train.step import StepRunner
from titanlite.verify import expert_faults  # noqa: F401 (registers faults)
from titanlite.verify.fault_patch import FAULTS, Patch, after, fault, followed_by
from titanlite.verify.table import Row

__all__ = ["FAULTS"]


@fault("one block's gradients are not summed over the replicas", Row("hsdp2x2"), Row("replicate4"))
def _reduction_dropped() -> Patch:
    def drop(model: torch.nn.Module, context: Context) -> None:
        block = next(iter(context.blocks(model).values()))
        assert isinstance(block, FSDPModule)
        block.set_requires_all_reduce(False)

    return after(fsdp.apply, drop)


@fault("gradients are averaged over the ranks after the loss was divided by the global token count", Row("dp2"))
def _divided_twice() -> Patch:
    def average(model: torch.nn.Module, context: Context) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(context.job.layout.batch))

    return after(fsdp.apply, average)


@fault("every rank draws initial values with another seed", Row("dp2"), Row("replicate4"))
def _seed_per_rank() -> Patch:
    draw = parallelize.materialize

    def own_seed(model: Any, table: Any, seed: int, *args: Any, **arguments: Any) -> None:
        draw(model, table, seed + dist.get_rank(), *args, **arguments)

    return patch.multiple(parallelize, materialize=own_seed)


@fault("every shard has the initial values of the first one", Row("dp2"))
def _same_shards() -> Patch:
    return patch.multiple(init, shard_offset=lambda tensor: (0,) * tensor.dim())


@fault("the gradient norm is summed in float32", Row("dp2", precision="float32", extra="large"))
def _norm_in_float32() -> Patch:
    return patch.multiple(grad_norm, _exact_norm=torch.linalg.vector_norm)


def _sharded_over(dimension: str) -> Patch:
    build = trainer.build_mesh

    def build_other(*args: Any) -> Any:
        mesh = build(*args)
        return replace(mesh, fsdp=mesh.world[dimension])

    return patch.multiple(trainer, build_mesh=build_other)


@fault("HSDP shards within a replica but does not sum over the replicas", Row("hsdp2x2"))
def _hsdp_made_fsdp() -> Patch:
    return _sharded_over("dp_shard")


@fault("under sequence parallel, gradients of norm weights are not summed over the ranks", Row("tp2"))
def _norms_not_reduced() -> Patch:
    return patch.multiple(
        tensor_parallel, SequenceParallel=lambda **_: tensor_parallel.ReplicatedModule(), Partial=Replicate
    )


@fault("a column row of the model's table has the role replicated", Row("tp2"))
def _column_made_whole() -> Patch:
    def spoil(built: Any, *args: Any) -> None:
        _, table = built
        wrong = next(rule for rule in table.values() if rule.tensor == "column" and rule.pattern.endswith("weight"))
        table.update({n: replace(r, tensor="replicated") for n, r in table.items() if r.pattern == wrong.pattern})

    return followed_by(trainer, "build_model", spoil)


@fault("the output layer does not share the embedding's weight", Row("dp2", variant="tied"))
def _tie_broken() -> Patch:
    def untie(built: Any, *args: Any) -> None:
        model, table = built
        for second, first in init.shared_names(model).items():
            module, _, attribute = second.rpartition(".")
            own = torch.nn.Parameter(model.get_parameter(first).detach().clone())
            setattr(model.get_submodule(module), attribute, own)
            table[second] = table[first]

    return followed_by(trainer, "build_model", untie)


@fault("frozen parameters are trained", Row("dp2", variant="frozen"))
def _frozen_thawed() -> Patch:
    return followed_by(trainer, "build_model", lambda built, *args: built[0].requires_grad_(True))


@fault("the prefetch schedules of the forward and backward passes are swapped", Row("dp2", prefetch="2"))
def _prefetch_reversed() -> Patch:
    set_order = fsdp_schedule.set_prefetch

    def reversed_order(groups: Any, plan: fsdp_schedule.Schedule) -> None:
        set_order(groups, replace(plan, forward=plan.backward, backward=plan.forward))

    return patch.multiple(fsdp_schedule, set_prefetch=reversed_order)


@fault("gradients are rounded to bfloat16 between micro-batches", Row("dp2", accumulation="3"))
def _accumulation_in_bf16() -> Patch:
    return _between_micro_batches(lambda gradient: gradient.copy_(gradient.bfloat16()))


@fault("each micro-batch's gradients replace those of the previous one", Row("dp2", accumulation="3"))
def _accumulation_forgotten() -> Patch:
    return _between_micro_batches(lambda gradient: gradient.zero_())


def _between_micro_batches(change: Callable[[torch.Tensor], Any]) -> Patch:
    original = StepRunner.forward_backward

    def one_at_a_time(self: StepRunner, number: int, micro_batches: Any, valid_tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for batch in micro_batches:
            for gradient in (parameter.grad for parameter in self.parameters if parameter.grad is not None):
                change(gradient)
            losses.append(original(self, number, [batch], valid_tokens))
        return torch.stack(losses).sum()

    return patch.multiple(StepRunner, forward_backward=one_at_a_time)


@fault("gradients are clipped by the norm of the rank's shards instead of the global norm", Row("dp2"), Row("tp2"))
def _clip_by_local_norm() -> Patch:
    def local(parameters: Any, max_norm: float, p: float = 2.0, *stages: Any) -> torch.Tensor:
        shards = [q.grad.to_local() if isinstance(q.grad, DTensor) else q.grad for q in parameters]
        norm = torch.nn.utils.get_total_norm(shards, p)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    return patch.multiple(step, clip_grad_norm=local)


@fault("Muon orthogonalizes each rank's shard instead of the whole matrix", Row("dp2"), Row("tp2"))
def _parts_orthogonalized() -> Patch:
    return patch.multiple(
        Muon, _orthogonalize=lambda self, names, shapes, parts: [p.copy_(orthogonalize(p)) for p in parts]
    )


@fault("the loss is divided by the rank's valid tokens instead of the global count", Row("dp3"), Row("replicate4"))
def _labels_per_rank() -> Patch:
    return patch.multiple(StepGuard, exchange=lambda self, valid_tokens, stop=False: valid_tokens)


@fault("gradients are reduced in bfloat16 instead of float32", Row("dp2", precision="float32"))
def _reduction_in_bf16() -> Patch:
    policy = fsdp.MixedPrecisionPolicy
    return patch.multiple(fsdp, MixedPrecisionPolicy=lambda **how: policy(**(how | {"reduce_dtype": torch.bfloat16})))


@fault("attention crosses from one document to the next", Row("tp2", documents="on"))
def _documents_mixed() -> Patch:
    return patch.multiple(MicroBatch, documents=None)


@fault("each rank keeps the gradients of its own tokens' attention to other ranks' keys and values", Row("cp2"))
def _keys_not_summed() -> Patch:
    return patch.multiple(context_parallel, Partial=Replicate)


@fault("gathered keys and values stay in the order of the ranks", Row("cp2"))
def _order_forgotten() -> Patch:
    return patch.multiple(context_parallel, _in_order=lambda chunks, balanced: chunks)


@fault("each rank counts positions from 0", Row("cp2"), Row("cp2 x tp2", sequence="ulysses"))
def _positions_restart() -> Patch:
    return patch.multiple(MicroBatch, positions=property(lambda self: torch.arange(self.tokens.size(1))[None]))


@fault("the tokens of a sequence are counted by each of the ranks that split it", Row("cp2"))
def _tokens_counted_whole() -> Patch:
    original = StepRunner.forward_backward

    def counted_whole(self: StepRunner, number: int, batches: Any, valid_tokens: torch.Tensor) -> torch.Tensor:
        whole = loss.count_valid(torch.stack([batch.rows[:, 1] for batch in batches]))
        dist.all_reduce(whole, group=self.context.mesh.loss)
        return original(self, number, batches, whole)

    return patch.multiple(StepRunner, forward_backward=counted_whole)


@fault("parameters are sharded over dp_shard alone, so that nothing sums over the ranks of cp", Row("dp2 x cp2"))
def _context_not_reduced() -> Patch:
    return _sharded_over("dp_shard")


@fault("the documents are cut like the tokens", Row("cp2", documents="on"))
def _documents_cut() -> Patch:
    def tiled(batch: MicroBatch) -> torch.Tensor:
        own = batch.rows[:, 2, batch.own_positions]
        return own.repeat(1, batch.rows.size(2) // own.size(1))

    return patch.multiple(MicroBatch, documents=property(tiled))


@fault("gradients are divided by the number of micro-batches", Row("pp2"))
def _microbatch_averaged() -> Patch:
    def average(schedule: Any, *args: Any) -> None:
        schedule.scale_grads = True

    return followed_by(Pipeline, "_schedule", average)


@fault("each stage clips its gradients by its own norm", Row("pp2"))
def _stage_norm_local() -> Patch:
    def local(parameters: Any, max_norm: float, p: float, stages: Any, copies: Any) -> torch.Tensor:
        return clip_grad_norm(parameters, max_norm, p, None, copies)

    return patch.multiple(step, clip_grad_norm=local)


@fault("the two stages of a tied weight do not sum its gradients", Row("pp2", variant="tied"))
def _tie_unsummed() -> Patch:
    return patch.multiple(Pipeline, sum_tied_gradients=lambda self: None)


@fault("a block's initial values follow its place in the stage", Row("pp2"))
def _seed_by_stage_number() -> Patch:
    draw = init.materialize

    def by_place(part: Any, table: Any, *args: Any) -> None:
        numbers = [int(n) for name, _ in part.named_parameters() for n in name.split(".")[1:2] if n.isdigit()]
        first, fill = min(numbers, default=0), init.fill

        def place(parameter: Any, name: str, *more: Any) -> None:
            words = name.split(".")
            words[1:2] = [str(int(n) - first) if n.isdigit() else n for n in words[1:2]]
            fill(parameter, ".".join(words), *more)

        with patch.multiple(init, fill=place):
            draw(part, table, *args)

    return patch.multiple(parallelize, materialize=by_place)


@fault("gradients are taken before the last backward pass has added to them", Row("pp2"))
def _last_microbatch_lost() -> Patch:
    backward = Stage.backward_one_chunk

    def without_the_last(stage: Stage, *args: Any, last_backward: bool = False, **more: Any) -> None:
        before = [(p, None if p.grad is None else p.grad.clone()) for p in stage.submod.parameters()]
        backward(stage, *args, last_backward=last_backward, **more)
        for parameter, gradient in before if last_backward else ():
            parameter.grad = gradient

    return patch.multiple(Stage, backward_one_chunk=without_the_last)


@fault("later stages count positions in their part of the sequence", Row("pp2 x cp2"))
def _positions_guessed() -> Patch:
    own = MicroBatch.split

    def without(self: MicroBatch, size: int) -> Any:
        first = dist.get_rank() < dist.get_world_size() // 2
        return own(self, size) if first else [_Guessed(part.rows, part.own_positions) for part in own(self, size)]

    return patch.multiple(MicroBatch, split=without)


class _Guessed(MicroBatch):
    positions = property(lambda self: torch.arange(self.tokens.size(1))[None])  # type: ignore[assignment]


@fault("two stages have each other's blocks", Row("pp2"))
def _blocks_swapped() -> Patch:
    def swapped(model: Any, spec: Any, stages: Any) -> Any:
        numbers = {f"{spec.blocks}.{n}": f"{spec.blocks}.{(n + 2) % 4}" for n in range(4)}
        return cut(model, spec, [[numbers.get(name, name) for name in names] for names in stages])

    cut = pipeline_parallel.split
    return patch.multiple(pipeline_parallel, split=swapped)


@fault("the last stage's loss is not shared with the other stages", Row("pp2"))
def _loss_on_one_rank() -> Patch:
    shared = report.loss_over_ranks

    def local(loss: torch.Tensor, valid_tokens: torch.Tensor, group: Any) -> Any:
        total, worst = shared(loss, valid_tokens, group)
        return (total, worst) if loss.item() else (0.0, 0.0)

    return patch.multiple(report, loss_over_ranks=local)


@fault("tensor parallel computes the loss in the logits' bfloat16", Row("tp2", precision="bfloat16"))
def _loss_in_bf16() -> Patch:
    not_promoted = SimpleNamespace(**{**vars(torch), "promote_types": lambda logits, float32: logits})
    return patch.multiple(loss, torch=not_promoted)


@fault("a wrapper around the blocks changes their parameters' names", Row("dp2", recompute="full"))
def _names_wrapped() -> Patch:
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.wrapped = inner

        def forward(self, *args: Any) -> Any:
            return self.wrapped(*args)

    def wrap(model: torch.nn.Module, context: Context) -> None:
        blocks = model.get_submodule(context.job.spec.blocks)
        for name, block in list(blocks.named_children()):
            setattr(blocks, name, Wrapper(block))

    return after(recompute.apply, wrap)
