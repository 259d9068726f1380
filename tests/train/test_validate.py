"""Validation equals one process's value however the set divides, and never hangs."""

import pytest

from tests.jobs import PARROT, TINY, trainer
from tests.lanes import sample
from tests.train.test_trainer import records


def losses(argv: list[str], folder: str) -> None:
    trainer(argv, folder).train()


@pytest.mark.parametrize("steps", sample([-1, 2], -1))
def test_a_ragged_set_gives_the_value_of_one_process(pool, tmp_path, steps):
    """Seven windows: they divide by no number of ranks here; some ranks have none at all in the last batch."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    argv = [*TINY, "--training.steps=2", "--training.global_batch_size=12", "--training.local_batch_size=3"]
    argv += ["--validation.enable", "--validation.dataset=text", f"--validation.dataset_path={tmp_path / 'text'}"]
    argv += ["--validation.freq=1", "--validation.seq_len=32", f"--validation.steps={steps}"]
    found = {}
    for world, local in {1: 4, 2: 2, 4: 1}.items():
        folder = tmp_path / str(world)
        pool.run(losses, [*argv, f"--validation.local_batch_size={local}"], str(folder), world=world)
        found[world] = [r["validation_loss"] for r in records(folder) if "validation_loss" in r]
    assert len(found[1]) == 2
    assert found[2] == pytest.approx(found[1], rel=1e-6)
    assert found[4] == pytest.approx(found[1], rel=1e-6)


def test_validation_changes_nothing_of_the_training(pool, tmp_path):
    """With dropout on: a model left in evaluation mode would train without it."""
    plain, validated = tmp_path / "plain", tmp_path / "validated"
    pool.run(losses, PARROT, str(plain), world=2)
    settings = ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
    pool.run(losses, [*PARROT, *settings], str(validated), world=2)
    trained = [[r["loss"] for r in records(folder) if "loss" in r] for folder in (plain, validated)]
    assert trained[0] == trained[1]
