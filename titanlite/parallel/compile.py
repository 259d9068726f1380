"""torch.compile of every block, as one graph.

The forward method is compiled, not the module: names stay, and FSDP2's hooks stay outside of the graph.
"""

import torch
from torch import nn

from titanlite.parallel.build import Context
from titanlite.runtime.torch_private import set_activation_memory_budget


def apply(model: nn.Module, context: Context) -> list[str]:
    """Compile the forward method of every block, within the activation memory budget if there is one."""
    settings, recomputing = context.job.config.compile, context.job.config.activation_checkpoint
    if not (settings.enable and "model" in settings.components):
        return []
    has_budget = recomputing.mode == "memory_budget"
    set_activation_memory_budget(recomputing.memory_budget if has_budget else 1.0)
    for block in context.blocks(model).values():
        compiled = torch.compile(block.forward, fullgraph=True, backend=settings.backend)
        block.forward = compiled  # type: ignore[method-assign]
    kept = f", keeping at most {recomputing.memory_budget:g} of the activations" if has_budget else ""
    return [f"Applied torch.compile to every block, backend {settings.backend}{kept}"]
