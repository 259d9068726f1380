"""The validation loss equals that of one process however the set divides, and no rank hangs."""

import pytest

from tests.jobs import FLOAT64, PARROT, TINY, trainer
from tests.lanes import sample
from tests.parallel.test_tensor import validation_and_sample
from tests.train.test_trainer import records


def losses(argv: list[str], folder: str) -> None:
    trainer(argv, folder).train()


@pytest.mark.parametrize("steps", sample([-1, 1, 2, 9], 2))
def test_steps_of_a_ragged_set_give_one_value_on_any_ranks(pool, tmp_path, steps):
    """Seven windows divide by no number of ranks; some ranks have none in the last batch, or none
    at all.
    """
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    argv = [
        *TINY,
        *FLOAT64,
        "--training.steps=2",
        "--training.global_batch_size=12",
        "--training.local_batch_size=3",
    ]
    argv += [
        "--validation.enable",
        "--validation.dataset=text",
        f"--validation.dataset_path={tmp_path / 'text'}",
    ]
    argv += ["--validation.freq=1", "--validation.seq_len=32", f"--validation.steps={steps}"]
    losses_by_world = {}
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        pool.run(losses, [*argv, "--validation.local_batch_size=3"], str(folder), world=world)
        losses_by_world[world] = [
            r["validation_loss"] for r in records(folder) if "validation_loss" in r
        ]
    assert len(losses_by_world[1]) == 2
    for world in (2, 4):
        assert losses_by_world[world] == pytest.approx(losses_by_world[1], rel=1e-9)


def test_dropout_is_off_in_validation_and_generation(pool, tmp_path):
    found = [
        pool.run(
            validation_and_sample,
            [*PARROT, f"--model.overrides.dropout={p}"],
            str(tmp_path),
            world=1,
        )[0]
        for p in (0.0, 0.5)
    ]
    assert found[0] == found[1]


def test_validation_does_not_change_training(pool, tmp_path):
    """With dropout on: a model left in evaluation mode would train without it."""
    plain, validated = tmp_path / "plain", tmp_path / "validated"
    pool.run(losses, PARROT, str(plain), world=2)
    settings = ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
    pool.run(losses, [*PARROT, *settings], str(validated), world=2)
    trained = [[r["loss"] for r in records(folder) if "loss" in r] for folder in (plain, validated)]
    assert trained[0] == trained[1]
