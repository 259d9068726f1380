"""Build the optimizer: the parameters it trains, those that decay, and the algorithm.

An algorithm is a registered function from the trained parameters and the config to a torch
optimizer. Before every step the trainer sets `lr` and `training_step` in each parameter group, and
nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.config.job import Job
from titanlite.config.optimizer_state import state_dtype, streams_state
from titanlite.config.schema import JobConfig
from titanlite.errors import UserError
from titanlite.optim.bf16_state import BF16State
from titanlite.optim.streamed import Streamed
from titanlite.parallel.build import named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.mesh import Mesh
from titanlite.registry import OptimizerSpec, Role, Rule, get_optimizer


@dataclass(frozen=True)
class TrainedParam:
    """A trained parameter, and the properties that optimizers use."""

    name: str
    parameter: nn.Parameter
    role: Role
    decays: bool
    is_hidden_matrix: bool
    """A matrix, or the stack of all experts' matrices, from hidden values to hidden values.

    Not an embedding, head or norm.
    """


def check_trained(model: nn.Module, table: dict[str, Rule], job: Job) -> None:
    """Raise if no parameter is trained, a pattern of optimizer.no_decay matches none that is, or
    none is of the kind that the optimizer is for.
    """
    settings = job.config.optimizer
    no_decay = settings.no_decay
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise UserError("model.freeze leaves nothing to train")
    if [*no_decay] == ["biases"] and not any(name.endswith(".bias") for name in names):
        raise UserError(
            'optimizer.no_decay: "biases" matches no trained parameter: the model has none'
        )
    for pattern in set(no_decay) - {"norms", "biases"}:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f'optimizer.no_decay: "{pattern}" matches no trained parameter')
    if _spec(job.config).matrix_states is not None:
        trained = trained_parameters([model], table, job.spec.blocks, no_decay)
        if not any(item.is_hidden_matrix for item in trained):
            raise UserError(
                f'optimizer.name = "{settings.name}" finds no trained matrix inside the model\'s '
                "blocks; use AdamW"
            )


def trained_parameters(
    parts: Iterable[nn.Module], table: dict[str, Rule], blocks: str, no_decay: Sequence[str]
) -> list[TrainedParam]:
    """Return the parameters of this rank's model parts that are not frozen.

    `table` is that of the whole model.
    """
    trained = []
    for part in parts:
        for name, parameter in named_parameters(part, table):
            if not parameter.requires_grad:
                continue
            role = table[name].tensor
            decays = not _is_exempt(name, role, parameter, no_decay)
            in_block = name.startswith(f"{blocks}.") and role in ("column", "row", "replicated")
            is_hidden = role == "expert" or (in_block and parameter.dim() == 2)
            trained.append(TrainedParam(name, parameter, role, decays, is_hidden))
    return trained


def _is_exempt(name: str, role: Role, parameter: nn.Parameter, no_decay: Sequence[str]) -> bool:
    """Return whether optimizer.no_decay exempts a parameter from weight decay."""
    if name.endswith(".bias"):
        exempt = "biases" in no_decay
    else:
        is_vector = parameter.dim() == 1 and name.endswith(".weight")
        exempt = "norms" in no_decay and (role == "norm" or role == "replicated" and is_vector)
    if exempt:
        return True
    return any(fnmatchcase(name, pattern) for pattern in no_decay)


def build_optimizer(
    trained: Sequence[TrainedParam],
    config: JobConfig,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the config names, with its state in optimizer.state_dtype on
    optimizer.state_on.

    Without a mesh there is only this process.
    """
    spec = _spec(config)
    arguments: list[Any] = [trained, config]
    if spec.communicates:
        arguments.append(mesh)
    optimizer = resolve_name(spec.build)(*arguments)
    if config.optimizer.state_dtype == "bfloat16":
        # The state of offloaded parameters is on the CPU, whose kernels need another compiler.
        is_compiled = config.compile.enable and not config.training.enable_cpu_offload
        backend = ""
        if is_compiled:
            backend = config.compile.backend
        return BF16State(optimizer, seed, backend)
    if streams_state(config):
        return Streamed(optimizer, config)
    return optimizer


def groups(
    trained: Sequence[TrainedParam], settings: schema.Optimizer, **more: Any
) -> list[dict[str, Any]]:
    """Return parameter groups with names, separate by weight decay; `more` goes into each."""
    by_kind: dict[tuple[bool, bool], list[TrainedParam]] = {}
    for item in trained:  # one fused kernel cannot take sharded and plain tensors together
        is_sharded = isinstance(item.parameter, DTensor)
        by_kind.setdefault((item.decays, is_sharded), []).append(item)
    param_groups = []
    for (decays, _), members in sorted(by_kind.items(), reverse=True):
        params = [(item.name, item.parameter) for item in members]
        weight_decay = 0.0
        if decays:
            weight_decay = settings.weight_decay
        param_groups.append({"params": params, "weight_decay": weight_decay, **more})
    return param_groups or [{"params": [], **more}]  # a pipeline stage may have nothing to train


def adam(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    settings = config.optimizer
    algorithm = torch.optim.Adam
    if settings.name == "AdamW":
        algorithm = torch.optim.AdamW
    return algorithm(groups(trained, settings), **adam_options(settings))


def sgd(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    settings = config.optimizer
    return torch.optim.SGD(groups(trained, settings), lr=settings.lr, **_flags(settings))


def adam_options(settings: schema.Optimizer) -> dict[str, Any]:
    """Return the keyword arguments of torch's Adam and AdamW."""
    return {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        **_flags(settings),
    }


def _flags(settings: schema.Optimizer) -> dict[str, bool]:
    chosen = _implementation(settings)
    return {"fused": chosen == "fused", "foreach": chosen == "foreach"}


def _implementation(settings: schema.Optimizer) -> str:
    """Return the implementation that runs."""
    if settings.name == "SGD" and settings.implementation == "fused":
        return "foreach"  # still so in torch 2.14: no fused SGD for sharded parameters
    return settings.implementation


def optimizer_title(config: JobConfig) -> str:
    """Return the optimizer's name, and the implementation that runs, if there is a choice."""
    settings = config.optimizer
    if "implementation" in _spec(config).unused:
        return settings.name
    return f"{settings.name} ({_implementation(settings)})"


def optimizer_bytes(trained: Sequence[TrainedParam], config: JobConfig) -> int:
    """Return the bytes of optimizer state for this rank's parts of the parameters."""
    spec = _spec(config)
    total = 0
    for item in trained:
        tensors = spec.states
        if item.is_hidden_matrix and spec.matrix_states is not None:
            tensors = spec.matrix_states
        size = getattr(torch, state_dtype(config)).itemsize
        if config.optimizer.state_dtype == "bfloat16":
            size = min(2, size)
        total += tensors * size * local_part(item.parameter).numel()
    return total


def _spec(config: JobConfig) -> OptimizerSpec:
    return get_optimizer(config.optimizer.name, config.model.package)
