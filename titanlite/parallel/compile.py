"""torch.compile of every block, whole graph. The method is compiled, not the module: names stay, and FSDP2's hooks
stay outside of the graph."""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config.schema import Compile


def apply(model: nn.Module, blocks: str, settings: Compile) -> None:
    """Compile the forward method of every block."""
    for block in model.get_submodule(blocks).children():
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, fullgraph=True, backend=settings.backend
        )
