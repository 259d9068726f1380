"""Initial values of transformers' classes as functions of a seed and a name, independent of a mesh.

`_init_weights` runs on the meta device, where its writes are recorded. On shards it would give
every rank the same values.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from titanlite.registry import Init

Write = tuple[str, float, str]
"""How a parameter was written, its value, and the module being initialized."""


def recorded(model: Any) -> tuple[dict[str, Init], list[str]]:
    """Return the initial values of every parameter, and why some are unknown."""
    writes = _watch(model)
    redrawn = lru_cache(maxsize=1)(partial(_redrawn, model))
    found: dict[str, Init] = {}
    faults: list[str] = []
    for name, parameter in model.named_parameters():
        history = writes.get(name)
        if not history:
            built = getattr(parameter, "built", None)
            if built is None or parameter._version:  # a later change is unknown too
                faults.append(f"{name}: drawn or left unset when the class is built")
            else:
                found[name] = Init(edit=partial(_copy, built))
            continue
        kind, value, owner = history[-1]
        if kind == "normal":
            found[name] = Init(std=value)
        elif kind == "constant":
            found[name] = Init(constant=value)
        elif kind == "row" and history[-2:-1] and history[-2][0] == "normal":
            found[name] = Init(std=history[-2][1], edit=partial(_zero_row, int(value)))
        else:
            key = name.removeprefix(f"{owner}.")
            found[name] = Init(edit=partial(_redraw, redrawn, owner, key))
    return found, faults


def _watch(model: Any) -> dict[str, list[Write]]:
    """Run the class's initialization on the meta device, and return what it writes, in order."""
    names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    paths = {id(module): name for name, module in model.named_modules()}
    writes: dict[str, list[Write]] = {}
    owner = [""]

    def note(kind: str, value: float, tensor: Any) -> Any:
        name = names.get(id(tensor))
        if name is None and tensor._base is not None:  # a part of a parameter
            name = names.get(id(tensor._base))
            is_zero_row = kind == "constant" and value == 0 and tensor.dim() == 1
            kind = "part"
            if is_zero_row:
                kind = "row"
            value = tensor.storage_offset() // max(1, tensor.numel())
        # A head that shares the embedding's weight is initialized before they are tied.
        if name is not None and name.startswith(owner[0]):
            writes.setdefault(name, []).append((kind, value, owner[0]))
        return tensor

    def normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
        if mean == 0:
            return note("normal", std, tensor)
        return note("other", std, tensor)

    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    functions: dict[str, Any] = {
        name: lambda tensor, *args, **kwargs: note("other", 0.0, tensor)
        for name in initialization.TORCH_INIT_FUNCTIONS
    }
    functions["normal_"] = normal
    functions["zeros_"] = lambda tensor: note("constant", 0.0, tensor)
    functions["ones_"] = lambda tensor: note("constant", 1.0, tensor)
    functions["constant_"] = lambda tensor, val: note("constant", val, tensor)
    with _replaced(model, functions, lambda tensor, other: note("other", 0.0, tensor)):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._init_weights = partial(  # type: ignore[method-assign]
                    _as_owner, owner, paths, module._init_weights
                )
        model.initialize_weights()
    for name, parameter in model.named_parameters():
        if parameter._version != versions[name]:  # changed in place
            writes.setdefault(name, []).append(("other", 0.0, name.rpartition(".")[0]))
    return writes


def _as_owner(
    owner: list[str], paths: dict[int, str], initialize: Callable[..., None], module: nn.Module
) -> None:
    owner[0] = paths[id(module)]
    initialize(module)


@contextmanager
def _replaced(
    model: nn.Module, functions: dict[str, Any], copy_: Callable[..., Any]
) -> Iterator[None]:
    """Let the library's initialization call these functions."""
    originals = dict(initialization.TORCH_INIT_FUNCTIONS)
    own_copy = initialization.copy_
    _forget(model)
    initialization.TORCH_INIT_FUNCTIONS.update(functions)
    initialization.copy_ = copy_
    try:
        yield
    finally:
        initialization.TORCH_INIT_FUNCTIONS.update(originals)
        initialization.copy_ = own_copy
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.__dict__.pop("_init_weights", None)
        _forget(model)


def _forget(model: nn.Module) -> None:
    """Mark no module as initialized."""
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)


def _zero_row(row: int, local: Tensor, offset: tuple[int, ...], seed: int) -> None:
    """Zero the row of the padding token, if the shard has it."""
    if offset[0] <= row < offset[0] + len(local):
        local[row - offset[0]] = 0


def _copy(whole: Tensor, local: Tensor, offset: tuple[int, ...], seed: int) -> None:
    """Copy a shard's part of a parameter."""
    bounds = zip(offset, local.shape, strict=True)
    local.copy_(whole[tuple(slice(start, start + size) for start, size in bounds)])


def _redraw(
    redrawn: Callable[[str, int], dict[str, Tensor]],
    owner: str,
    key: str,
    local: Tensor,
    offset: tuple[int, ...],
    seed: int,
) -> None:
    """Copy a shard's part of the values that the class draws for a module."""
    _copy(redrawn(owner, seed)[key], local, offset, seed)


def _redrawn(model: Any, owner: str, seed: int) -> dict[str, Tensor]:
    """Return a module's parameters as the class draws them, seeded by (seed, the module's name)."""
    module = copy.deepcopy(model.get_submodule(owner), {id(model): model}).to_empty(device="cpu")
    digest = hashlib.sha256(f"{seed}/{owner}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        for child in reversed([*module.modules()]):
            model.base_model._init_weights(child)
    return dict(module.named_parameters())
