"""Count what a training step allocates, communicates and computes, on fake tensors as on real ones.

Exact: bytes are those of the storages that are alive, as requested from an allocator; collectives
and FLOPs are those of the operations that PyTorch dispatches. Not seen: memory inside kernels, an
allocator's additions (rounding, fragments), buffers of communication libraries. A storage's kind is
the strongest of all its uses, from its start: one that becomes a gradient counts as one."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from titanlite.config.layout import Layout
from titanlite.parallel.dtensor import local_part
from titanlite.planner.record import KINDS, ON_HOST, Collective, Event, Operation, Recording, views
from titanlite.planner.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    TorchDispatchMode,
    around_sharding_propagation,
    is_compiling,
    is_wrapper_subclass,
    storage_key,
    written_arguments,
)
from titanlite.runtime.torch_private import process_groups

_COLLECTIVES = {
    "all-gather": "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor",
    "reduce-scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor",
    "all-reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_",
    "all-to-all": "alltoall_ alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_ broadcast",
    "send-receive": "send",
}
_KIND_OF_COLLECTIVE = {name: kind for kind, names in _COLLECTIVES.items() for name in names.split()}
FLOPS = dict(flop_registry)


def _attention_flops(query: int, products: int, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a CPU's attention, as torch counts a GPU's; `query` is the position of
    the query.
    """
    batch, heads, queries, dim = args[query].shape
    return products * 2 * batch * heads * queries * args[query + 1].size(2) * dim


FLOPS[CPU_ATTENTION] = partial(_attention_flops, 0, 2)
FLOPS[CPU_ATTENTION_BACKWARD] = partial(_attention_flops, 1, 5)
_OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
"""Operations that do not read what they write to."""
_ALLOCATES_ONLY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_READS_ROWS = {"embedding", "index", "gather"}
"""Operations that read no more of their first argument than they return."""
_WEAKEST_FIRST = (
    "",
    "communication",
    "gathered",
    "gradients",
    "buffers",
    "optimizer",
    "parameters",
    "host",
)
"""Kinds that follow from the uses of a storage; the strongest counts. Without one, its first phase
decides.
"""
_KIND_OF_PHASE = {
    "head": "logits",
    "backward head": "logits",
    "gradient norm": "gradients",
    "optimizer": "optimizer",
    "gradient norm" + ON_HOST: "host",
    "optimizer" + ON_HOST: "host",
}
PHASE_OF_REGION = {
    "forward": "embedding",
    "backward": "backward head",
    "gradient norm": "gradient norm",
    "optimizer": "optimizer",
}
"""The phase that begins where train/step.py, or a pipeline stage, enters a region of this name."""


@dataclass
class _Storage:
    phase: str
    """Of its allocation."""
    reference: weakref.ref[torch.UntypedStorage] | None = None
    bytes: int = 0
    use: str = ""

    @property
    def kind(self) -> int:
        return KINDS.index(self.use or _KIND_OF_PHASE.get(self.phase, "activations"))


class Counting(TorchDispatchMode):
    """Counts what a rank of a layout does inside the context, from `restart` on.

    Storages are counted if they were made in the context, or were marked.
    """

    current: "Counting | None" = None
    """The one that counts now."""
    phase = ""
    """The current phase of the step; set from outside."""
    event: Event | None = None

    def __init__(self, layout: Layout, offloads: bool = False) -> None:
        """Offloaded tensors are counted apart, as on a machine with GPUs."""
        super().__init__()
        self.offloads = offloads
        self._dimension = cache(partial(_dimension, layout))
        self.phase_of_region: Callable[[str], str | None] = PHASE_OF_REGION.get
        self._hidden = False
        """In DTensor's own fake computations, which are of whole tensors, and in our own looking at
        shards.
        """
        self._alive: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int]] = []
        """Storages, and how many bytes they grow by."""
        self._operations: list[tuple[Operation, int]] = []
        """Without bytes, and with the number of changes until each is done."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # the graphs are counted when they run

    def __enter__(self) -> "Counting":
        Counting.current = self
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if not is_compiling():  # the compiler makes stand-ins of its own
                self._see(storage, "gathered")  # how FSDP2 fills and frees whole parameters

        self._patches = ExitStack()
        self._patches.enter_context(around_sharding_propagation(self.hide))
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_see))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:  # type: ignore[override]
        super().__exit__(*error)
        self._patches.close()
        Counting.current = None

    def mark(self, use: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the use of tensors."""
        if self.offloads and use in ("parameters", "optimizer"):
            use = "host"
        with self.hide():
            for tensor in tensors:
                self._see(local_part(tensor).untyped_storage(), use)

    def see(self, tree: Any) -> None:
        """Count tensors that may have been made while the counting was hidden."""
        for tensor in _tensors(tree):
            if tensor.device.type != "meta":
                self._see(tensor.untyped_storage())

    @property
    def alive(self) -> int:
        """Return the bytes that are alive now."""
        return sum(storage.bytes for storage in self._alive.values())

    def restart(self, phase: str = "") -> None:
        """Forget all counts, but not the storages that are alive, and name the next phase."""
        self._operations, self.phase, self.event = [], phase, None
        self._changes = [(storage, storage.bytes) for storage in self._alive.values()]

    def enter_phase(self, phase: str) -> None:
        """Name the next phase; changes since the last operation belong to the phase before."""
        if self.offloads and phase + ON_HOST in _KIND_OF_PHASE:
            phase += ON_HOST
        if phase != self.phase:
            self._end_operation()
        self.phase = phase

    def begin(self, event: Event | None, phase: str) -> None:
        """Begin an event with the bytes that are alive; changes since the last operation belong to
        the one before.
        """
        self._end_operation()
        self.event, self.phase = event, phase
        self._record(Operation(phase, 0))

    def _end_operation(self) -> None:
        """Record the changes since the last operation, if there are any."""
        if len(self._changes) > (self._operations[-1][1] if self._operations else 0):
            self._record(Operation(self.phase, 0))

    def recording(self) -> Recording:
        """Return the counts since `restart`, without static bytes."""
        self._record(Operation(self.phase, 0))
        operations, done = list[Operation](), 0
        alive = [0] * len(KINDS)
        for operation, end in self._operations:
            most, host = alive, alive[-1]
            for storage, growth in self._changes[done:end]:
                alive = alive.copy()
                alive[storage.kind] += growth
                most, host = max(most, alive, key=_on_gpu), max(host, alive[-1])
            by_kind = (*most[:-1], host)
            operations.append(replace(operation, live=_on_gpu(most), by_kind=by_kind))
            done = end
        return Recording(operations, {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # a DTensor calls the operations of its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._hidden:
            return result
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            result = args[0]  # as on real tensors; a fake one would be a new one
        results = [tensor for tensor in _tensors(result) if not is_wrapper_subclass(type(tensor))]
        if name == "_record_function_enter_new" and (phase := self.phase_of_region(args[0])):
            self.enter_phase(phase)
        before = len(self._changes)
        self.see(results)
        collective = None
        if func.namespace in ("c10d", "_c10d_functional"):
            collective = self._collective(name, result, args)
            if func.namespace == "c10d":  # between DTensors it is an activation
                self.mark("communication", _tensors(args))
        elif (
            name == "chunk_cat" and func.namespace == "fsdp"
        ):  # where FSDP2 collects what it reduces
            self.mark("gradients", _tensors(args[0]))
        moved = (
            0
            if collective
            else _moved(func, results, args, kwargs, allocates=len(self._changes) > before)
        )
        count = FLOPS.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        if collective or flops or moved:
            dtype = _name(_tensors(args)[0].dtype) if flops else ""
            self._record(Operation(self.phase, 0, flops, dtype, moved, collective))
        return result

    def _collective(self, name: str, result: Any, args: Any) -> Collective | None:
        """Return the collective that an operation of c10d is, if it is one and joins more than one
        rank.
        """
        kind = _KIND_OF_COLLECTIVE.get(name)
        if not kind:
            return None
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group_name = dist.ProcessGroup.unbox(group).group_name if group is not None else args[-1]
        dimension, ranks = self._dimension(group_name)
        size = max(_bytes(_tensors(item)) for item in (*args[:2], result))
        if kind == "send-receive":
            ranks = min(ranks, 2)
        return (
            Collective(kind, dimension, ranks, _name(_tensors(args)[0].dtype), size)
            if ranks > 1
            else None
        )

    def copy_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the GPU's memory of a tensor in the host's, or the other way round."""
        known = self._alive.get(storage_key(tensor.untyped_storage()))
        kind, use = ("to GPU", "") if known and known.use == "host" else ("from GPU", "host")
        with self.hide():
            copy = tensor.clone()
        self._see(copy.untyped_storage(), use)
        sent = Collective(kind, "host", 1, _name(tensor.dtype), tensor.nbytes)
        self._record(Operation(self.phase, 0, collective=sent))
        return copy

    def _record(self, operation: Operation) -> None:
        self._operations.append((replace(operation, event=self.event), len(self._changes)))

    def _see(self, storage: torch.UntypedStorage, use: str = "") -> None:
        """Count a storage that is new or has another size."""
        key, size = storage_key(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            known = self._alive[key] = _Storage(self.phase)
            known.reference = weakref.ref(storage, lambda _: self._forget(key))
        known.use = max(known.use, use, key=_WEAKEST_FIRST.index)
        if size != known.bytes:
            self._changes.append((known, size - known.bytes))
            known.bytes = size

    def _forget(self, key: int) -> None:
        storage = self._alive.pop(key)
        if storage.bytes:
            self._changes.append((storage, -storage.bytes))

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Count no operation, and no storage that is made."""
        self._hidden, before = True, self._hidden
        try:
            yield
        finally:
            self._hidden = before


def _on_gpu(alive: Sequence[int]) -> int:
    return sum(alive[:-1])


def _dimension(layout: Layout, group_name: str) -> tuple[str, int]:
    """Return the dimensions of a layout that a process group spans, and its size."""
    group = next(group for group in process_groups() if group.group_name == group_name)
    ranks = dist.get_process_group_ranks(group)
    parts = list[str]()
    for names, degrees in views(layout):
        coordinates = np.unravel_index(ranks, degrees)
        spanned = [d for d in range(len(names)) if np.ptp(coordinates[d])]
        if prod(degrees[d] for d in spanned) == len(ranks):
            return " x ".join(names[d] for d in spanned), len(ranks)
        parts += [names[d] for d in spanned if len(spanned) == 1]
    return parts[0] if parts else "world", len(ranks)


def _moved(func: Any, results: list[torch.Tensor], args: Any, kwargs: Any, allocates: bool) -> int:
    """Return the bytes that an operation reads and writes at least; none if it returns views."""
    name = func.overloadpacket.__name__
    if func.namespace == "fsdp":  # copies of its first argument into or out of views of one buffer
        return 2 * _bytes(_tensors(args[0]))
    written = [
        t
        for n, key in written_arguments(func)
        for t in _tensors(args[n] if n < len(args) else kwargs.get(key))
    ]
    if name in _ALLOCATES_ONLY or not (allocates or written):
        return 0
    read = _tensors((args[1:] if name in _READS_ROWS else args, kwargs))
    if name in _OVERWRITES:
        read = [tensor for tensor in read if all(tensor is not other for other in written)]
    return _bytes(read) + _bytes(written or results)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    )
    return [tensor for item in items for tensor in _tensors(item)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; an expanded one has those of its storage."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
