"""The validation loss equals that of one process however the set divides, and no rank hangs."""

import pytest

from tests.checkpoint.saved import keeping_log
from tests.jobs import FLOAT64, PARROT, TINY, run_to_end, trainer, validated
from tests.lanes import sample
from tests.runs import losses, records


@pytest.mark.parametrize("steps", sample([-1, 2, 9], 2))
def test_steps_of_a_ragged_set_give_one_value_on_any_ranks(pool, tmp_path, steps):
    """Seven windows divide by no number of ranks; some ranks have none in the last batch, or none
    at all.
    """
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    argv = [*TINY, *FLOAT64, "--training.steps=2", "--training.global_batch_size=12"]
    argv += ["--training.local_batch_size=3", "--validation.local_batch_size=3"]
    argv += ["--validation.enable", f"--validation.dataset_path={tmp_path / 'text'}"]
    argv += ["--validation.freq=1", "--validation.seq_len=32", f"--validation.steps={steps}"]
    found = []
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        pool.run(run_to_end, argv, str(folder), world=world)
        found.append([r["validation_loss"] for r in records(folder) if "validation_loss" in r])
    assert len(found[0]) == 2
    assert found[1:] == [pytest.approx(found[0], rel=1e-9)] * 2


def validation_and_sample(folder: str, dropout: float) -> tuple[float, list[str]]:
    argv = [*PARROT, f"--model.overrides.dropout={dropout}", "--validation.enable"]
    log, lines = keeping_log()
    run = trainer([*argv, "--validation.steps=3", "--generate.temperature=0.0"], folder, log)
    loss = validated(run)
    run.show_sample()
    return loss, lines[-1:]


def test_dropout_is_off_in_validation_and_generation(pool, tmp_path):
    found = [
        pool.run(validation_and_sample, str(tmp_path), dropout, world=1)[0]
        for dropout in (0.0, 0.5)
    ]
    assert found[0] == found[1]
    (text,) = found[0][1]
    assert not [character for character in text if ord(character) < 32 and character != "\n"]


def test_validation_does_not_change_training(pool, tmp_path):
    """With dropout on: a model left in evaluation mode would train without it."""
    settings = ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
    found = []
    for name, more in (("plain", []), ("validated", settings)):
        pool.run(run_to_end, [*PARROT, *more], str(tmp_path / name), world=2)
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]
