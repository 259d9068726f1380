"""Initial values that depend on (seed, parameter name) and not on the mesh.

Values are drawn in blocks of 65,536 elements, row-major in the full tensor, each from a generator
seeded by (seed, name, block). A rank draws only the blocks that its shard touches, so time and
memory are those of the shard; as many threads as torch uses share the blocks. torch's alternative,
a random state on the mesh, gives every shard the same values on a CPU mesh.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod

import torch
from torch import nn

from titanlite.errors import UserError
from titanlite.parallel.build import named_parameters, shared_names, tie
from titanlite.parallel.dtensor import local_part, shard_offset
from titanlite.registry import Init, Rule
from titanlite.runtime.determinism import derive_seed

BLOCK = 65536
_CHUNK_ELEMENTS = 64 * BLOCK
_MAX_THREADS = 16
"""Each thread holds a chunk in memory; on a many-core node they would add up to gigabytes."""


def materialize(
    part: nn.Module,
    table: dict[str, Rule],
    seed: int | None,
    device: torch.device,
    in_host_memory: bool = False,
) -> None:
    """Allocate and fill a part on the meta device; without a seed its parameters stay unfilled.

    `in_host_memory` puts its parameters, not its buffers, on the CPU.
    """
    allocate(part, device, in_host_memory)
    if seed is None:
        return
    with torch.no_grad():
        for name, parameter in named_parameters(part, table):
            init = table[name].init
            fill(parameter, name, init, seed)
            if init.edit:
                init.edit(local_part(parameter), shard_offset(parameter), seed)


def allocate(part: nn.Module, device: torch.device, in_host_memory: bool = False) -> None:
    """Allocate memory for a model part on the meta device, keeping ties.

    Fill its buffers, but not its parameters.
    """
    ties = shared_names(part)
    if in_host_memory:
        part.to_empty(device="cpu")
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
    else:
        part.to_empty(device=device)
    tie(part, ties)  # to_empty creates a parameter for each name
    for name, module in part.named_modules():
        _fill_buffers(name, module)


@torch.no_grad()
def _fill_buffers(name: str, module: nn.Module) -> None:
    """Fill a module's own buffers."""
    reset = getattr(module, "reset_buffers", None)
    if callable(reset):
        reset()
        return
    buffers = dict(module.named_buffers(recurse=False))
    if buffers:
        raise UserError(
            f"{name or 'the model'} has buffers ({', '.join(buffers)}) but no method reset_buffers "
            "to fill them: the model is built without memory, so values set in __init__ are lost"
        )


def fill(parameter: torch.Tensor, name: str, init: Init, seed: int) -> None:
    """Write the initial values of a parameter, or of its shard."""
    local = local_part(parameter)
    if init.std == 0.0 or local.numel() == 0:
        local.fill_(init.constant)
        return
    std = init.std
    if init.by_depth:
        layer = int(next(word for word in name.split(".") if word.isdigit()))
        std /= (2 * (layer + 1)) ** 0.5
    if init.by_inputs:
        std /= parameter.size(-1) ** 0.5
    shape = tuple(parameter.shape)
    threads = min(torch.get_num_threads(), _MAX_THREADS)
    draw = partial(_draw, name, seed, numel=prod(shape), threads=threads)
    _fill(local, shape, shard_offset(parameter), 0, draw, threads, std)


def _fill(
    local: torch.Tensor,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    before: int,
    draw: Callable[[int, int], torch.Tensor],
    threads: int,
    std: float,
) -> None:
    """Fill a rank's shard of a tensor, which `before` elements of its parameter precede."""
    per_row = prod(shape[1:])
    if local.dim() > 2 and local.size(1) < shape[1]:
        # A stack of matrices: draw only this rank's rows of each.
        for number, matrix in enumerate(local, offset[0]):
            _fill(matrix, shape[1:], offset[1:], before + number * per_row, draw, threads, std)
        return
    bounds = zip(offset[1:], local.shape[1:], strict=True)
    columns = tuple(slice(start, start + size) for start, size in bounds)
    # Some rows at a time, so that a shard cut along columns never needs all full rows in memory.
    chunk_rows = max(1, threads * _CHUNK_ELEMENTS // per_row)
    for row in range(0, local.size(0), chunk_rows):
        rows = min(chunk_rows, local.size(0) - row)
        start = before + (offset[0] + row) * per_row
        values = draw(start, start + rows * per_row).view(rows, *shape[1:])
        local[row : row + rows] = values[(slice(None), *columns)].mul_(std)


def _draw(name: str, seed: int, start: int, stop: int, numel: int, threads: int) -> torch.Tensor:
    """Return elements `start` to `stop` of the full tensor's standard normal values."""
    first = start // BLOCK
    end = min(numel, -(-stop // BLOCK) * BLOCK)
    values = torch.empty(end - first * BLOCK, dtype=torch.float32)
    blocks = values.split(BLOCK)

    def draw_every_nth(thread: int) -> None:
        generator = torch.Generator()
        for i in range(thread, len(blocks), threads):  # normal_ releases Python's lock
            generator.manual_seed(derive_seed("init", seed, name, first + i))
            blocks[i].normal_(generator=generator)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw_every_nth, range(min(threads, len(blocks)))))
    return values[start - first * BLOCK : stop - first * BLOCK]
