"""Pipeline parallel: a rank has some stages of the model and runs them, micro-batch by micro-batch, in an order.

The orders, and what they send, are those of torch's schedules. A stage is a part of the plain model: it takes tokens
or hidden states, and returns hidden states; the last one has the loss. The whole step is one run of the schedule, and
gradients are summed over other ranks once, at its end.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.pipeline_order import numbered_by_last_stage
from titanlite.config.stages import SINGLE, Stages, splits_backward
from titanlite.errors import UserError
from titanlite.parallel.build import Context, build_meta_model
from titanlite.parallel.dtensor import local_part
from titanlite.registry import ModelSpec
from titanlite.runtime import torch_private


class MicroBatch(Protocol):
    """What stages read: every pipeline rank has it all. Positions are explicit, since later stages see no tokens."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor | None: ...
    @property
    def documents(self) -> Tensor | None: ...


Loss = Callable[[nn.Module, Any, Tensor], Tensor]
"""The sum of the token losses, from the last stage, a micro-batch and the hidden states that the stage receives."""


def split(model: nn.Module, spec: ModelSpec, stages: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Return a copy of the model on the meta device for each stage, with only the modules that the stage names.

    What has no parameters, such as rotary tables, every stage has.
    """
    places = tuple(f"{name}." for name in (*spec.before, spec.blocks, *spec.after))
    if lost := [name for name, _ in model.named_parameters() if not name.startswith(places)]:
        known = ", ".join(place[:-1] for place in places)
        raise UserError(f"pipeline parallel: {lost[0]} is in none of the modules that a stage can have: {known}")
    parts = [copy.deepcopy(model) for _ in stages]
    for part, names in zip(parts, stages, strict=True):
        blocks = part.get_submodule(spec.blocks)
        for name in [f"{spec.blocks}.{number}" for number, _ in blocks.named_children()]:
            if name not in names:
                delattr(blocks, name.rpartition(".")[2])
        for path, _, name in (name.rpartition(".") for name in (*spec.before, *spec.after) if name not in names):
            setattr(part.get_submodule(path), name, None)
    return parts


def orders(stages: Stages) -> list[list[str]]:
    """Return the actions of every pipeline rank, as torch writes them, such as "1F0"."""
    ranks, count = len(stages.ranks), stages.micro_batches
    if stages.csv:
        return [list(row) for row in stages.csv]
    if stages.schedule in SINGLE:
        return [[*_order_of_single(stages.schedule, rank, ranks, count)] for rank in range(ranks)]
    sizes = {"num_stages": len(stages.names), "group_size": ranks, "group_rank": 0}
    blank = [SimpleNamespace(stage_index=index, submod=nn.Module(), **sizes) for index in stages.ranks[0]]
    found = _schedule_class(stages)(blank, count, loss_fn=None).pipeline_order
    return [[str(action) for action in found[rank] if action is not None] for rank in range(ranks)]


def _schedule_class(stages: Stages) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class  # slow

    return get_schedule_class(stages.schedule)


def _order_of_single(schedule: str, stage: int, stages: int, count: int) -> Iterator[str]:
    """Yield the actions of GPipe or 1F1B. (torch's own list of 1F1B's has an error: its last rank begins with 1.)"""
    ahead = count if schedule == "GPipe" else min(count, stages - stage)
    yield from (f"{stage}F{number}" for number in range(ahead))
    for number in range(count):
        yield f"{stage}B{number}"
        if ahead + number < count:
            yield f"{stage}F{ahead + number}"


class Pipeline:
    """This rank's stages, and the schedule that runs them."""

    def __init__(
        self, context: Context, parts: Sequence[nn.Module], loss: Loss, reseed: Callable[[int, int, int], None]
    ) -> None:
        """Take the parts in the order of the stages; `reseed` gets the step, a micro-batch's number and a stage."""
        from titanlite.parallel.stage import Stage

        self.context, self.job, self.loss, self.reseed = context, context.job, loss, reseed
        stages, mesh = self.job.stages, context.mesh.world["pp"]
        if splits_backward(stages.schedule, stages.csv):
            torch_private.keep_buffers_of_compiled_graphs()
        self.group, own = mesh.get_group(), stages.ranks[mesh.get_local_rank()]
        whole, _ = build_meta_model(self.job.spec, self.job.model)
        (embeddings,) = split(whole, self.job.spec, [self.job.spec.before])
        token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        self.width = embeddings(token, token).size(-1)
        self.shape = stages.size, self.job.config.training.seq_len // self.job.layout.cp
        """Sequences and tokens of a micro-batch."""
        self.rank_of = stages.rank_of
        self.stages = [Stage(part, index, self) for index, part in zip(own, parts, strict=True)]
        self.has_loss = any(stage.is_last for stage in self.stages)
        self.first_with_loss = int(context.mesh.world.mesh[self.rank_of[len(stages.names) - 1]].min())
        self.numbers = [*range(stages.micro_batches)]
        """The number of each micro-batch, by the number that torch's schedule has for it."""
        self.schedule = self._schedule(stages)
        self.tied = [*self._ties()]
        self.copies = [parameter for parameter, _, is_copy in self.tied if is_copy]
        """Parameters that another stage has as well, and counts."""
        self.actions: list[str] = []
        """What this rank did in the last step."""
        self.runs_again = False
        """A backward pass is in its first half, which leaves out the gradients of weights."""
        self.step, self.micro_batches, self.valid_tokens = 0, list[MicroBatch](), torch.ones(())

    def _ties(self) -> Iterator[tuple[nn.Parameter, int, bool]]:
        """Yield this rank's trained parameters that another stage has too, with its rank and which is the copy."""

        def stage_of(name: str) -> int:
            names = self.job.stages.names
            return next(i for i, modules in enumerate(names) if name.startswith(tuple(f"{m}." for m in modules)))

        for first, rule in self.context.table.items():
            if rule.tied and (first_stage := stage_of(first)) != (second_stage := stage_of(rule.tied)):
                for stage in self.stages:
                    if stage.stage_index in (first_stage, second_stage):
                        is_copy = stage.stage_index == second_stage
                        parameter = stage.submod.get_parameter(rule.tied if is_copy else first)
                        if parameter.requires_grad:
                            yield parameter, self.rank_of[first_stage if is_copy else second_stage], is_copy

    def _schedule(self, stages: Stages) -> Any:
        options: dict[str, Any] = {"loss_fn": lambda loss, number: loss / self.valid_tokens, "scale_grads": False}
        if stages.csv:
            # torch takes a loss by its position among the last stage's forward passes.
            rows, self.numbers = numbered_by_last_stage(stages.csv)
            return torch_private.schedule_of_rows(self.stages, stages.micro_batches, rows, options)
        run = self.stages[0] if stages.schedule in SINGLE else self.stages
        return _schedule_class(stages)(run, stages.micro_batches, **options)

    def hidden(self, sequences: int, tokens: int, device: torch.device | str) -> Tensor:
        """Return an empty tensor like what stages send; tensor parallel splits the sequence between blocks."""
        dtype = getattr(torch, self.job.config.training.mixed_precision_param)
        size = sequences, tokens // self.job.layout.tp, self.width
        return torch.empty(size, dtype=dtype, device=device, requires_grad=True)

    def forward_backward(self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: Tensor) -> Tensor:
        """Add the gradients of (token losses / valid tokens); return that loss, zero without the last stage."""
        self.step, self.valid_tokens = step, valid_tokens.clamp(min=1)
        self.micro_batches = [micro_batches[number] for number in self.numbers]
        self.actions, losses = [], list[Tensor]()
        numbers = torch.arange(len(micro_batches))  # what torch splits as targets
        self.schedule.step(target=numbers, losses=losses, return_outputs=False)
        self.micro_batches = []
        zero = torch.zeros((), dtype=torch.float64, device=self.context.device)
        return torch.stack([zero, *(loss.detach().double() for loss in losses)]).sum()

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Let both stages of a tie have the sum of their gradients, to the bit: a + b is b + a."""
        for parameter, peer, _ in self.tied:
            assert parameter.grad is not None
            own = local_part(parameter.grad).contiguous()
            theirs = torch.empty_like(own)
            sends = [dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)]
            receives = [dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer)]
            for work in dist.batch_isend_irecv(sends + receives):
                work.wait()
            local_part(parameter.grad).copy_(own + theirs)

    @torch.no_grad()
    def forward(self, batch: MicroBatch, last: Loss) -> Tensor | None:
        """Run all stages in their order on sequences of any length, without gradients.

        Return what `last` makes of the last stage, the batch and the stage's hidden states; None on other ranks.
        """
        own, inputs = dist.get_group_rank(self.group, dist.get_rank()), batch.tokens
        for stage in self.stages:
            index = stage.stage_index
            if index and self.rank_of[index - 1] != own:
                sequences, tokens = batch.tokens.shape
                inputs = self.hidden(sequences, tokens, self.context.device).detach()
                dist.recv(inputs, group=self.group, group_src=self.rank_of[index - 1])
            if stage.is_last:
                return last(stage.submod, batch, inputs)
            inputs = stage.submod(inputs, batch.positions, batch.documents)
            if self.rank_of[index + 1] != own:
                dist.send(inputs.contiguous(), group=self.group, group_dst=self.rank_of[index + 1])
        return None

    def begin(self, stage: int, kind: str, number: int) -> None:
        """Record an action, and seed the dropout of a forward pass."""
        number = self.numbers[number]
        self.actions.append(f"{stage}{kind}{number}")
        self.runs_again = kind == "I"
        if kind == "F":
            self.reseed(self.step, number, stage)
