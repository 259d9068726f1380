"""Context parallel: who has which tokens, its collectives, and what it refuses.

tests/parity proves that its numbers equal those of one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.jobs import TINY, job, trainer
from tests.lanes import sample
from tests.messages import refused
from tests.parallel.rows import (
    CP,
    EVEN,
    RECOMPUTED,
    SAMPLES,
    ULYSSES,
    UNBALANCED,
    computed,
    graphs_of,
    on_a_fake_rank,
)
from titanlite.parallel import context_parallel
from titanlite.parallel.context_parallel import own_positions, rank_chunks
from titanlite.runtime.determinism import derive_seed, reseed

LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 2, 2, 1, 8, 16  # of TINY
CPU = torch.device("cpu")


@pytest.mark.parametrize("balanced", [True, False])
def test_the_chunks_of_all_ranks_are_the_sequence(balanced):
    """Balanced ones see as many tokens on every rank: whole chunks at a time, as a core attends."""
    for degree in range(1, 9):
        ranks = [rank_chunks(16 * degree, degree, rank, balanced) for rank in range(degree)]
        chunks = [chunk for rank in ranks for chunk in rank]
        assert sorted(token for chunk in chunks for token in chunk) == [*range(16 * degree)]
        ordered = context_parallel._in_order(chunks, balanced)
        assert [token for chunk in ordered for token in chunk] == [*range(16 * degree)]
        seen = [sum(len(chunk) * chunk.stop for chunk in rank) for rank in ranks]
        if balanced:
            assert set(seen) == {(2 * degree + 1) * 8**2}
        else:
            assert seen == [(rank + 1) * 16**2 for rank in range(degree)]


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        ([UNBALANCED], [[*range(8)], [*range(8, 16)]]),
        ([ULYSSES], [[*range(8)], [*range(8, 16)]]),
    ],
    ids=["headtail", "none", "ulysses"],
)
def test_each_rank_reads_the_places_that_the_config_says(options, own):
    """Those of the load balancer, or of Ulysses, which has none."""
    found = job([*EVEN, CP, *options], 4)
    read = [own_positions(found, rank, CPU, TOKENS) for rank in range(4)]
    assert [places.tolist() for places in read if places is not None] == [*own, *own]


def collectives(pool, folder: Path, *argv: str) -> dict[str, list[int]]:
    """Return the sizes, in elements of the whole, of each collective of one step that attention
    issues.
    """
    seen: dict[str, list[int]] = {}
    for namespace, name, *sizes in pool.run(computed, [*argv], str(folder), world=2)[0]:
        is_functional = namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap"))
        if is_functional or name == "alltoall_base_":
            seen.setdefault(name, []).append(max(sizes))
    return seen


@pytest.mark.parametrize(
    ("words", "gathers"),
    sample([("", 1), (f"{RECOMPUTED}full", 2), (f"{RECOMPUTED}selective", 2)], ("", 1)),
)
def test_keys_and_values_are_gathered_once_per_block_and_pass(pool, tmp_path, words, gathers):
    """One collective has both. Recomputing a block gathers them again."""
    both = 2 * SAMPLES * TOKENS * KV_HEADS * HEAD_DIM
    assert collectives(pool, tmp_path, *TINY, CP, *words.split()) == {
        "all_gather_into_tensor": [both] * LAYERS * gathers,
        "reduce_scatter_tensor": [both] * LAYERS,
    }


def test_ulysses_exchanges_four_tensors_per_block_and_pass(pool, tmp_path):
    own = SAMPLES * TOKENS * HEADS * HEAD_DIM // 2  # kv heads are as many as heads here
    found = collectives(pool, tmp_path, *EVEN, CP, ULYSSES)
    assert found == {"alltoall_base_": [own] * 8 * LAYERS}


@pytest.mark.long
@pytest.mark.parametrize("words", ["", ULYSSES])
def test_all_compiled_blocks_share_one_graph(words):
    """A graph for each would end the run at the ninth block."""
    assert graphs_of([*EVEN, CP, *words.split(), "--model.overrides.n_layers=3"], 2) == 1


def seeds(argv: list[str], folder: str) -> int:
    run = trainer([*argv, "--training.steps=1"], folder)
    places = run.runner.model.share.own_positions
    assert places(TOKENS) is places(TOKENS), "made once per length"
    run.train()
    return torch.initial_seed()


def test_ranks_that_split_a_sequence_draw_other_masks_and_older_runs_the_same_as_before(
    pool, tmp_path
):
    of_ranks = pool.run(seeds, [*TINY, CP], str(tmp_path), world=2)
    assert len(set(of_ranks)) == 2
    alone = pool.run(seeds, TINY, str(tmp_path), world=1)[0]
    assert alone == derive_seed("dropout", 0, 1, 0, 0, 0), "batch and tensor coordinate"
    reseed(0, 1, 0, 0, 0, 1)
    assert of_ranks[1] == torch.initial_seed()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: delattr(model.layers["1"].attention, "core"), "layers.1.attention.core"),
        (lambda model: setattr(model, "attention_mask", None), "attention_mask"),
    ],
)
def test_a_model_without_what_its_table_names_is_refused(spoil, says):
    with on_a_fake_rank([*EVEN, CP], 2) as (model, context):
        spoil(model)
        with refused(says):
            context_parallel.apply(model, context)
