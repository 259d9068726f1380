"""Context parallel: who has which tokens, its collectives, and what it refuses.

tests/parity proves that its numbers equal those of one process.
"""

from __future__ import annotations

import pytest
import torch

from tests.jobs import TINY, fake_world, forward_backward, job, micro_batches, trainer
from tests.lanes import sample
from tests.messages import refused
from tests.parallel.rows import (
    CP,
    EVEN,
    RECOMPUTED,
    SAMPLES,
    ULYSSES,
    UNBALANCED,
    graphs_of,
    operations,
    ragged_batch,
)
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.parallel import context_parallel
from titanlite.parallel.build import Context, build_model
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
    found = job([*EVEN, CP, *options], 4)
    read = [own_positions(found, rank, CPU, TOKENS) for rank in range(4)]
    assert [places.tolist() for places in read if places is not None] == [*own, *own]
    rows = torch.arange(2 * 4 * TOKENS).view(2, 4, TOKENS)
    batch = MicroBatch(rows).to(CPU, read[1])
    for kind, row in (("tokens", 0), ("labels", 1), ("positions", 3)):
        assert torch.equal(getattr(batch, kind), rows[:, row, own[1]])
    assert batch.documents is not None and torch.equal(batch.documents, rows[:, 2]), (
        "masks need all of them"
    )
    unmasked = MicroBatch(rows[:, :2], read[1])
    assert unmasked.documents is None
    assert unmasked.positions is not None and unmasked.positions.tolist() == [own[1]] * 2


def collectives(argv: list[str], folder: str) -> dict[str, list[int]]:
    """Return the sizes, in elements of the whole, of each collective of one step that attention
    issues.
    """
    run = trainer([*argv, f"--training.local_batch_size={SAMPLES}"], folder)
    mine = micro_batches(*ragged_batch(), run.rank_slice)
    own = run.runner.forward.own_positions(TOKENS)
    assert run.runner.forward.own_positions(TOKENS) is own, "made once per length"
    with operations() as computed:
        forward_backward(run, [batch.to(run.device, own) for batch in mine])
    seen: dict[str, list[int]] = {}
    for func, args, result in computed:
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            seen.setdefault(name, []).append(max(args[0].numel(), result.numel()))
        elif name == "alltoall_base_":
            seen.setdefault(name, []).append(args[0].numel())
    return seen


@pytest.mark.parametrize(
    ("words", "gathers"),
    sample([("", 1), (f"{RECOMPUTED}full", 2), (f"{RECOMPUTED}selective", 2)], ("", 1)),
)
def test_keys_and_values_are_gathered_once_per_block_and_pass(pool, tmp_path, words, gathers):
    """One collective has both. Recomputing a block gathers them again."""
    both = 2 * SAMPLES * TOKENS * KV_HEADS * HEAD_DIM
    for found in pool.run(collectives, [*TINY, CP, *words.split()], str(tmp_path), world=2):
        assert found == {
            "all_gather_into_tensor": [both] * LAYERS * gathers,
            "reduce_scatter_tensor": [both] * LAYERS,
        }


def test_ulysses_exchanges_four_tensors_per_block_and_pass(pool, tmp_path):
    for found in pool.run(collectives, [*EVEN, CP, ULYSSES], str(tmp_path), world=2):
        own = SAMPLES * TOKENS * HEADS * HEAD_DIM // 2
        assert found == {"alltoall_base_": [own] * 8 * LAYERS}, "kv heads are as many as heads here"


@pytest.mark.parametrize("words", sample(["", ULYSSES], ""))
def test_all_compiled_blocks_share_one_graph(words):
    """A graph for each would end the run at the ninth block."""
    assert graphs_of([*EVEN, CP, *words.split(), "--model.overrides.n_layers=3"], 2) == 1


def seeds(argv: list[str], folder: str) -> int:
    trainer([*argv, "--training.steps=1"], folder).train()
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


def test_an_unbalanced_split_has_nothing_to_balance_with_ulysses():
    found = job([*EVEN, CP, ULYSSES, UNBALANCED], 2)
    assert "with ulysses: parallelism.context_parallel_load_balancer" in found.no_effect


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: delattr(model.layers["1"].attention, "core"), "layers.1.attention.core"),
        (lambda model: setattr(model, "attention_mask", None), "attention_mask"),
    ],
)
def test_a_model_without_what_its_table_names_is_refused(spoil, says):
    found = job([*EVEN, CP], 2)
    model, table = build_model(found)
    spoil(model)
    with fake_world(found.layout) as mesh, refused(says, kind=UserError):
        context_parallel.apply(model, Context(found, mesh, table, CPU))
