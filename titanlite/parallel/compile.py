"""torch.compile of every block, as one graph; of a block with experts, of everything around these.

The forward method is compiled, not the module: names stay, and FSDP2's hooks stay outside of the graph.
"""

import torch
from torch import nn

from titanlite.config import schema
from titanlite.errors import UserError
from titanlite.parallel.build import Context
from titanlite.parallel.expert import expert_modules, units
from titanlite.runtime.torch_private import set_activation_memory_budget


def apply(model: nn.Module, context: Context) -> list[str]:
    """Compile the forward method of every block, within the activation memory budget if there is one."""
    settings, recomputing = context.job.config.compile, context.job.config.activation_checkpoint
    check_backend(settings)
    if not (settings.enable and "model" in settings.components):
        return []
    has_budget = recomputing.mode == "memory_budget"
    set_activation_memory_budget(recomputing.memory_budget if has_budget else 1.0)
    experts = expert_modules(model, context.table).values()
    for unit in (unit for block in context.blocks(model).values() for unit in units(block, experts)):
        compiled = torch.compile(unit.forward, fullgraph=True, backend=settings.backend)
        unit.forward = compiled  # type: ignore[method-assign]
    kept = f", keeping at most {recomputing.memory_budget:g} of the activations" if has_budget else ""
    return [f"Applied torch.compile to every block, backend {settings.backend}{kept}"]


def check_backend(settings: schema.Compile) -> None:
    """Raise a UserError if the compiler has no such backend; asking it takes seconds, so not for the usual ones."""
    backend, usual = settings.backend, ("inductor", "aot_eager", "eager")
    if settings.enable and backend not in usual and backend not in torch.compiler.list_backends(exclude_tags=()):
        legal = ", ".join(["aot_eager", "eager", *torch.compiler.list_backends()])
        raise UserError(f'compile.backend = "{backend}" is not a backend of the compiler; legal: {legal}')
