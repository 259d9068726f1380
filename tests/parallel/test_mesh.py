"""The sub-meshes of a layout, in a fake world."""

import pytest
import torch.distributed as dist

from tests.jobs import fake_world
from titanlite.layout import DIMENSIONS, Layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=4),
        Layout(dp_replicate=2, dp_shard=2, tp=2),
        Layout(2, 2, 2, 2, 2),
        Layout(cp=2, tp=2),
        Layout(pp=2, dp_shard=2),
        Layout(pp=2, tp=2),
        Layout(dp_shard=4, ep=2, experts=True),
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
    ranks = range(layout.world)
    for rank in ranks:
        here = layout.coordinates(rank)

        def ranks_that_share(*names: str, here: dict[str, int] = here) -> list[int]:
            return [
                r for r in ranks if all(layout.coordinates(r)[name] == here[name] for name in names)
            ]

        with fake_world(layout, rank) as mesh:
            for name in DIMENSIONS:
                assert mesh.world[name].size() == layout.degrees[DIMENSIONS.index(name)]
                assert mesh.world[name].get_local_rank() == here[name]
            assert sorted(mesh.fsdp.mesh.flatten().tolist()) == ranks_that_share("pp", "tp")
            assert mesh.fsdp.size() == layout.fsdp * layout.dp_replicate
            shards = mesh.fsdp.mesh.tolist()
            shards = (
                next(row for row in shards if rank in row) if layout.dp_replicate > 1 else shards
            )
            assert shards == ranks_that_share("pp", "dp_replicate", "tp")
            assert mesh.tp.mesh.tolist() == ranks_that_share("pp", "dp_replicate", "dp_shard", "cp")
            for group, shared in (
                (mesh.data, ("pp", "tp")),
                (mesh.loss, ("tp",)),
                (mesh.stage, ("pp",)),
            ):
                assert sorted(dist.get_process_group_ranks(group)) == ranks_that_share(*shared)
            if not layout.experts_on_own_mesh:
                assert mesh.ep is mesh.experts is None
                continue
            assert mesh.ep and mesh.experts
            replica = ranks_that_share("pp", "dp_replicate")
            place = replica.index(rank)
            assert mesh.ep.mesh.tolist() == replica[place // layout.ep * layout.ep :][: layout.ep]
            shards = mesh.experts.mesh.view(layout.dp_replicate, -1).tolist()
            assert replica[place % layout.ep :: layout.ep] in shards
            assert len(replica) * layout.dp_replicate == layout.ep * sum(map(len, shards))
