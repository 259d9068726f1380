"""The sub-meshes of a layout, in a fake world."""

from contextlib import suppress
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.jobs import fake_world
from titanlite.config.layout import DIMENSIONS, Layout
from titanlite.parallel.stage import build_lanes
from titanlite.planner.fake_world import FakeWorld
from titanlite.runtime import torch_private


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_replicate=2, dp_shard=2, tp=2),
        Layout(2, 2, 2, 2, 2),
        Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2, experts=True),
        Layout(pp=2, cp=2, tp=2, ep=4, experts=True),
        Layout(tp=2, experts=True),
        Layout(dp_shard=2, experts=True),
    ],
    ids=str,
)
def test_every_rank_is_in_the_groups_of_its_layout(layout):
    """Parameters are sharded over dp_shard x cp; the loss is summed over all but tp, also of other
    stages.

    Ranks that follow each other have different experts, and those with the same ones shard them.
    """
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    for rank, here in enumerate(places):

        def ranks_that_share(*names: str, here: dict[str, int] = here) -> list[int]:
            return [r for r, at in enumerate(places) if all(at[n] == here[n] for n in names)]

        with fake_world(layout, rank) as mesh:
            for name, degree in zip(DIMENSIONS, layout.degrees, strict=True):
                if degree > 1:
                    assert mesh.world[name].size() == degree
                    assert mesh.world[name].get_local_rank() == here[name]
            shards = mesh.fsdp.mesh.view(layout.dp_replicate, -1).tolist()
            assert sorted(r for row in shards for r in row) == ranks_that_share("pp", "tp")
            assert ranks_that_share("pp", "dp_replicate", "tp") in shards
            if layout.tp > 1:
                own = ranks_that_share("pp", "dp_replicate", "dp_shard", "cp")
                assert mesh.tp.mesh.tolist() == own
            place = dist.get_process_group_ranks(mesh.stage).index(rank)
            views = [mesh.world, mesh.fsdp, mesh.tp, mesh.experts, mesh.ep]
            for view in filter(None, views):
                known = mesh.coordinates(view.mesh_dim_names or ())[place]
                assert known == tuple(view.get_coordinate() or ())
            groups = {mesh.data: ("pp", "tp"), mesh.loss: ("tp",), mesh.stage: ("pp",)}
            for group, shared in groups.items():
                assert sorted(dist.get_process_group_ranks(group)) == ranks_that_share(*shared)
            if not layout.experts_on_own_mesh:
                assert mesh.ep is mesh.experts is None
                continue
            replica = ranks_that_share("pp", "dp_replicate")
            place = replica.index(rank)
            if layout.ep > 1:
                first = place // layout.ep * layout.ep
                assert mesh.ep.mesh.tolist() == replica[first : first + layout.ep]
            shards = mesh.experts.mesh.view(layout.dp_replicate, -1).tolist()
            assert replica[place % layout.ep :: layout.ep] in shards
            assert len(replica) * layout.dp_replicate == layout.ep * sum(map(len, shards))


@pytest.mark.parametrize(
    ("layout", "ranks", "splits"),
    [
        (Layout(pp=2), [0, 1, 0, 1], 2),
        (Layout(pp=4, dp_shard=2), [0, 1, 2, 3, 3, 2, 1, 0], 4),
        (Layout(pp=8, tp=2), [*range(8), *range(8)], 4),
        (Layout(pp=4), [0, 3, 1, 1, 2], 4),
    ],
    ids=str,
)
def test_every_rank_asks_for_the_lanes_of_all_edges_in_the_same_order(layout, ranks, splits):
    edges = {(a, b) for a, b in zip(ranks, ranks[1:], strict=False) if a != b}
    edges |= {(b, a) for a, b in edges}
    asked = []
    for rank in range(layout.world):
        make = dist.new_subgroups_by_enumeration
        with (
            fake_world(layout, rank) as mesh,
            patch.object(dist, make.__name__, side_effect=make) as made,
        ):
            columns = mesh.world.mesh.flatten(1)
            lanes = build_lanes(columns, ranks)
            assert lanes.keys() == edges
            own, place = (columns == rank).nonzero()[0].tolist()
            touching = [edge for edge in edges if own in edge]
            for edge in touching:
                expected = columns[[*edge], place].sort().values.tolist()
                assert sorted(dist.get_process_group_ranks(lanes[edge])) == expected
            assert len({lanes[edge].group_name for edge in touching}) == len(touching)
            asked.append([call.args[0] for call in made.call_args_list])
    assert len(asked[0]) == splits
    assert all(each == asked[0] for each in asked)


def test_a_pipeline_with_fsdp_and_tensor_parallel_takes_few_splits_on_any_number_of_ranks():
    """On NCCL each is a communicator that all ranks make together, also after a restart."""
    make = dist.new_subgroups_by_enumeration
    with FakeWorld() as world, patch.object(dist, make.__name__, side_effect=make) as made:
        mesh = world.mesh(Layout(pp=8, dp_shard=8, tp=8))
        build_lanes(mesh.world.mesh.flatten(1), [*range(8)] * 2)
    names = [call.kwargs["group_desc"] for call in made.call_args_list]
    assert names[:-4] == ["stage", "pp", "dp_shard", "tp", "loss"]
    assert len(names) == 9


def test_an_error_while_a_model_is_sharded_leaves_torch_as_it_was():
    """A left patch gave a later model the meshes of an earlier one, whose groups were gone."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    before = _fsdp_init._get_post_forward_mesh_info
    with suppress(KeyError), torch_private.share_reshard_meshes():
        raise KeyError
    assert _fsdp_init._get_post_forward_mesh_info is before
