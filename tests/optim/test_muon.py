"""Muon: torch's algorithm, but one owner orthogonalizes each matrix, with two collectives per batch
of matrices.

`titanlite verify` proves that it equals one process on every mesh.
"""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import FLOAT64, TINY, relative_error, require_close, run_to_end, trainer, weights
from tests.lanes import sample
from tests.optim.test_bf16_state import optimizer_state
from tests.parallel.rows import watching
from titanlite.optim import muon
from titanlite.optim.bf16_state import chunk_by_numel
from titanlite.optim.muon import Muon, owners_of

MUON = [*TINY, "--optimizer.name=Muon", "--model.overrides.n_kv_heads=2"]
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
TP = "--parallelism.tensor_parallel_degree=2"


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (9, 4, 8), (8,)])
def test_updates_equal_those_of_torch_s_muon_and_of_adamw_where_there_is_no_matrix(shape):
    """A weight of three dimensions is a matrix for each expert."""
    torch.manual_seed(0)
    is_matrix, part = len(shape) > 1, (-1, *shape[-2:])
    own = torch.nn.Parameter(torch.ones(shape))
    theirs = [torch.nn.Parameter(each.clone()) for each in own.detach().reshape(part)]
    group = {"params": [("own", own)], "weight_decay": 0.1, "matrices": is_matrix}
    adamw = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = Muon([group], torch.bfloat16, **adamw)
    if is_matrix:
        stock: Any = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw")
    else:
        stock = torch.optim.AdamW(theirs, **adamw)
    stock.param_groups[0]["weight_decay"] = 0.1
    for _ in range(4):
        own.grad = torch.randn(shape)
        for parameter, gradient in zip(theirs, own.grad.reshape(part), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        stock.step()
    assert relative_error(own, torch.stack([*theirs]).reshape(shape)) < 1e-6


def count_step(argv: list[str], folder: str) -> dict[str, Any]:
    """Count one step's matrices that this rank orthogonalizes, and the elements that it sends, of
    each collective to each rank.
    """
    run = trainer(argv, folder)
    sent: list[list[int]] = []
    owned: list[str] = []

    for parameter in run.runner.parameters:
        parameter.grad = torch.ones_like(parameter)
    exchanges = watching(dist, ["all_to_all_single"], lambda _, args, __: sent.append([*args[3]]))
    with exchanges, watching(muon, ["orthogonalize"], lambda name, *_: owned.append(name)):
        run.runner.optimizer.step()
    assert optimizer_state(run)
    elements = sum(item.parameter.numel() for item in run.runner.trained if item.is_hidden_matrix)
    return {"sent": sent, "owned": len(owned), "elements": elements}


@pytest.mark.parametrize(("world", "option", "copies"), sample([(4, REPLICAS, 2), (4, TP, 1)]))
def test_each_matrix_is_gathered_once_and_orthogonalized_by_one_owner(
    pool, tmp_path, world, option, copies
):
    """Each matrix is sent to its owner once, by the owner's own replica, and the result to every
    replica.
    """
    ranks = pool.run(count_step, [*MUON, option], str(tmp_path), world=world)
    counts = [rank["owned"] for rank in ranks]
    assert sum(counts) == 2 * 7 and max(counts) - min(counts) <= 2
    elements = ranks[0]["elements"]
    gathered, scattered = (sum(sum(rank["sent"][n]) for rank in ranks) for n in (0, 1))
    assert (gathered, scattered) == (elements, copies * elements)
    for number, rank in enumerate(ranks):
        gather, _ = rank["sent"]
        replica = world // copies
        there = [n for to, n in enumerate(gather) if to // replica != number // replica]
        assert not any(there)


def test_owners_have_about_equal_work():
    shapes = [torch.Size(s) for s in [(4096, 14336)] * 6 + [(4096, 4096)] * 4 + [(1024, 4096)] * 4]
    for ranks in (1, 3, 8, 100):
        owners = owners_of(shapes, ranks)
        work = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            work[owner] += min(shape) ** 2 * max(shape)
        largest = 4096**2 * 14336
        assert max(work) <= sum(work) / ranks + largest and owners == owners_of(shapes, ranks)


@pytest.mark.parametrize(
    ("count", "shape", "limits", "ends"),
    [
        (0, (4, 4), {}, []),
        (5, (4, 4), {"max_numel": 39}, [2, 4, 5]),
        (3, (4, 4), {"max_numel": 5}, [1, 2, 3]),
        (10, (4, 4), {"max_numel": 16, "min_count": 4}, [4, 8, 10]),
        (10, (4, 4), {"max_numel": 96, "min_count": 4}, [6, 10]),
        (3, (4, 4, 4), {"max_numel": 16, "min_count": 4}, [1, 2, 3]),
    ],
)
def test_a_batch_has_a_matrix_for_every_rank_however_large_they_are(count, shape, limits, ends):
    batches = chunk_by_numel([torch.empty(shape)] * count, **limits)
    assert [batch.stop for batch in batches] == ends


def three_steps(folder: str, most: int) -> dict[str, torch.Tensor]:
    """Train with batches of this many elements."""

    def batches(matrices: list[torch.Tensor], min_count: int) -> list[slice]:
        return [*chunk_by_numel(matrices, most)]

    run = trainer([*MUON, *FLOAT64], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "chunk_by_numel", batches)
        run.train()
    return weights(run)


def test_many_batches_of_matrices_equal_one_batch(pool, tmp_path):
    one, many = (pool.run(three_steps, str(tmp_path), most, world=2) for most in (1 << 20, 200))
    for found, expected in zip(many, one, strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_stage_with_nothing_to_train_takes_part(pool, tmp_path):
    """Of adapters, a stage with only the embedding has none."""
    argv = [*TINY, "--optimizer.name=Muon", "--lora.rank=2", "--training.global_batch_size=4"]
    alone = pool.run(run_to_end, argv, str(tmp_path / "alone"), world=1)[0]
    stages = [["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]
    cut = f"--parallelism.module_fqns_per_model_part={json.dumps(stages)}"
    pp = [*argv, cut, "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
    ranks = pool.run(run_to_end, pp, str(tmp_path / "stages"), world=2)
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    require_close(weights, alone["weights"], 1e-5)
