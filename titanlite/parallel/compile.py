"""Compile every block as one graph. In a block with experts, compile the parts without experts, and
of the others the methods that their classes list in `compiled_methods`.

The forward method is compiled, not the module, so that names stay and FSDP2's hooks are outside the
graph.
"""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titanlite.config import schema
from titanlite.errors import UserError
from titanlite.parallel.build import Context
from titanlite.parallel.expert_parallel import expert_modules, units
from titanlite.runtime.torch_private import set_activation_memory_budget


def apply(model: nn.Module, context: Context) -> list[str]:
    """Compile the forward method of every block, within the activation memory budget if set."""
    settings = context.job.config.compile
    check_backend(settings)
    if not settings.enable or "model" not in settings.components:
        return []
    if settings.cache_folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache_folder(settings))
    note = f"Applied torch.compile to every block, backend {settings.backend}"
    options: dict[str, Any] = {"fullgraph": True, "backend": settings.backend}
    if settings.mode != "default":
        options["mode"] = settings.mode
        note += f", mode {settings.mode}"
    recomputing = context.job.config.activation_checkpoint
    budget = 1.0
    if recomputing.mode == "memory_budget":
        budget = recomputing.memory_budget
        note += f", keeping at most {budget:g} of the activations"
    set_activation_memory_budget(budget)
    experts = {*expert_modules(model, context.table).values()}
    compiled = partial(torch.compile, **options)
    for block in context.blocks(model).values():
        for unit in units(block, experts):
            unit.forward = compiled(unit.forward)  # type: ignore[method-assign]
        for module in block.modules():
            names: Sequence[str] = getattr(type(module), "compiled_methods", ())
            # The number of an expert's rows changes from step to step: without `dynamic` the second
            # step would compile again.
            dynamic = None
            if module in experts:
                dynamic = True
            for name in names:
                setattr(module, name, compiled(getattr(module, name), dynamic=dynamic))
    return [note]


def _cache_folder(settings: schema.Compile) -> Path:
    return Path(settings.cache_folder).expanduser().absolute()


def check_cache_folder(settings: schema.Compile) -> None:
    """Raise a UserError if nothing can be written into compile.cache_folder."""
    if not settings.enable or not settings.cache_folder:
        return
    try:
        folder = _cache_folder(settings)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f'compile.cache_folder = "{settings.cache_folder}": {error.strerror}; name a folder '
            "that can be written"
        ) from None


def check_backend(settings: schema.Compile) -> None:
    """Raise a UserError if the compiler has no such backend."""
    backend = settings.backend
    # Listing the compiler's backends takes seconds, so the usual ones are not looked up.
    if not settings.enable or backend in ("inductor", "aot_eager", "eager"):
        return
    if backend in torch.compiler.list_backends(exclude_tags=()):
        return
    legal = ", ".join(["aot_eager", "eager", *torch.compiler.list_backends()])
    raise UserError(
        f'compile.backend = "{backend}" is not a backend of the compiler; legal: {legal}'
    )
