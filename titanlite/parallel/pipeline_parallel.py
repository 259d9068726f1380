"""Pipeline parallel: a rank has some stages of the model and runs micro-batches through them.

torch's schedules determine the order, and which tensors are sent. A stage is a part of the plain
model: it takes tokens or hidden states, and returns hidden states; the last one has the loss. A
step runs the schedule once, and gradients are summed over other ranks once, at its end.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from titanlite.config.job import Job
from titanlite.config.stages import SINGLE, SPLIT_BACKWARD, Stages
from titanlite.errors import UserError
from titanlite.parallel.build import Context, build_meta_model
from titanlite.parallel.collectives import swap
from titanlite.parallel.context_parallel import TokenShare
from titanlite.parallel.dtensor import local_part
from titanlite.registry import ModelSpec
from titanlite.runtime import torch_private

if TYPE_CHECKING:
    from titanlite.parallel.stage import Stage  # torch needs a second for it


class StageInput(Protocol):
    """A micro-batch as the stages see it, complete on every pipeline rank.

    Positions are explicit, since later stages see no tokens.
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor | None: ...
    @property
    def documents(self) -> Tensor | None: ...
    def split(self, size: int) -> "Sequence[StageInput]": ...


Loss = Callable[..., Tensor]
"""Returns the sum of token losses, given the last stage, a micro-batch and the stage's inputs.

Training also passes `runs_again` (train/loss.py).
"""


def cut(model: nn.Module, spec: ModelSpec, stages: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Return for each stage a copy of the model on the meta device that has only its modules.

    Modules without parameters, such as rotary tables, are in every stage.
    """
    modules = (*spec.before, spec.blocks, *spec.after)
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{module}.") for module in modules):
            raise UserError(
                f"pipeline parallel: {name} is in none of the modules that a stage can have: "
                + ", ".join(modules)
            )
    parts = []
    for names in stages:
        part = copy.deepcopy(model)
        parts.append(part)
        blocks = part.get_submodule(spec.blocks)
        for number, _ in list(blocks.named_children()):
            if f"{spec.blocks}.{number}" not in names:
                delattr(blocks, number)
        for name in (*spec.before, *spec.after):
            if name not in names:
                path, _, attribute = name.rpartition(".")
                setattr(part.get_submodule(path), attribute, None)
    return parts


def orders(stages: Stages) -> list[list[str]]:
    """Return the actions of every pipeline rank, as torch writes them, such as "1F0"."""
    ranks = len(stages.ranks)
    count = stages.micro_batches
    if stages.schedule in SINGLE:
        return [[*_order_of_single(stages.schedule, rank, ranks, count)] for rank in range(ranks)]
    sizes = {"num_stages": len(stages.names), "group_size": ranks, "group_rank": 0}
    own = stages.ranks[0]
    blank = [SimpleNamespace(stage_index=i, submod=nn.Module(), **sizes) for i in own]
    found = _schedule_class(stages)(blank, count, loss_fn=None).pipeline_order
    rows = []
    for rank in range(ranks):
        rows.append([str(action) for action in found[rank] if action is not None])
    return rows


def _schedule_class(stages: Stages) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class  # slow

    return get_schedule_class(stages.schedule)


def build_schedule(own: Any, stages: Stages, loss: Any = None) -> Any:
    """Return torch's schedule of a rank's stages."""
    if stages.schedule in SINGLE:
        own = own[0]
    return _schedule_class(stages)(own, stages.micro_batches, loss_fn=loss, scale_grads=False)


def _order_of_single(schedule: str, stage: int, stages: int, count: int) -> Iterator[str]:
    """Yield the actions of GPipe or 1F1B.

    torch's list for 1F1B is wrong: its last rank begins with micro-batch 1.
    """
    ahead = count
    if schedule != "GPipe":
        ahead = min(count, stages - stage)
    for number in range(ahead):
        yield f"{stage}F{number}"
    for number in range(count):
        yield f"{stage}B{number}"
        if ahead + number < count:
            yield f"{stage}F{ahead + number}"


class Pipeline:
    """This rank's stages, and the schedule that runs them."""

    def __init__(
        self,
        context: Context,
        parts: Sequence[nn.Module],
        share: TokenShare,
        loss: Loss,
        reseed: Callable[[int, int, int], None],
    ) -> None:
        """Take the parts in the order of the stages.

        `reseed` is called with the step, a micro-batch's number and a stage.
        """
        self.context = context
        self.job = context.job
        self.parts = parts
        self.share = share
        self.loss = loss
        self.reseed = reseed
        stages = self.job.stages
        if stages.schedule in SPLIT_BACKWARD:
            torch_private.keep_buffers_of_compiled_graphs()
        assert context.mesh.pp
        self.group = context.mesh.pp.get_group()
        self.width = _width(self.job)
        self.shape = (stages.size, self.job.config.training.seq_len // self.job.layout.cp)
        """The sequences of a micro-batch, and this rank's tokens of each."""
        self.rank_of = stages.rank_of
        ranks = [self.rank_of[stage] for stage in sorted(self.rank_of)]
        self.source = int(context.mesh.world.mesh[ranks[-1]].min())
        self.lanes = self._build_lanes(ranks)
        self.stages = self._build_stages()
        self.has_loss = any(stage.is_last for stage in self.stages)
        self.schedule = build_schedule(
            self.stages, stages, lambda loss, number: loss / self.valid_tokens()
        )
        self.tied = list(self._ties())
        self.copies = [parameter for parameter, _, is_copy in self.tied if is_copy]
        """Parameters that another stage also has, and counts."""
        self.after_backward: list[Callable[[], None]] = []
        if self.tied:
            self.after_backward.append(self.sum_tied_gradients)
        self.actions: list[str] = []
        """This rank's actions in the last step."""
        self.micro_batches: list[StageInput] = []

    def _build_stages(self) -> list["Stage"]:
        from titanlite.parallel.stage import Stage

        stages = self.job.stages
        count = len(stages.names)
        built = []
        for index, part in zip(stages.ranks[self.group.rank()], self.parts, strict=True):
            inputs, output = self._shapes(index, count)
            built.append(Stage(part, index, count, self.context.device, inputs, output, self))
        return built

    def _build_lanes(self, ranks: list[int]) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Return the group of each edge between stages; `ranks` lists each stage's rank."""
        from titanlite.parallel.stage import build_lanes

        world = self.context.mesh.world
        # Until torch 2.14 is the minimum: ranks that took part in fewer splits named a group
        # differently (pytorch#189073).
        is_old = TorchVersion(torch.__version__) < "2.14"
        if self.job.stages.schedule in SINGLE or (is_old and world.device_type == "cuda"):
            ranks = []  # single schedules gain nothing from lanes, and batch sends with receives
        columns = world.mesh.flatten(1)  # its outermost dimension is pp
        return build_lanes(columns, ranks)

    def _ties(self) -> Iterator[tuple[nn.Parameter, int, bool]]:
        """Yield each trained parameter of this rank that another stage also has, that stage's rank,
        and whether this parameter is the copy (the second name of the tie).
        """
        for first, rule in self.context.table.items():
            if not rule.tied:
                continue
            first_stage = self._stage_of(first)
            second_stage = self._stage_of(rule.tied)
            if first_stage == second_stage:
                continue
            own_names = {first_stage: first, second_stage: rule.tied}
            other_stages = {first_stage: second_stage, second_stage: first_stage}
            for stage in self.stages:
                index = stage.stage_index
                if index not in own_names:
                    continue
                parameter = stage.submod.get_parameter(own_names[index])
                if parameter.requires_grad:
                    yield parameter, self.rank_of[other_stages[index]], index == second_stage

    def _stage_of(self, name: str) -> int:
        """Return the number of the stage that has a parameter."""
        for stage, modules in enumerate(self.job.stages.names):
            if any(name.startswith(f"{module}.") for module in modules):
                return stage
        raise AssertionError(f"{name} is in no stage")

    def hidden(self, sequences: int, tokens: int, device: torch.device | str) -> Tensor:
        """Return an empty tensor like those that stages send.

        Tensor parallel splits the sequence between blocks.
        """
        dtype = getattr(torch, self.job.config.training.mixed_precision_param)
        size = (sequences, tokens // self.job.layout.tp, self.width)
        return torch.empty(size, dtype=dtype, device=device, requires_grad=True)

    def gradients(
        self,
        step: int,
        micro_batches: Sequence[StageInput],
        valid_tokens: Callable[[], Tensor],
        before_last: Callable[[], None],
    ) -> Tensor:
        """Add the gradients of (token losses / valid tokens).

        Return that loss, zero without the last stage.
        """
        self.step = step
        self.valid_tokens = valid_tokens
        self.micro_batches = []
        for batch in micro_batches:
            self.micro_batches += batch.split(self.job.stages.size)
        self.actions = []
        losses: list[Tensor] = []
        numbers = torch.arange(len(self.micro_batches))  # torch splits them like targets
        self.schedule.step(target=numbers, losses=losses, return_outputs=False)
        self.micro_batches = []
        zero = torch.zeros((), dtype=torch.float64, device=self.context.device)
        return torch.stack([zero, *(loss.detach().double() for loss in losses)]).sum()

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Give both stages of a tie the same sum of gradients, bit for bit: a + b is b + a."""
        for parameter, peer, _ in self.tied:
            assert parameter.grad is not None
            own = local_part(parameter.grad).contiguous()
            local_part(parameter.grad).copy_(own + swap(own, peer, self.group))

    @torch.no_grad()
    def evaluate(self, batch: StageInput, last: Loss) -> Tensor | None:
        """Run all stages in their order on sequences of any length, without gradients.

        Return the result of `last`, called with the last stage, the batch and the stage's hidden
        states; None on other ranks.
        """
        own = self.group.rank()
        inputs = batch.tokens
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

    def _shapes(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Return empty tensors like the inputs and the output of a stage."""
        hidden = self.hidden(*self.shape, "meta")
        inputs = output = hidden
        if index == 0:
            inputs = torch.empty(self.shape, dtype=torch.int64, device="meta")
        if index == count - 1:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            output = torch.empty((), dtype=dtype, device="meta")
        return inputs, output

    def tokens(self, number: int) -> Tensor:
        """Return the tokens of a micro-batch."""
        return self.micro_batches[number].tokens

    def compute(self, stage: "Stage", inputs: Tensor) -> Tensor:
        """Return a stage's output for its current micro-batch; the last stage's is the loss."""
        batch = self.micro_batches[stage.number]
        if stage.is_last:
            return self.loss(stage.submod, batch, inputs, runs_again=lambda: stage.runs_again)
        return stage.submod(inputs, batch.positions, batch.documents)

    def begin(self, stage: int, kind: str, number: int) -> None:
        """Record an action, and seed the dropout of a forward pass."""
        self.actions.append(f"{stage}{kind}{number}")
        if kind == "F":
            self.reseed(self.step, number, stage)


def _width(job: Job) -> int:
    """Return the size of a hidden state, found by running the embeddings on the meta device."""
    whole, _ = build_meta_model(job.spec, job.model_config)
    (embeddings,) = cut(whole, job.spec, [job.spec.before])
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    return embeddings(token, token).size(-1)
