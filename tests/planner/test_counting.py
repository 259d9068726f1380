"""The counting, compared with what is known by hand: rehearsals and their comparison with processes
rely on it.
"""

from contextlib import suppress

import torch
import torch.distributed as dist

from tests.jobs import fake_world
from titanlite.config.layout import Layout
from titanlite.planner.counting import Counting
from titanlite.planner.record import Recording
from titanlite.planner.torch_private import fake_tensor_mode, replaced

KIB = 1024


def counted(layout: Layout, step) -> Recording:
    with fake_world(layout) as mesh, fake_tensor_mode(), Counting(layout) as counting:
        step(mesh)
        return counting.recording()


def test_bytes_are_those_of_storages_while_they_live_and_as_they_are_resized():
    def step(mesh):
        first = torch.ones(KIB, dtype=torch.uint8)
        view = first[: KIB // 2]
        second = first + 1
        del first, second
        storage = view.untyped_storage()
        storage.resize_(3 * KIB)
        storage.resize_(0)
        torch.ones(KIB, dtype=torch.uint8)

    live = [operation.live for operation in counted(Layout(), step).operations]
    assert live == [KIB, 2 * KIB, 3 * KIB, KIB], (
        "of ones, of the sum, of ones after the resizing, of the end"
    )


def test_an_operation_has_the_flops_and_the_traffic_of_its_matrices():
    def step(mesh):
        a, b = torch.ones(8, 16), torch.ones(16, 4)
        (a @ b).t()

    *_, matmul, _ = counted(Layout(), step).operations
    assert (matmul.flops, matmul.dtype, matmul.moved) == (
        2 * 8 * 16 * 4,
        "float32",
        4 * (8 * 16 + 16 * 4 + 8 * 4),
    )


def test_a_collective_has_the_dimensions_that_its_group_spans_and_the_bytes_of_the_whole_tensor():
    def step(mesh):
        shard = torch.ones(KIB, dtype=torch.uint8)
        for name in ("dp_replicate", "dp_shard", "tp"):
            dist.all_gather(
                [torch.empty_like(shard), torch.empty_like(shard)],
                shard,
                mesh.world.get_group(name),
            )
        dist.all_reduce(shard, group=mesh.loss)
        dist.all_reduce(shard)

    found = counted(Layout(dp_replicate=2, dp_shard=2, tp=2), step).collectives()
    assert [(c.kind, c.dimension, c.ranks, c.dtype, c.bytes) for c in found] == [
        ("all-gather", "dp_replicate", 2, "uint8", 2 * KIB),
        ("all-gather", "dp_shard", 2, "uint8", 2 * KIB),
        ("all-gather", "tp", 2, "uint8", 2 * KIB),
        ("all-reduce", "dp_replicate x dp_shard", 4, "uint8", KIB),
        ("all-reduce", "dp_replicate x dp_shard x tp", 8, "uint8", KIB),
    ]


def test_what_is_replaced_is_as_before_even_after_an_error():
    class Own(list[int]):
        size = 1

    for name, is_own in (("size", True), ("append", False)):
        with suppress(ZeroDivisionError), replaced(Own, name, 2):
            assert getattr(Own, name) == 2
            raise ZeroDivisionError
        assert (name in vars(Own)) == is_own
    assert Own.size == 1
