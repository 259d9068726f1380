"""torch.compile in a rehearsal: the graphs a backend would receive, without generating code.

aot_eager runs its graphs operation by operation, and so does the rehearsal. Inductor keeps for the
backward pass what its partitioner chooses, which the rehearsal asks it for, and does not write to
memory what only one fused kernel reads. So a result inside a graph counts only if the graph returns
it, or if an unfused kernel (a matrix product, attention, a collective) reads or writes it. What a
fused kernel reads stays alive until the next unfused kernel.
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
    """Return the function as the backend would run it; unknown backends count as inductor."""
    # The rounding of an optimizer's state may break its graph, and would be recompiled per seed.
    if backend == "eager" or (dynamic and not fullgraph):
        return function
    backend_without_code = _backend(backend != "aot_eager")
    return _compile(function, fullgraph=fullgraph, dynamic=False, backend=backend_without_code)


@cache
def _backend(as_inductor: bool) -> Callable[..., Any]:
    """Return one backend for all blocks; otherwise each block would be compiled separately."""
    runner = _Fused if as_inductor else fx.Interpreter

    def run(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return runner(graph).boxed_run(inputs)

    return graph_backend(run, as_inductor)


class _Fused(fx.Interpreter):
    """Runs a graph, and lets the counting see only what inductor writes to memory."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._read: list[Any] = []
        """What fused kernels have read since the last unfused one."""

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
    """Return whether inductor calls a separate kernel for an operation."""
    if not is_operation(target):
        return False
    return target.overloadpacket in FLOPS or target.namespace not in ("aten", "prims")
