"""torch.compile in a rehearsal: the graphs that a backend gets, without the code that it makes.

aot_eager runs its graphs operation by operation, as here. Inductor keeps for the backward pass
what its partitioner chooses, as here, and what only one fused kernel reads it does not write to
memory: of the results in a graph those count that the graph returns, and those that a kernel of
its own reads or makes, for a product of matrices, attention or a collective. What a fused kernel
reads stays until the next such kernel.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from titanlite.planner.counting import FLOPS, Counting
from titanlite.planner.torch_private import graph_backend, is_operation

_compile = torch.compile
_SCATTERS = torch.ops.aten.scatter_add, torch.ops.aten.index_put
"""Fused kernels add to a result in memory; a plain scatter has none."""


def compile_without_code(
    function: Callable[..., Any],
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str = "inductor",
) -> Callable[..., Any]:
    """Return the function as the backend would run it; one that is not known, as inductor would."""
    # A rounding of an optimizer's state, which may break, would be a graph for each of its seeds.
    if backend == "eager" or (dynamic and not fullgraph):
        return function
    backend_without_code = _backend(backend != "aot_eager")
    return _compile(function, fullgraph=fullgraph, dynamic=False, backend=backend_without_code)


@cache
def _backend(as_inductor: bool) -> Callable[..., Any]:
    """Return the same backend for all blocks, or each would have a graph of its own."""
    runner = _Fused if as_inductor else fx.Interpreter

    def run(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return runner(graph).boxed_run(inputs)

    return graph_backend(run, as_inductor)


class _Fused(fx.Interpreter):
    """Runs a graph, and shows the counting only what inductor writes to memory."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._read: list[Any] = []
        """By fused kernels since the last other one."""

    def run_node(self, n: fx.Node) -> Any:
        counting = Counting.current
        assert counting, "graphs run inside a counted step"
        arguments = self.fetch_args_kwargs_from_env(n)
        if n.op == "output" or _is_kernel(n.target):
            counting.see(arguments)
            self._read.clear()
            return super().run_node(n)
        self._read.append(arguments)
        with counting.hide():
            result = super().run_node(n)
        if getattr(n.target, "overloadpacket", None) in _SCATTERS:
            counting.see(result)
        return result


def _is_kernel(target: Any) -> bool:
    """Return whether inductor calls a kernel of its own for an operation."""
    if not is_operation(target):
        return False
    return target.overloadpacket in FLOPS or target.namespace not in ("aten", "prims")
