"""A world of any size without its processes: collectives return at once, and their results mean
nothing.
"""

import gc
import sys

import torch
import torch.distributed as dist

from titanlite.config.layout import Layout
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.planner.torch_private import forget_meshes, register_fake_backend


class FakeWorld:
    """One rank at a time of worlds of any size, until the context ends.

    Layouts of one size share a world, so that DTensor's caches for a mesh are still valid when it
    returns."""

    def __enter__(self) -> "FakeWorld":
        register_fake_backend()
        self._meshes: dict[Layout, Mesh] = {}
        self._rank, self._size = 0, 0
        gc.freeze()  # a collection before each step, as rehearsals need it, would take 0.2 s
        return self

    def mesh(self, layout: Layout, rank: int = 0) -> Mesh:
        """Be a rank of a layout; return the layout's mesh."""
        if (rank, layout.world) != (self._rank, self._size):
            self._leave()
            hook = sys.excepthook  # torch would print later errors as those of this rank
            dist.init_process_group(
                "fake", store=dist.HashStore(), rank=rank, world_size=layout.world
            )
            sys.excepthook = hook
            self._rank, self._size = rank, layout.world
        if layout not in self._meshes:
            self._meshes[layout] = build_mesh(layout, "cpu")
        return self._meshes[layout]

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        self._leave()

    def _leave(self) -> None:
        self._meshes.clear()
        forget_meshes()
        torch.compiler.reset()  # graphs name groups
        if self._size:
            dist.destroy_process_group()
            self._size = 0
