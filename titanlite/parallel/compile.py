"""torch.compile of every block, whole graph. The method is compiled, not the module: names stay, and FSDP2's hooks
stay outside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import Compile


def apply(model: nn.Module, blocks: str, settings: Compile, memory_budget: float | None = None) -> None:
    """Compile the forward method of every block; of what its backward pass needs, that share may stay."""
    backend = settings.backend if memory_budget is None else _within(memory_budget, settings.backend)
    for block in model.get_submodule(blocks).children():
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, fullgraph=True, backend=backend
        )


def _within(budget: float, name: str) -> Callable[..., Any]:
    """A backend under an activation memory budget, which is set only while a block's graph is made."""
    # Private in torch 2.11 to 2.13 (tried on both): the public region_activation_memory_budget is not in 2.11.
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    compile_graph = lookup_backend(name)
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):  # a tensor-parallel mesh in a graph has no size
        settings["unsafe_treat_script_objects_as_zero_size"] = True

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with config.patch(settings):
            return compile_graph(graph, inputs)

    return backend
