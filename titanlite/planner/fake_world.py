"""A world of any size without its processes: collectives return at once, and their results mean nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from titanlite.layout import Layout
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.planner.torch_private import forget_meshes, register_fake_backend


@contextmanager
def fake_world(layout: Layout, rank: int = 0, device_type: str = "cpu") -> Iterator[Mesh]:
    """Be one rank of a layout while the context lasts; yield the layout's mesh."""
    register_fake_backend()
    forget_meshes()
    hook = sys.excepthook  # torch would print later errors as those of this rank
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=layout.world)
    try:
        yield build_mesh(layout, device_type)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
