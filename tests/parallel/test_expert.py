"""Expert parallel: what is exchanged and when, experts without a token, and what is refused.

test_exact.py proves that its numbers equal those of one process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import (
    MOE,
    forward_backward,
    job,
    trainer,
)
from tests.lanes import sample
from tests.messages import refused
from tests.parallel.rows import (
    BY_OPERATION,
    COMPILED,
    EP,
    EP4,
    MODEL,
    RECOMPUTED,
    TP,
    Row,
    graphs_of,
    on_a_fake_rank,
    own_batches,
    prefer,
    same_as_alone,
    step_of,
    watching,
)
from tests.runs import run
from titanlite.parallel.expert_parallel import routers
from titanlite.parallel.parallelize import parallelize

LAYERS, EXPERTS, TOP_K, DIM, TOKENS = 2, 4, 2, 16, 16  # of MOE
BIAS = f"{MODEL}balance=bias"


@pytest.mark.parametrize(
    "preferred", [(0, 1), (1, 3)], ids=["a rank without a token", "experts without one"]
)
@pytest.mark.parametrize("words", sample([EP, f"{EP} {TP}"], EP))
def test_experts_without_a_token_have_zero_gradients(pool, alone, tmp_path, words, preferred):
    row = Row("experts", 2, f"{words} {BIAS}")
    ranks = step_of(pool, row, tmp_path, preferred)
    same_as_alone(ranks, alone(*row.alone, preferred=preferred))
    idle = [expert for expert in range(EXPERTS) if expert not in preferred]
    for name in (f"layers.{layer}.moe.experts.w{n}" for layer in range(LAYERS) for n in (1, 2, 3)):
        norms = ranks[0]["gradients"][name].flatten(1).norm(dim=1)
        assert (norms[idle] == 0).all() and (norms[[*preferred]] > 0).all(), name


def choices_and_exchanges(
    words: str, folder: str, preferred: Collection[int] = ()
) -> tuple[list[list[int]], list[Any]]:
    """Return the choices of each layer for a micro-batch, and its all-to-alls."""
    run = trainer([*MOE, *words.split()], folder)
    if preferred:
        prefer(run, preferred)
    chosen: list[list[int]] = []
    for router in routers(*run.parts).values():
        router.register_forward_hook(
            lambda module, args, outputs: chosen.append(outputs[2].tolist())
        )
    sent = list[Any]()

    def see(_: str, args: tuple[Any, ...], __: Any) -> None:
        arrived, rows, receive, send = args[:4]
        sizes = [tensor.numel() * tensor.element_size() for tensor in (rows, arrived)]
        sent.append((sizes, send, receive))

    with watching(dist, ["all_to_all_single"], see):
        forward_backward(run, own_batches(run)[:1])
    return chosen[:LAYERS], sent


EXCHANGES = {
    "plain": (2, EP, ()),
    "a rank without a token": (2, f"{EP} {TP} {BIAS}", (0, 1)),
    "recomputed": (2, f"{EP} {RECOMPUTED}full", ()),
    "by operation": (2, f"{EP} {BY_OPERATION}", ()),
}


@pytest.mark.parametrize("name", sample(EXCHANGES, "plain"))
def test_each_token_is_sent_to_the_rank_of_its_expert_and_back(pool, tmp_path, name):
    """Three all-to-alls a layer: counts, tokens, outputs; and two in the backward pass, gradients
    of the latter.

    Recomputing a block repeats the three; recomputing by operation repeats none.
    """
    world, words, preferred = EXCHANGES[name]
    ranks = pool.run(choices_and_exchanges, words, str(tmp_path), preferred, world=world)
    own, itemsize = EXPERTS // world, 4
    to = [
        [[sum(c[i : i + own]) for i in range(0, EXPERTS, own)] for c in chosen]
        for chosen, _ in ranks
    ]
    for rank, (_, sent) in enumerate(ranks):
        expected, back = [], []
        for layer in range(LAYERS):
            send, receive = to[rank][layer], [sender[layer][rank] for sender in to]
            there = [DIM * itemsize * sum(rows) for rows in (send, receive)]
            forward = [
                ([EXPERTS * 8] * 2, None, None),
                (there, send, receive),
                (there[::-1], receive, send),
            ]
            expected += forward
            back = forward * (name == "recomputed") + forward[1:] + back
        assert sent == expected + back


def test_forced_balance_sends_as_many_tokens_to_all_experts(pool, tmp_path):
    words = f"{EP} --debug.moe_force_load_balance"
    for chosen, _ in pool.run(choices_and_exchanges, words, str(tmp_path), world=2):
        assert chosen == [[2 * TOKENS * TOP_K // EXPERTS] * EXPERTS] * LAYERS


def test_without_a_number_of_ranks_the_config_takes_the_fewest_that_fit():
    for words, world in ((EP4, 4), (f"{EP4} {TP}", 4), (f"{EP} {TP}", 2)):
        assert job([*MOE, *words.split()], None).layout.world == world


def parallelized(world: int, *words: str) -> torch.nn.Module:
    """Return the model on a rank of a fake world."""
    with on_a_fake_rank([*MOE, *words], world) as (model, context):
        parallelize(model, context)
    return model


@pytest.mark.parametrize(
    ("experts", "ways"),
    [(8, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"), (6, "(Shard(dim=1), Shard(dim=0))")],
)
def test_experts_are_sharded_whole_where_their_number_divides(experts, ways):
    model = parallelized(4, EP, f"{MODEL}experts={experts}")
    placements = {repr(p.placements) for name, p in model.named_parameters() if "experts" in name}
    assert placements == {ways}


@pytest.mark.long
def test_what_is_around_experts_is_compiled_and_all_blocks_share_its_graphs():
    """Norms, attention, a router's choice and its loss, the order by expert, the gates, and the sum
    by weight; a graph for each block would end the run at the ninth.
    """
    assert graphs_of([*MOE, f"{MODEL}n_layers=3"], 2) == 8


def test_what_cannot_be_sharded_is_refused():
    with refused("1 experts", "7 rows"):
        parallelized(4, EP, f"{MODEL}experts=2", f"{MODEL}expert_dim=7")


@pytest.mark.nightly
def test_no_later_step_compiles_for_other_numbers_of_tokens(tmp_path):
    """With one layer on each rank's experts the first step meets one number only."""
    words = f"{EP} {COMPILED} {MODEL}n_layers=1 --training.steps=5 --metrics.log_freq=1"
    done = run([*MOE, *words.split()], tmp_path, ranks=2)
    found = [each["recompiles"] for each in done.records if "recompiles" in each]
    assert found == [0] * 5
