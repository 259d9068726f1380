"""LoRA: linear layers with an adapter, y = W x + scale B A x, in which A and B are trained."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from titanlite.errors import UserError
from titanlite.registry import Role, Rule
from titanlite.registry.lora import Adapters


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter; its weight keeps its name."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_dropout: nn.Dropout
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        narrow = F.linear(self.lora_dropout(input), self.lora_A)
        if isinstance(narrow, DTensor) and narrow.placements[0].is_partial():
            return output + self.scale * _partial_change(narrow, self.lora_B)
        return output + self.scale * F.linear(narrow, self.lora_B)


def _partial_change(narrow: DTensor, lora_B: torch.Tensor) -> DTensor:
    """Return B times a partial sum over ranks as a partial sum, like a split row layer's output."""
    assert isinstance(lora_B, DTensor)
    own = F.linear(narrow.to_local(), lora_B.to_local(grad_placements=(Partial(),)))
    return DTensor.from_local(own, narrow.device_mesh, (Partial(),), run_check=False)


def adapt(model: nn.Module, adapters: Adapters, rules: Sequence[Rule]) -> None:
    """Add the adapters to a model on the meta device, and freeze everything else."""
    model.requires_grad_(False)
    bases = adapters.bases(rules).values()
    for name, module in model.named_modules():
        if not any(rule.match(f"{name}.weight") for rule in bases):
            continue
        if type(module) is not nn.Linear:
            where = f"lora.patterns: {name} is a {type(module).__name__}"
            raise UserError(f"{where}; adapters go with an nn.Linear")
        module.__class__ = AdaptedLinear
        adapted: Any = module
        adapted.lora_A = nn.Parameter(torch.empty(adapters.rank, module.in_features))
        adapted.lora_B = nn.Parameter(torch.empty(module.out_features, adapters.rank))
        adapted.lora_dropout = nn.Dropout(adapters.dropout)
        adapted.scale = adapters.scale


def take_adapter(module: nn.Module) -> dict[str, nn.Parameter]:
    """Detach a layer's adapter, which torch would split like the layer; return {} without one."""
    if not isinstance(module, AdaptedLinear):
        return {}
    taken = {"lora_A": module.lora_A, "lora_B": module.lora_B}
    del module.lora_A, module.lora_B, module.lora_dropout
    return taken


def split_adapter(
    module: nn.Module, taken: dict[str, nn.Parameter], role: Role, mesh: DeviceMesh
) -> None:
    """Attach a layer's adapter again, with B split in a column layer, and A in a row layer."""
    if not taken:
        return
    split = {"lora_B": Shard(0)}
    if role == "row":
        split = {"lora_A": Shard(1)}
    module.lora_dropout = nn.Dropout(0.0)  # the config's rules refuse another one here
    for name, parameter in taken.items():
        placement = split.get(name, Replicate())
        placed = distribute_tensor(parameter.detach(), mesh, (placement,))
        setattr(module, name, nn.Parameter(placed))


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a matrix with its adapter added."""
    return (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)
