"""The private names of torch that only the planner and verify need, each in one place, with the
versions tested.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# 2.11 and 2.14; no public name.
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)

from titanlite.planner.record import Event

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""torch 2.11 and 2.14; no public name."""


@contextmanager
def replaced(owner: Any, name: str, substitute: Any) -> Iterator[None]:
    """Let an attribute of an object, a class or a module be another one inside the context.

    This is for what a rehearsal cannot pass as an argument.
    """
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def register_fake_backend() -> None:
    """Register the process group backend "fake"."""
    # torch 2.11, 2.13 and 2.15: importing this does so; no public way.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def forget_meshes() -> None:
    """Clear DTensor's caches: they refer to the meshes of earlier worlds."""
    # torch 2.11 and 2.14; no public name.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def group_of(name: str) -> dist.ProcessGroup:
    """Return the process group of a name. torch 2.11 and 2.14; no public name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_wrapper_subclass(kind: type) -> bool:
    """Return whether tensors of this class hold other tensors that do the work, as DTensors do."""
    # torch 2.11 and 2.14. torch's public is_traceable_wrapper_subclass_type lies in a private
    # module.
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return is_traceable_wrapper_subclass_type(kind)


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Return a mode that gives new tensors a shape, a type and a storage, but no memory."""
    # torch 2.11 and 2.14; no public name.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)  # those on the meta device


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique among the storages alive. torch 2.11 and 2.14; no public name."""
    return storage._cdata


@cache
def written_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that an operation of the dispatcher writes to.

    torch 2.11 and 2.14; no public name.
    """
    arguments = enumerate(operation._schema.arguments)
    written = ((i, one.name) for i, one in arguments if one.alias_info and one.alias_info.is_write)
    # An optimizer writes to its gradients only if it unscales them.
    return tuple((i, name) for i, name in written if name != "grads")


def around_sharding_propagation(
    around: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[Any]:
    """Wrap a context around each of DTensor's computations of a result's shape and type."""
    # torch 2.11 and 2.14 (2.13 read); no public way. DTensor computes them with fake tensors as
    # large as the whole ones.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(*args: Any) -> Any:
        with around():
            return original(*args)

    return replaced(ShardingPropagator, name, propagate)


@contextmanager
def waiting_as_on_a_device() -> Iterator[None]:
    """Let DTensor's collectives wait when results are used, as they do on real tensors.

    Under a fake mode torch assumes that it is compiling: it waits at once, and caches nothing. That
    stays so while it does compile.
    torch 2.11 and 2.14 (2.13 uses the same function); no public way."""
    from torch.distributed import _functional_collectives as functional

    at_once = functional._maybe_wrap_tensor

    def waiting(tensor: torch.Tensor) -> Any:
        if is_compiling():
            return at_once(tensor)
        return functional.AsyncCollectiveTensor(tensor)

    loaded = []
    for name, module in sys.modules.items():
        if name.startswith("torch.distributed"):
            loaded.append(module)
    with ExitStack() as patches:
        for module in loaded:
            if "_are_we_tracing" in vars(module):
                patches.enter_context(replaced(module, "_are_we_tracing", is_compiling))
        patches.enter_context(replaced(functional, "_maybe_wrap_tensor", waiting))
        yield


def is_compiling() -> bool:
    # The first is a constant to Dynamo, which cannot trace the second.
    is_traced = torch.compiler.is_dynamo_compiling()
    return is_traced or torch._guards.TracingContext.try_get() is not None


def graph_backend(
    run: Callable[[torch.fx.GraphModule, list[Any]], Any], as_inductor: bool
) -> Callable[..., Any]:
    """Return a backend of torch.compile that calls `run` with the graphs of a forward and of a
    backward pass, and with the list of their inputs, which `run` empties.

    torch 2.11 and 2.14; no public names but the documented ones of custom backends."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Any = partial(run, graph)
        compiled._boxed_call = True
        return compiled

    decompositions = {}
    if as_inductor:
        decompositions = select_decomp_table()
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=decompositions,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


def is_operation(target: Any) -> bool:
    """Return whether a node of a graph calls an operation of the dispatcher. torch 2.11 and 2.14;
    no public name.
    """
    return isinstance(target, torch._ops.OpOverload)


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context, inside of a fake mode, in which new tensors are real.

    torch 2.11 and 2.14; no public name.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextmanager
def without_values() -> Iterator[None]:
    """Let fake tensors pass where torch reads a value, or lacks a rule for a type.

    torch 2.14 (2.11 read); no public way."""
    import torch._meta_registrations as rules

    adam = sys.modules["torch.optim.adam"]  # the package has a class of this name
    read = adam._get_value
    grouped = rules._meta_grouped_mm_common

    def value(steps: Any) -> Any:
        if is_fake(steps):
            return 1.0
        return read(steps)

    def product(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype != torch.float32:
            return grouped(a, b, *args, **kwargs)
        # A CPU computes it in float32, but torch has the rule only for bfloat16.
        return grouped(a.bfloat16(), b.bfloat16(), *args, **kwargs).float()

    with (
        torch._dynamo.config.patch(recompile_limit=1000),  # each job in a world has its graphs
        replaced(adam, "_get_value", value),
        replaced(rules, "_meta_grouped_mm_common", product),
    ):
        yield


@contextmanager
def holding_what_is_sent() -> Iterator[None]:
    """Let a pipeline's sends keep their tensors until they are freed, as gloo's do; NCCL's free
    them when they are waited for.

    torch 2.14 (2.11 read); no public way."""
    from torch.distributed.pipelining import schedules

    send = schedules._batch_p2p

    def send_and_hold(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        held = (_Held(each.tensor) for each in operations)
        return [*send(operations, *args, **kwargs), *held]

    with replaced(schedules, "_batch_p2p", send_and_hold):
        yield


@contextmanager
def around_sends(before: Callable[[Any], None]) -> Iterator[None]:
    """Call a function before each of a pipeline's sends, and send each alone.

    torch 2.14 (2.11 read); no public way."""
    from torch.distributed.pipelining import schedules

    batch = schedules._batch_p2p

    def one_by_one(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = []
        for operation in operations:
            if operation.op is dist.isend:
                before(operation)
            works += batch([operation], *args, **kwargs)
        return works

    with replaced(schedules, "_batch_p2p", one_by_one):
        yield


@contextmanager
def before_actions(schedule: Any, call: Callable[[int], None]) -> Iterator[None]:
    """Call a function with an action's stage before the schedule waits for the stage's parameters,
    if the schedule gathers them.

    torch 2.14; no public way."""
    wait = getattr(schedule, "_assert_unsharded", None)

    def call_and_wait(stage: Any) -> None:
        call(stage.stage_index)
        wait(stage)  # type: ignore[misc]

    with ExitStack() as patches:
        if wait:
            patches.enter_context(replaced(schedule, "_assert_unsharded", call_and_wait))
        yield


def run_silently(schedule: Any, events: list[Event]) -> None:
    """Run a schedule of silent stages, which append what it does to the events.

    torch 2.14; no public way."""
    from torch.distributed.pipelining import schedules

    def send(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        events.extend(operation.event for operation in operations)
        return []

    schedule._initialize_stage = schedule._initialize_stages = lambda *args, **kwargs: None
    gather = before_actions(schedule, lambda stage: events.append(Event("gather", stage)))
    with replaced(schedules, "_batch_p2p", send), gather:
        schedule._step_microbatches()


_KIND_OF_CALL = {
    "get_fwd_recv_ops": "receive F",
    "get_bwd_recv_ops": "receive B",
    "get_fwd_send_ops": "send F",
    "get_bwd_send_ops": "send B",
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
    "perform_reduce_grad": "reduce",
}


class SilentStage:
    """A pipeline stage that only records what a schedule calls."""

    submod = nn.Module()

    def __init__(self, index: int, rank_of: Mapping[int, int], events: list[Event]) -> None:
        self.stage_index = index
        self.num_stages = len(rank_of)
        self.group_rank = rank_of[index]
        self.group_size = len({*rank_of.values()})
        self.is_first = index == 0
        self.is_last = index == len(rank_of) - 1
        self._events = events

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        kind = _KIND_OF_CALL.get(name, "")

        def call(number: int = -1, *args: Any, full_backward: bool = True, **_: Any) -> list[Any]:
            event = Event(kind, self.stage_index, number)
            if not full_backward:
                event = event._replace(kind="I")
            if kind not in ("send F", "send B"):
                if kind:
                    self._events.append(event)
                return []
            has_receiver = not self.is_first
            if kind == "send F":
                has_receiver = not self.is_last
            if has_receiver:
                return [SimpleNamespace(peer=0, event=event)]
            return []

        return call


@dataclass
class _Held:
    """The work of a send or a receive, which keeps its tensor."""

    tensor: torch.Tensor

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def untraceable() -> tuple[type[Exception], ...]:
    """Return the errors of operations that fake tensors can't do; each has the operation as `func`.

    torch 2.11 and 2.14; no public names.
    """
    from torch._subclasses import fake_tensor

    data = fake_tensor.DataDependentOutputException
    shape = fake_tensor.DynamicOutputShapeException
    return data, shape, fake_tensor.UnsupportedOperatorException


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)
