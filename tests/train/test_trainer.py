"""The training loop: its numbers are those of the same steps written by hand, all ranks stop at the
same step, and validation has one value on any ranks.
"""

import copy
import gc
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saved import SAVING, steps_in
from tests.jobs import FLOAT64, PARROT, TINY, keeping_log, run_to_end, trainer, validated
from tests.lanes import sample
from tests.messages import refused, says
from tests.optim.test_update import poison
from tests.parallel.rows import GPT2
from tests.runs import losses, records
from titanlite.data.windows import Windows
from titanlite.models.common.feed_forward import SwiGLU
from titanlite.observe import progress
from titanlite.train.guard import NonFinite
from titanlite.train.report import loss_over_ranks
from titanlite.verify.pool import RankFailed

RARELY_LOGGED = [*TINY, "--training.steps=9", "--metrics.log_freq=9"]


def run_beside_a_plain_loop(folder: str) -> tuple[list[float], list[float]]:
    """Return losses and norms of the same steps written by hand, and of the trainer."""
    argv = [*TINY, "--training.steps=5", "--lr_scheduler.warmup_steps=0"]
    run = trainer(argv, folder)
    twin = copy.deepcopy(run.parts[0])
    data = run.data.training
    assert isinstance(data, Windows)
    run.train()
    decayed = [p for p in twin.parameters() if p.dim() > 1]
    exempt = [p for p in twin.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    numbers: list[float] = []
    for step in range(5):
        windows = torch.stack([torch.as_tensor(data[2 * step + i]) for i in range(2)])
        logits = twin(windows[:, 0])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1].flatten())
        plain.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for group in plain.param_groups:
            group["lr"] = 5e-3 * (1 - step / 5)
        plain.step()
        numbers += [loss.item(), norm.item()]
    logged = records(Path(folder))
    return numbers, [record[name] for record in logged for name in ("loss", "grad_norm")]


def test_a_run_equals_the_same_steps_written_by_hand(pool, tmp_path):
    ((by_hand, by_trainer),) = pool.run(run_beside_a_plain_loop, str(tmp_path), world=1)
    assert by_trainer == pytest.approx(by_hand, rel=1e-5)


def dropout_masks(folder: str, argv: list[str], module: str) -> dict[tuple[int, int], torch.Tensor]:
    """Return the dropout masks by step and micro-batch."""
    run = trainer([*argv, "--model.overrides.dropout=0.5"], folder)
    masks: dict[tuple[int, int], torch.Tensor] = {}
    torch.manual_seed(torch.initial_seed() + 1)  # the generator's earlier state must not matter

    def keep(module, inputs, output):
        masks[run.step, len([k for k in masks if k[0] == run.step])] = (output != 0).clone()

    run.parts[0].get_submodule(module).register_forward_hook(keep)
    run.train()
    return masks


def test_dropout_differs_between_steps_ranks_and_seeds_without_saved_state(pool, tmp_path):
    def masks_of_ranks(argv: list[str]) -> list[dict[tuple[int, int], torch.Tensor]]:
        return pool.run(dropout_masks, str(tmp_path), argv, "layers.0.dropout", world=2)

    first, second = masks_of_ranks(PARROT)
    again, _ = masks_of_ranks(PARROT)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other_seed, _ = masks_of_ranks([*PARROT, "--debug.seed=1"])
    masks = [*first.values(), *second.values(), *other_seed.values()]
    for i, mask in enumerate(masks):
        assert all(not torch.equal(mask, other) for other in masks[i + 1 :])


@pytest.mark.long
def test_ranks_of_a_tensor_parallel_group_drop_different_tokens(pool, tmp_path):
    """Each has a slice of the sequence; the same mask on all would drop the same places of every
    slice.
    """
    argv = [*GPT2, "--model.overrides.n_layers=1", "--training.steps=1"]
    argv.append("--parallelism.tensor_parallel_degree=2")
    module = "layers.0.feed_forward.dropout"
    first, second = pool.run(dropout_masks, str(tmp_path), argv, module, world=2)
    assert first.keys() == second.keys() and first
    assert not any(torch.equal(mask, second[key]) for key, mask in first.items())


def train_poisoned(
    argv: list[str], folder: str, rank: int, step: int, factor: float
) -> tuple[int, str]:
    """Train with gradients, and by NaN a loss, that are poisoned on one rank at one step; return
    the step it stopped at and the message.
    """
    run = trainer(argv, folder)
    if run.rank_info.rank == rank:
        poison(run, {step: factor})
    try:
        run.train()
    except NonFinite as error:
        return run.step, str(error)
    return run.step, "no stop"


@pytest.mark.parametrize(
    ("argv", "step", "factor", "named", "stops"),
    [
        (RARELY_LOGGED, 3, math.nan, "loss of rank 1 ", 4),
        (RARELY_LOGGED, 3, math.inf, "gradient norm", 4),
        (TINY, 3, math.nan, "loss of rank 1 ", 3),  # the last one
        (SAVING, 2, math.nan, "loss of rank 1 ", 2),
    ],
)
def test_all_ranks_stop_at_the_same_step_that_is_never_saved_and_name_what_was_not_finite(
    pool, tmp_path, argv, step, factor, named, stops
):
    found = pool.run(train_poisoned, argv, str(tmp_path), 1, step, factor, world=2)
    for stopped, message in found:
        assert stopped == stops
        says(message, f"at step {step} ", named)
    assert argv is not SAVING or steps_in(tmp_path) == ["step-1"]


def logged_numbers(folder: str) -> tuple[list[float], tuple[float, float]]:
    """Return the learning rates of the steps, and the losses of three ranks with 3, 1 and no valid
    tokens.
    """
    run = trainer([*TINY, "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=3"], folder)
    rates: list[float] = []
    run.runner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    run.train()
    sum_of_tokens, valid = ((6.0, 3), (5.0, 1), (0.0, 0))[run.rank_info.rank]
    loss = torch.tensor(sum_of_tokens / 4, dtype=torch.float64)
    return rates, loss_over_ranks(loss, torch.tensor(valid), run.runner.context.mesh.loss)


def test_the_log_has_the_step_s_own_rate_tokens_per_device_and_the_largest_mean_of_a_rank(
    pool, tmp_path
):
    found = pool.run(logged_numbers, str(tmp_path), world=3)
    rates, losses = found[0]
    logged = records(tmp_path)
    assert [record["lr"] for record in logged] == rates and len(set(rates)) == 3
    for record in logged:
        tokens = record["tps"] * record["step_seconds"]
        assert tokens == pytest.approx(2 * 16), "of one rank in a step"
    assert losses == (11 / 4, 5.0) and all(others == losses for _, others in found)


def collection_steps(folder: str) -> list[int]:
    """Return the steps at which garbage of all generations was collected."""
    run = trainer([*TINY, "--training.steps=5", "--training.gc_freq=2"], folder)
    steps: list[int] = []

    def note(phase: str, info: dict) -> None:
        if phase == "stop" and info["generation"] == 2:
            steps.append(run.step)

    gc.collect()
    gc.callbacks.append(note)
    try:
        run.train()
    finally:
        gc.callbacks.remove(note)
    return [step for step in steps if step]


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(pool, tmp_path):
    assert pool.run(collection_steps, str(tmp_path), world=2) == [[2, 4], [2, 4]]


def notices_of_a_run_without_a_weight(folder: str, argv: list[str]) -> list[str]:
    log, lines = keeping_log()

    with patch.object(SwiGLU, "forward", lambda layer, x: layer.w2(layer.w1(x))):
        trainer([*TINY, *argv], folder, log).train()
    return [line for line in lines if "no gradient" in line]


@pytest.mark.parametrize("argv", sample([[], ["--activation_checkpoint.mode=full"]], []))
def test_parameters_that_forward_does_not_use_are_named_in_the_first_step(pool, tmp_path, argv):
    for lines in pool.run(notices_of_a_run_without_a_weight, str(tmp_path), argv, world=2):
        _, *names = "".join(lines).split("\n")
        assert names == [f"  layers.{block}.feed_forward.w3.weight" for block in (0, 1)]


def start_with_other_data(folder: str, texts: str) -> None:
    trainer([*TINY, f"--training.dataset_path={texts}/{dist.get_rank()}"], folder)


def test_ranks_with_different_data_stop(pool, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_text("abc" * (100 + rank))
    with refused("[training]", "rank 0", "rank 1", kind=RankFailed):
        pool.run(start_with_other_data, str(tmp_path / "out"), str(tmp_path), world=2)


def put_nondeterministically(folder: str) -> None:
    trainer([*TINY, "--debug.deterministic"], folder)
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_refuses_nondeterministic_operations(pool, tmp_path):
    with refused("put_", "deterministic", kind=RankFailed):
        pool.run(put_nondeterministically, str(tmp_path), world=1)


def seeds_drawn(folder: str) -> int:
    return trainer([*TINY, "--debug.seed=none"], folder).seed


def test_without_a_seed_rank_0_draws_one_for_all(pool, tmp_path):
    first, again = (pool.run(seeds_drawn, str(tmp_path), world=2) for _ in range(2))
    assert len(set(first)) == len(set(again)) == 1 and first != again


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


def run_with_all_progress(argv: list[str], folder: str) -> dict[str, Any]:
    with patch.object(progress, "LINE_SECONDS", 0):
        return run_to_end(argv, folder)


def test_a_validation_is_announced_shows_its_progress_and_counts_in_the_eta(pool, tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    argv = [*TINY, "--training.steps=3", f"--validation.dataset_path={tmp_path / 'a.txt'}"]
    argv += ["--validation.enable", "--validation.local_batch_size=3", "--validation.freq=2"]
    argv += ["--validation.seq_len=32"]
    part = pool.run(run_with_all_progress, argv, str(tmp_path), world=2)[0]
    start = "\n".join(part["start"])
    says(start, "7 windows of 32 tokens in 2 batches", "every 2 steps", "% of the work")
    says(start, "224 tokens", "validation.steps", "validation.freq")
    assert [line for line in part["log"] if "validation: 1 of 2 batches" in line], part["log"]
    steps = [record for record in records(tmp_path) if "loss" in record]
    left = {each["step"]: each["eta_seconds"] / each["step_seconds"] for each in steps}
    assert left[1] > 2 and left[3] > 0, "validations after steps 2 and 3 are to come"


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
