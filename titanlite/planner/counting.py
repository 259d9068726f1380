"""Count what a training step allocates, communicates and computes, on fake or real tensors.

Exact: bytes are those of the live storages, as requested from the allocator; collectives and FLOPs
are those of the operations that PyTorch dispatches. Not seen: memory inside kernels, what an
allocator adds (rounding, fragmentation), buffers of communication libraries. A storage has the
strongest kind of all its uses, from its allocation on: one that becomes a gradient counts as a
gradient throughout."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

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
    group_of,
    is_compiling,
    is_wrapper_subclass,
    replaced,
    storage_key,
    written_arguments,
)

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
_KIND_OF_COLLECTIVE: dict[str, str] = {}
for _kind, _names in _COLLECTIVES.items():
    _KIND_OF_COLLECTIVE |= dict.fromkeys(_names.split(), _kind)
FLOPS = dict(flop_registry)


def _attention_flops(query: int, products: int, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention on a CPU, counted as torch counts them on a GPU; `query` is
    the position of the query among the arguments.
    """
    batch, heads, queries, dim = args[query].shape
    return products * 2 * batch * heads * queries * args[query + 1].size(2) * dim


FLOPS[CPU_ATTENTION] = partial(_attention_flops, 0, 2)
FLOPS[CPU_ATTENTION_BACKWARD] = partial(_attention_flops, 1, 5)
_OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
"""Operations that do not read what they write to."""
_ALLOCATES_ONLY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_READS_ROWS = {"embedding", "index", "gather"}
"""Operations that read only as much of their first argument as they return."""
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
"""Kinds that follow from the uses of a storage; the strongest one counts. Without any, the phase
that allocated it decides.
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
"""The phase that begins when train/step.py, or a pipeline stage, enters a region of this name."""


@dataclass
class _Storage:
    phase: str
    """The one that allocated it."""
    reference: weakref.ref[torch.UntypedStorage] | None = None
    bytes: int = 0
    use: str = ""

    @property
    def kind(self) -> int:
        return KINDS.index(self.use or _KIND_OF_PHASE.get(self.phase, "activations"))


class Counting(TorchDispatchMode):
    """Counts what a rank of a layout does inside the context, from `restart` on.

    A storage is counted if it was allocated in the context, or was marked.
    """

    current: "Counting | None" = None
    """The active one."""
    phase = ""
    """The current phase of the step; set from outside."""
    event: Event | None = None

    def __init__(self, layout: Layout, offloads: bool = False) -> None:
        """Count offloaded tensors separately, as on a machine with GPUs, if the job `offloads`."""
        super().__init__()
        self.offloads = offloads
        self._dimension = cache(partial(_dimension, layout))
        self.phase_of_region: Callable[[str], str | None] = PHASE_OF_REGION.get
        self._hidden = False
        """True inside DTensor's shape computations, which use whole fake tensors, and while the
        counting itself looks at shards.
        """
        self._alive: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int]] = []
        """Storages, and the bytes each grows by."""
        self._operations: list[tuple[Operation, int]] = []
        """Operations without their bytes, each with the number of changes made until it is done."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # the graphs are counted when they run

    def __enter__(self) -> "Counting":
        Counting.current = self
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if not is_compiling():  # the compiler resizes only its stand-ins
                self._see(storage, "gathered")  # how FSDP2 fills and frees whole parameters

        self._patches = ExitStack()
        self._patches.enter_context(around_sharding_propagation(self.hide))
        self._patches.enter_context(replaced(torch.UntypedStorage, "resize_", resize_and_see))
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
        """Count tensors that may have been allocated while the counting was hidden."""
        for tensor in _tensors(tree):
            if tensor.device.type != "meta":
                self._see(tensor.untyped_storage())

    @property
    def alive(self) -> int:
        """Return the bytes that are alive now."""
        return sum(storage.bytes for storage in self._alive.values())

    def restart(self, phase: str = "") -> None:
        """Forget all counts, but not the storages that are alive, and name the next phase."""
        self._operations = []
        self.phase = phase
        self.event = None
        self._changes = [(storage, storage.bytes) for storage in self._alive.values()]

    def enter_phase(self, phase: str) -> None:
        """Name the next phase; changes since the last operation belong to the phase before."""
        if self.offloads and phase + ON_HOST in _KIND_OF_PHASE:
            phase += ON_HOST
        if phase != self.phase:
            self._end_operation()
        self.phase = phase

    def begin(self, event: Event | None, phase: str) -> None:
        """Begin an event with the bytes alive now; changes since the last operation belong to the
        event before.
        """
        self._end_operation()
        self.event = event
        self.phase = phase
        self._record(Operation(phase, 0))

    def _end_operation(self) -> None:
        """Record the changes since the last operation, if there are any."""
        recorded = 0
        if self._operations:
            recorded = self._operations[-1][1]
        if len(self._changes) > recorded:
            self._record(Operation(self.phase, 0))

    def recording(self) -> Recording:
        """Return what was counted since `restart`, without static bytes."""
        self._record(Operation(self.phase, 0))
        operations = list[Operation]()
        done = 0
        alive = [0] * len(KINDS)
        for operation, end in self._operations:
            most = alive
            host = alive[-1]
            for storage, growth in self._changes[done:end]:
                alive = alive.copy()
                alive[storage.kind] += growth
                most = max(most, alive, key=_on_gpu)
                host = max(host, alive[-1])
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
            result = args[0]  # as on real tensors; a fake one would be returned as a new tensor
        results = []
        for tensor in _tensors(result):
            if not is_wrapper_subclass(type(tensor)):
                results.append(tensor)
        if name == "_record_function_enter_new":
            phase = self.phase_of_region(args[0])
            if phase:
                self.enter_phase(phase)
        before = len(self._changes)
        self.see(results)
        collective = None
        if func.namespace in ("c10d", "_c10d_functional"):
            collective = self._collective(name, result, args)
            if func.namespace == "c10d":  # those of DTensors read and write activations
                self.mark("communication", _tensors(args))
        elif func.namespace == "fsdp" and name == "chunk_cat":
            # FSDP2 collects the gradients that it reduces.
            self.mark("gradients", _tensors(args[0]))
        moved = 0
        if not collective:
            moved = _moved(func, results, args, kwargs, allocates=len(self._changes) > before)
        flops = 0
        dtype = ""
        count = FLOPS.get(func.overloadpacket)
        if count:
            flops = count(*args, **kwargs, out_val=result)
        if flops:
            dtype = _name(_tensors(args)[0].dtype)
        if collective or flops or moved:
            self._record(Operation(self.phase, 0, flops, dtype, moved, collective))
        return result

    def _collective(self, name: str, result: Any, args: Any) -> Collective | None:
        """Return the collective that a c10d operation runs, or None if it runs none or its group
        has a single rank.
        """
        kind = _KIND_OF_COLLECTIVE.get(name)
        if not kind:
            return None
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group_name = args[-1]
        if group is not None:
            group_name = dist.ProcessGroup.unbox(group).group_name
        dimension, ranks = self._dimension(group_name)
        size = max(_bytes(_tensors(item)) for item in (*args[:2], result))
        if kind == "send-receive":
            ranks = min(ranks, 2)
        if ranks > 1:
            return Collective(kind, dimension, ranks, _name(_tensors(args)[0].dtype), size)
        return None

    def copy_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from the host's memory to the GPU's, or the other way around."""
        known = self._alive.get(storage_key(tensor.untyped_storage()))
        kind = "from GPU"
        use = "host"
        if known and known.use == "host":
            kind = "to GPU"
            use = ""
        with self.hide():
            copy = tensor.clone()
        self._see(copy.untyped_storage(), use)
        sent = Collective(kind, "host", 1, _name(tensor.dtype), tensor.nbytes)
        self._record(Operation(self.phase, 0, collective=sent))
        return copy

    def _record(self, operation: Operation) -> None:
        self._operations.append((replace(operation, event=self.event), len(self._changes)))

    def _see(self, storage: torch.UntypedStorage, use: str = "") -> None:
        """Count a storage that is new or has a new size."""
        key = storage_key(storage)
        size = storage.nbytes()
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
        """Count no operations and no new storages."""
        before = self._hidden
        self._hidden = True
        try:
            yield
        finally:
            self._hidden = before


def _on_gpu(alive: Sequence[int]) -> int:
    return sum(alive[:-1])


def _dimension(layout: Layout, group_name: str) -> tuple[str, int]:
    """Return the dimensions of a layout that a process group spans, and its size."""
    ranks = dist.get_process_group_ranks(group_of(group_name))
    parts = list[str]()
    for names, degrees in views(layout):
        coordinates = np.unravel_index(ranks, degrees)
        spanned = [d for d in range(len(names)) if np.ptp(coordinates[d])]
        if prod(degrees[d] for d in spanned) == len(ranks):
            return " x ".join(names[d] for d in spanned), len(ranks)
        if len(spanned) == 1:
            parts.append(names[spanned[0]])
    dimension = "world"
    if parts:
        dimension = parts[0]
    return dimension, len(ranks)


def _moved(func: Any, results: list[torch.Tensor], args: Any, kwargs: Any, allocates: bool) -> int:
    """Return the fewest bytes that an operation reads and writes; 0 if it returns views."""
    name = func.overloadpacket.__name__
    if func.namespace == "fsdp":  # copies its first argument into or out of views of one buffer
        return 2 * _bytes(_tensors(args[0]))
    written = []
    for n, key in written_arguments(func):
        if n < len(args):
            written.extend(_tensors(args[n]))
        else:
            written.extend(_tensors(kwargs.get(key)))
    if name in _ALLOCATES_ONLY or not (allocates or written):
        return 0
    inputs = args
    if name in _READS_ROWS:
        inputs = args[1:]
    read = _tensors((inputs, kwargs))
    if name in _OVERWRITES:
        read = [tensor for tensor in read if all(tensor is not other for other in written)]
    return _bytes(read) + _bytes(written or results)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items: Iterable[Any] = ()
    if isinstance(tree, dict):
        items = tree.values()
    elif isinstance(tree, tuple | list):
        items = tree
    found = list[torch.Tensor]()
    for item in items:
        found.extend(_tensors(item))
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; for an expanded one, those of its storage."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
