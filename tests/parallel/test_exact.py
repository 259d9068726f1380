"""Exactness beyond the table of `titanlite verify`: techniques by themselves and together, stages,
experts, clipping, initial values.
"""

import pytest
import torch

from tests.jobs import PARROT, TINY, trainer, weights
from tests.lanes import sample
from tests.parallel.rows import (  # noqa: F401  tests/train has them from here
    IN_DEFAULT,
    IN_LONG,
    IS_OLD,
    SAMPLES,
    ragged_batch,
    same_as_alone,
    step_of,
)
from titanlite.parallel.init import BLOCK, fill
from titanlite.registry import normal

ROWS = dict(sorted((IN_DEFAULT | IN_LONG).items(), key=lambda row: row[1].ranks))
"""Those on as many ranks share their process groups."""
NIGHTLY = ["kept whole, recomputed, compiled", "ep compiled", "ep, by operation"]
NIGHTLY += ["stages, compiled", "muon, tp, kept whole", "memory budget", "experts of tp"]


@pytest.mark.parametrize("name", sample(ROWS, *IN_DEFAULT, nightly=NIGHTLY))
def test_a_step_has_the_numbers_of_one_process(pool, alone, tmp_path, name):
    """In float64: loss, norms, gradients and weights, and initial weights bit for bit. The first
    ranks have no label. Stages do what their schedule declares.
    """
    row = ROWS[name]
    if IS_OLD and name == "V, cp, chunks":
        pytest.skip("needs torch 2.13")
    ranks = step_of(pool, row, tmp_path)
    same_as_alone(ranks, alone(*row.alone))
    for found in ranks:
        assert found.get("actions") == found.get("declared")


def initial_weights(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    return weights(trainer(argv, folder))


# 70,000 elements in a matrix: more than one block of 65,536, and shards that begin inside a block.
WIDE = [*TINY, "--model.overrides.dim=280", "--model.overrides.hidden_dim=251"]
TIED = [*WIDE, "--model.overrides.tied"]


@pytest.fixture(scope="module")
def initial(pool, tmp_path_factory):
    """Return the initial weights of a model in one process."""
    folder = str(tmp_path_factory.mktemp("initial"))
    return lambda *argv: pool.run(initial_weights, [*argv], folder, world=1)[0]


@pytest.mark.parametrize("model", sample([WIDE, TIED, PARROT], WIDE), ids=["", "tied", "parrot"])
def test_initial_weights_are_bit_equal_on_any_world_size(pool, initial, tmp_path, model):
    expected = initial(*model)
    for world in (2, 3):
        for found in pool.run(initial_weights, model, str(tmp_path), world=world):
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"{name} on {world} ranks"


@pytest.mark.parametrize("threads", [2, 7])
def test_initial_values_have_the_same_bits_from_any_number_of_threads(monkeypatch, threads):
    """Of ten blocks, the last of which is not full; a fault in a thread is not lost."""
    alone, together = torch.empty(10, BLOCK - 1), torch.empty(10, BLOCK - 1)
    fill(alone, "a", normal(0.02), seed=5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fill(together, "a", normal(0.02), seed=5)
    assert torch.equal(alone, together) and alone.unique().numel() > 0.9 * alone.numel()
    monkeypatch.setattr("titanlite.parallel.init.derive_seed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fill(together, "a", normal(0.02), seed=5)


@pytest.mark.parametrize("model", [WIDE, TIED], ids=["", "tied"])
def test_initial_values_have_the_declared_spread_and_differ_by_seed(initial, model):
    """Of every kind of parameter. What writes into the residual stream starts smaller the deeper
    its block is.
    """
    found, other = initial(*model), initial(*model, "--debug.seed=1")
    spread = dict.fromkeys(["wq", "wk", "wv", "w1", "w3"], 0.02)
    spread |= {"tok_embeddings": 0.02 if model is TIED else 1.0, "output": 280**-0.5}
    for name, value in found.items():
        *path, module, _ = name.split(".")
        if module in ("wo", "w2"):
            spread[module] = 0.02 / (2 * (int(path[1]) + 1)) ** 0.5
        if module.endswith("norm"):
            assert value.eq(1).all(), name
        else:
            assert value.std().item() == pytest.approx(spread[module], rel=0.02), name
            assert value.mean().abs() < 0.05 * value.std(), name
            assert not torch.equal(value, other[name]), name
