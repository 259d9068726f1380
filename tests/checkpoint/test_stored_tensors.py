"""Where ranks write: each element once, and a reader finds it; with as many rows as tensors and
ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.checkpoint.saved import commit_tensors, everyone, rank
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import MANIFEST, File, Manifest, read_manifest
from titanlite.checkpoint.plan import Planner
from titanlite.checkpoint.stored_tensors import (
    Split,
    StoredTensor,
    safetensors_header,
    sizes_of,
    spread,
    tensor_file,
    written_by,
)
from titanlite.runtime.store import LocalPath

MESHES = [
    Split(("a",), (3,), (1,), 0),
    Split(("a",), (4,), (2,), 1),  # every second rank
    Split(("a", "b"), (2, 3), (3, 1), 6),  # of a later stage
    Split(("a", "b", "c"), (2, 2, 2), (4, 2, 1), 0),  # inner replicas are outside
    Split((), (), (), 5),
]
SPLITS = [(), ((0, 0),), ((1, 0),), ((0, 1), (0, 0)), ((0, 0), (1, 1)), ((0, 2), (1, 0))]
SHAPES = [(7, 5), (1, 9), (12, 4), (2, 1)]


def layouts() -> Iterator[tuple[Split, tuple[int, int]]]:
    for mesh, splits, shape in product(MESHES, SPLITS, SHAPES):
        if all(axis < len(mesh.sizes) for _, axis in splits):
            yield replace(mesh, splits=splits), shape


def test_each_element_is_written_once_by_the_copy_that_is_named():
    each_copy = [
        (replace(layout, first=first), shape)
        for layout, shape in layouts()
        for first in layout.copies()
    ]
    for copy, shape in each_copy:
        writer = np.full(shape, -1)
        for each in range(16):
            region = copy.region(shape, each)
            if region is not None:
                assert (writer[region] == -1).all(), (copy, shape)
                writer[region] = each
        assert writer.min() == copy.first, (copy, shape)
        if not copy.splits:
            assert (writer == copy.first).all()


def test_copies_share_a_save():
    """HSDP 4 x 2 with weights over both dimensions, and some whole on all ranks."""
    mesh = (("dp_replicate", "dp_shard"), (4, 2), (2, 1), 0)
    split, whole = Split(*mesh, splits=((0, 1),)), Split(*mesh)
    tensors = {f"{each}": StoredTensor((each + 1, 8), "float32", split) for each in range(40)}
    tensors |= {
        f"whole {each}": StoredTensor((each + 1, 2), "float32", whole) for each in range(40)
    }
    tensors = spread(tensors)
    written = [
        sum(tensors[name].bytes_of(sizes_of(region)) for name, region in regions.items())
        for regions in (written_by(rank, tensors) for rank in range(8))
    ]
    total = sum(tensor.bytes_of(tensor.shape) for tensor in tensors.values())
    assert sum(written) == total
    assert max(written) < 1.15 * total / 8 and min(written) > 0.85 * total / 8


def test_a_reader_finds_those_who_wrote_a_region_and_no_other():
    for layout, shape in layouts():
        for wanted in ((slice(0, 2), slice(0, 1)), (slice(1, 2), slice(0, shape[1]))):
            wanted = tuple(
                slice(min(w.start, size - 1), min(w.stop, size))
                for w, size in zip(wanted, shape, strict=True)
            )
            expected = {}
            for each in range(16):
                region = layout.region(shape, each)
                canvas = np.zeros(shape)
                if region is not None:
                    canvas[region] = 1
                    if canvas[wanted].any():
                        expected[each] = region
            assert dict(layout.parts(shape, wanted)) == expected, (layout, shape, wanted)


def on_every_mesh(folder: str) -> list[str]:
    """Commit tensors of every kind on meshes of four ranks; return those that differ."""
    meshes = [
        dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),
        dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
        dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")),
    ]
    kinds: list[tuple[Any, list[Any]]] = [
        (meshes[0], [Shard(0)]),
        (meshes[0], [Shard(1)]),
        (meshes[1], [Replicate(), Shard(0)]),
        (meshes[1], [Replicate(), Replicate()]),
        (meshes[2], [_StridedShard(0, split_factor=2), Shard(0)]),
        (meshes[2], [Shard(0), Shard(1)]),
        (meshes[2], [Shard(0), Shard(0)]),
        (meshes[2]["dp_shard"], [Shard(0)]),  # the ranks of tp have the same, and do not show it
        (meshes[2]["tp"], [Shard(1)]),
    ]
    generator = torch.Generator().manual_seed(1)
    whole: dict[str, torch.Tensor] = {}
    live: dict[str, torch.Tensor] = {}
    types = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
    for number, ((mesh, placements), rows) in enumerate(product(kinds, (8, 5, 1))):
        name = f"model.{number}"
        values = torch.randn(rows, 6, generator=generator).to(types[number % 5])
        whole[name] = values
        sizes, begin = compute_local_shape_and_global_offset(values.shape, mesh, placements)
        box = tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))
        local = values[box].clone()
        live[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=values.shape, stride=(6, 1)
        )
    live["model.number"] = whole["model.number"] = torch.tensor(3.5)
    if rank() >= 2:  # a tensor that only later ranks have, as those of later stages
        live["model.late"] = torch.ones(3)
    whole["model.late"] = torch.ones(3)
    commit_tensors(LocalPath(folder), live, everyone())
    found = load_tensors(LocalPath(folder) / "step-1")
    assert found.keys() == whole.keys()
    return [name for name in whole if not torch.equal(found[name], whole[name])]


@pytest.fixture(scope="module")
def mixed(pool, tmp_path_factory) -> tuple[LocalPath, list[list[str]]]:
    """The checkpoint of `on_every_mesh`, and what each rank returned."""
    folder = tmp_path_factory.mktemp("mixed")
    return folder / "step-1", pool.run(on_every_mesh, str(folder))


def test_shards_of_every_kind_and_type_are_read_bit_for_bit(mixed):
    folder, different = mixed
    assert different == [[]] * 4
    tensors = read_manifest(folder).tensors
    firsts = {name: tensor.layout.first for name, tensor in tensors.items()}
    assert firsts.pop("model.late") == 2
    assert {*firsts.values()} >= {0, 1, 2}, "copies share what all ranks have"


def saved_by_replicas(folder: str) -> tuple[list[str], list[int]]:
    """Commit what two replicas have, each split over two ranks or not at all; return what differs,
    and the bytes of each rank's file.
    """
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    generator = torch.Generator().manual_seed(1)
    whole = {f"model.{n}": torch.randn(8, 6, generator=generator) for n in range(40)}
    live: dict[str, torch.Tensor] = {}
    for number, (name, values) in enumerate(whole.items()):
        live[name] = values
        if number % 4 < 2:
            own = values.chunk(2)[mesh.get_local_rank("tp")]
            live[name] = DTensor.from_local(own, mesh["tp"], [Shard(0)], run_check=False)
    place = LocalPath(folder)
    commit_tensors(place, live, everyone(), Planner(everyone(), replicas=(2, 2)))
    found = load_tensors(place / "step-1")
    assert found.keys() == whole.keys()
    different = [name for name in whole if not torch.equal(found[name], whole[name])]
    return different, [(place / "step-1" / tensor_file(each)).stat().st_size for each in range(4)]


def test_replicas_share_what_their_meshes_do_not_say_that_they_all_have(pool, tmp_path):
    for different, sizes in pool.run(saved_by_replicas, str(tmp_path), world=4):
        assert different == []
        first, second = sum(sizes[:2]), sum(sizes[2:])
        assert 0.9 < first / second < 1.1


def large(shards: int, tp: int) -> dict[str, StoredTensor]:
    """Return the table of a model of 1,134 parameters with AdamW, as Llama 405B."""
    mesh = (("dp_shard", "tp"), (shards, tp), (tp, 1), 0)
    kinds = {
        (16384,): Split(*mesh, splits=((0, 0),)),
        (53248, 16384): Split(*mesh, splits=((0, 1), (0, 0))),
        (16384, 53248): Split(*mesh, splits=((1, 1), (0, 0))),
    }
    return {
        f"{kind}.layers.{layer}.feed_forward.w{number}.weight": StoredTensor(
            shape, "float32", layout
        )
        for layer in range(126)
        for number, (shape, layout) in enumerate([*kinds.items()] * 3)
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    }


@pytest.mark.parametrize("world", [(8, 8), (2048, 8)])
def test_a_manifest_grows_with_tensors_and_ranks_and_not_with_their_product(tmp_path, world):
    tensors, ranks = large(*world), world[0] * world[1]
    files = {tensor_file(each): File(4294967295, 4294967295) for each in range(ranks)}
    manifest = Manifest(1, False, files, {**tensors})
    raw = manifest.render()
    assert len(tensors) > 3400 and len(raw) < 200 * len(tensors) + 70 * ranks < 2_000_000
    assert len(safetensors_header(tensors, written_by(ranks - 1, tensors))) < 1_000_000
    (tmp_path / MANIFEST).write_bytes(raw)
    assert read_manifest(tmp_path) == manifest
    found = {
        rank
        for tensor in tensors.values()
        if (region := tensor.layout.region(tensor.shape, 9)) is not None
        for rank, _ in tensor.layout.parts(tensor.shape, region)
    }
    assert found == {9}
