"""A world of any size in one process: collectives return at once, and their results are
meaningless.
"""

import gc
import sys

import torch
import torch.distributed as dist

from titanlite.config.layout import Layout
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.planner.torch_private import forget_meshes, register_fake_backend


class FakeWorld:
    """Plays one rank at a time of worlds of any size, until the context ends.

    Layouts of one size share a world, so that DTensor's caches stay valid when a mesh is used
    again."""

    def __enter__(self) -> "FakeWorld":
        register_fake_backend()
        self._meshes: dict[Layout, Mesh] = {}
        self._rank = 0
        self._size = 0
        gc.freeze()  # otherwise the collection before each rehearsed step would take 0.2 s
        return self

    def mesh(self, layout: Layout, rank: int = 0) -> Mesh:
        """Play a rank of a layout; return the layout's mesh."""
        if (rank, layout.world) != (self._rank, self._size):
            self._leave()
            hook = sys.excepthook  # torch's hook would print later errors with this rank's number
            dist.init_process_group(
                "fake", store=dist.HashStore(), rank=rank, world_size=layout.world
            )
            sys.excepthook = hook
            self._rank = rank
            self._size = layout.world
        if layout not in self._meshes:
            self._meshes[layout] = build_mesh(layout, "cpu")
        return self._meshes[layout]

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        self._leave()

    def _leave(self) -> None:
        self._meshes.clear()
        forget_meshes()
        torch.compiler.reset()  # graphs hold names of groups
        if self._size:
            dist.destroy_process_group()
            self._size = 0
