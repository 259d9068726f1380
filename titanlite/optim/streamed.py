"""Optimizer state that is kept away from its parameters, or in a wider type, and streams past them
in every step.

A step processes the parameters in pieces, of one or of several parameters. It copies the state of a
piece to a buffer on the parameters' device, lets the optimizer update it, and copies it back. Three
buffers take turns, each with its own stream (and thread, for a disk): one piece arrives while
another is updated and a third leaves.

The result is bit-identical to the same optimizer with its state next to the parameters, since no
piece cuts the runs in which its kernels work.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.optimizer_state import is_wider, place_of_state, state_dtype
from titanlite.config.schema import JobConfig
from titanlite.optim.state_store import ALIGNMENT, OnDevice, OnDisk, OnHost
from titanlite.optim.update import update
from titanlite.parallel.dtensor import local_part, with_shard
from titanlite.registry import get_optimizer

_NUMEL = ALIGNMENT << 8
"""The most elements of a piece; larger ones are not faster on a disk."""
_SLOTS = 3


class _Part(NamedTuple):
    """Consecutive elements of a rank's shard of a parameter."""

    parameter: nn.Parameter
    elements: slice
    region: slice
    """Their place in the piece."""


class _Piece(NamedTuple):
    group: dict[str, Any]
    parts: Sequence[_Part]
    elements: slice
    """Its place in the rows."""


class Streamed(torch.optim.Optimizer):
    """Wraps an optimizer that updates in place, element by element."""

    is_like_fused_adam = True
    """The inner optimizer divides gradients and skips steps, and the state is written back as it
    was read.
    """
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def __init__(self, inner: torch.optim.Optimizer, config: JobConfig) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._pieces = [*_cut(self.param_groups)]
        device = torch.device("cpu")
        for piece in self._pieces:
            device = local_part(piece.parts[0].parameter).device
        self._device = device
        self._dtype = getattr(torch, state_dtype(config))
        self._converts = is_wider(config)
        probe = torch.zeros(1, dtype=self._dtype, device=device)
        fresh = self._update(self.param_groups[0], [(probe, probe.clone(), {})])[0]
        self._keys = [key for key, value in fresh.items() if value.dim()]
        self._store = self._build_store(config)
        self._keep_state_in_rows(fresh)
        self._lock = Lock()
        self._slots = 1 if place_of_state(config) == "device" else _SLOTS
        self._streams: list[Any] = []
        if device.type == "cuda" and self._slots > 1:
            self._streams = [torch.cuda.Stream(device) for _ in range(self._slots)]
        self._done: Any = None

    def _build_store(self, config: JobConfig) -> OnDevice:
        numel = ALIGNMENT  # a pipeline stage may have nothing to train
        if self._pieces:
            numel = self._pieces[-1].elements.stop
        given = len(self._keys), numel, self._dtype, self._device
        place = place_of_state(config)
        if place == "disk":
            return OnDisk(*given, config.optimizer.state_folder, _SLOTS, _NUMEL)
        return {"host": OnHost, "device": OnDevice}[place](*given)

    def _keep_state_in_rows(self, fresh: dict[str, torch.Tensor]) -> None:
        begins: dict[nn.Parameter, int] = {}
        for piece in self._pieces:
            for part in piece.parts:
                begins.setdefault(part.parameter, piece.elements.start + part.region.start)
        for parameter, begin in begins.items():
            local = local_part(parameter)
            state = self._state[parameter] = {key: value * 0 for key, value in fresh.items()}
            for key, row in zip(self._keys, self._store.rows, strict=True):
                whole = row[begin : begin + _whole(local.numel())]
                state[key] = with_shard(parameter, whole[: local.numel()].view(local.shape))
                state[key].let_go = partial(self._store.free, whole)  # type: ignore[attr-defined]

    @property
    def state(self) -> Any:
        """Return the state, once the last step has written it."""
        if self._done:
            self._done.synchronize()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        work = [*self._work()]  # before any number changes
        free = deque((slot, self._buffers(slot)) for slot in range(self._slots))
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        if self._store.blocks:
            with ThreadPoolExecutor(len(free)) as threads:
                list(threads.map(partial(self._stream, free), work))  # raises a thread's error
        else:
            for one in work:
                self._stream(free, one)
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        if self._streams:
            self._done = torch.cuda.current_stream().record_event()

    def _buffers(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for a piece's state, and for its values and gradients in another type."""
        converted = torch.empty(2, _NUMEL * self._converts, dtype=self._dtype, device=self._device)
        return self._store.buffer(slot, _NUMEL), converted

    def _work(self) -> Iterator[tuple[_Piece, list[tuple[_Part, dict[str, Any]]]]]:
        """Yield the pieces with a gradient, and the numbers of their parameters' state."""
        for piece in self._pieces:
            parts = []
            for part in piece.parts:
                if part.parameter.grad is None:
                    continue
                state = self._state[part.parameter]
                numbers = {key: state[key] for key in state.keys() - self._keys}
                if part.elements.stop < local_part(part.parameter).numel():
                    numbers = deepcopy(numbers)  # the last piece counts the step
                parts.append((part, numbers))
            if parts:
                yield piece, parts

    def _stream(self, free: deque[Any], work: Any) -> None:
        """Update a piece, in a stream and perhaps a thread of its own."""
        piece, parts = work
        slot, (buffer, converted) = free.popleft()
        with torch.cuda.stream(self._streams[slot]) if self._streams else nullcontext():
            rows = self._store.read(slot, buffer, piece.elements)
            given = []
            for part, numbers in parts:
                values = local_part(part.parameter).view(-1)[part.elements]
                gradient = local_part(part.parameter.grad).view(-1)[part.elements]
                if self._converts:
                    values = converted[0, part.region].copy_(values)
                    gradient = converted[1, part.region].copy_(gradient)
                state = dict(zip(self._keys, rows[:, part.region], strict=True))
                given.append((values, gradient, numbers | state))
            with self._lock:
                self._update(piece.group, given)
            if self._converts:
                for (part, _), (values, *_) in zip(parts, given, strict=True):
                    local_part(part.parameter).view(-1)[part.elements].copy_(values)
            self._store.write(slot, rows, piece.elements)
        free.append((slot, (buffer, converted)))

    def _update(self, group: dict[str, Any], given: Sequence[Any]) -> list[dict[str, Any]]:
        """Let the inner optimizer update values and their state, and return the state."""
        states = defaultdict[Any, Any](dict)
        for values, gradient, state in given:
            parameter = nn.Parameter(values)
            parameter.grad = gradient
            states[parameter] = state
        self._inner.param_groups = [{**group, "params": [*states]}]
        self._inner.state = states
        update(self._inner, self.grad_scale, self.found_inf)
        self._inner.param_groups = []  # otherwise the gradients of a piece would stay
        self._inner.state = defaultdict(dict)
        return [*states.values()]


def buffer_bytes(config: JobConfig) -> int:
    """Return the bytes on the parameters' device through which a step streams its state."""
    rows = 2 * is_wider(config)
    slots = 1
    if place_of_state(config) != "device":
        rows += get_optimizer(config.optimizer.name, config.model.package).states
        slots = _SLOTS
    return slots * rows * _NUMEL * getattr(torch, state_dtype(config)).itemsize


def _cut(groups: Sequence[dict[str, Any]]) -> Iterator[_Piece]:
    """Yield the pieces of a step, which lie one after the other in the rows."""
    stop = 0
    for group in groups:
        start = stop
        parts: list[_Part] = []
        for parameter in group["params"]:
            numel = local_part(parameter).numel()
            done = 0
            while True:  # an empty shard is a part too, since its steps are counted
                taken = min(numel - done, _NUMEL - (stop - start))
                region = slice(stop - start, stop - start + taken)
                parts.append(_Part(parameter, slice(done, done + taken), region))
                done += taken
                stop += _whole(taken)
                if stop - start == _NUMEL:
                    yield _Piece(group, parts, slice(start, stop))
                    start = stop
                    parts = []
                if done == numel:
                    break
        if parts:
            yield _Piece(group, parts, slice(start, stop))


def _whole(numel: int) -> int:
    """Return a number of elements rounded up to a multiple of ALIGNMENT."""
    return -(-numel // ALIGNMENT) * ALIGNMENT
