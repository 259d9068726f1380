"""The training loop: the same numbers on every mesh and in every run, and all ranks stop at the
same step.
"""

import copy
import gc
import json
import logging
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.jobs import PARROT, TINY, run_to_end, trainer, weights
from tests.lanes import sample
from tests.models.test_gpt2 import GPT2
from titanlite.data.windows import Windows
from titanlite.models.common.feed_forward import SwiGLU
from titanlite.runtime.distributed import WATCH_SECONDS
from titanlite.train.guard import NonFinite
from titanlite.train.report import loss_over_ranks
from titanlite.verify.pool import RankFailed


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def logged(pool, folder, world: int, *argv: str) -> list[tuple[float, float]]:
    pool.run(run_to_end, [*TINY, "--training.steps=5", *argv], str(folder), world=world)
    return [(r["loss"], r["grad_norm"]) for r in records(folder)]


@pytest.mark.parametrize("optimizer", sample(["AdamW", "SGD"], "SGD"))
def test_losses_and_norms_equal_those_of_one_process(pool, tmp_path, optimizer):
    """Losses would not show a wrong scale of the gradients, which AdamW and clipping hide; norms
    do.
    """
    choice = f"--optimizer.name={optimizer}"
    expected = logged(pool, tmp_path / "1", 1, choice, "--training.local_batch_size=8")
    for world, sizes in {2: (4, 8), 4: (1, 8), 3: (1, 6)}.items():
        local, total = sizes
        if total == 6:
            expected = logged(pool, tmp_path / "1of6", 1, choice, "--training.local_batch_size=6")
        batch = f"--training.local_batch_size={local}", f"--training.global_batch_size={total}"
        assert logged(pool, tmp_path / str(world), world, choice, *batch) == [
            (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
            for loss, norm in expected
        ]


def run_beside_a_plain_loop(folder: str, optimizer: str) -> tuple[list[float], list[float]]:
    """Return losses and norms of the same steps written by hand, and of the trainer."""
    argv = [
        *TINY,
        "--training.steps=5",
        f"--optimizer.name={optimizer}",
        "--lr_scheduler.warmup_steps=0",
    ]
    run = trainer(argv, folder)
    twin = copy.deepcopy(run.parts[0])
    data = run.data
    assert isinstance(data, Windows)
    run.train()
    decayed = [p for p in twin.parameters() if p.dim() > 1]
    exempt = [p for p in twin.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
    plain = (
        torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), eps=1e-8)
        if optimizer == "AdamW"
        else torch.optim.SGD(groups, lr=5e-3)
    )
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
    return numbers, [number for r in records(folder) for number in (r["loss"], r["grad_norm"])]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_run_equals_the_same_steps_written_by_hand(pool, tmp_path, optimizer):
    (numbers,) = pool.run(run_beside_a_plain_loop, str(tmp_path), optimizer, world=1)
    by_hand, by_trainer = numbers
    assert by_trainer == pytest.approx(by_hand, rel=1e-5)


def test_two_runs_of_one_config_are_bit_equal_even_with_dropout(pool, tmp_path):
    runs = [
        pool.run(run_to_end, PARROT, str(tmp_path / str(i)), world=2)[0]["weights"]
        for i in range(2)
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    without = [*PARROT, "--model.overrides.dropout=0.0"]
    no_dropout = pool.run(run_to_end, without, str(tmp_path / "other"), world=2)[0]["weights"]
    assert not torch.equal(runs[0]["output.weight"], no_dropout["output.weight"]), (
        "dropout must have been on"
    )


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


def test_ranks_of_a_tensor_parallel_group_drop_different_tokens(pool, tmp_path):
    """Each has a slice of the sequence; the same mask on all would drop the same places of every
    slice.
    """
    argv = [
        *GPT2,
        "--model.overrides.n_layers=1",
        "--training.steps=1",
        "--parallelism.tensor_parallel_degree=2",
    ]
    first, second = pool.run(
        dropout_masks, str(tmp_path), argv, "layers.0.feed_forward.dropout", world=2
    )
    assert first.keys() == second.keys() and first
    assert not any(torch.equal(mask, second[key]) for key, mask in first.items())


def train_with_nan(argv: list[str], folder: str, rank: int, step: int) -> tuple[int, str]:
    """Train with a loss that is NaN on one rank at one step; return the step it stopped at and the
    message.
    """
    run = trainer(argv, folder)
    original = run.runner.forward_backward

    def forward_backward(at_step, micro_batches, valid_tokens):
        loss = original(at_step, micro_batches, valid_tokens)
        return loss * float("nan") if (run.rank_info.rank, at_step) == (rank, step) else loss

    run.runner.forward_backward = forward_backward  # type: ignore[method-assign,assignment]
    try:
        run.train()
    except NonFinite as error:
        return run.step, str(error)
    return run.step, "no stop"


def test_all_ranks_stop_at_the_same_step_and_name_the_bad_one(pool, tmp_path):
    argv = [*TINY, "--training.steps=9", "--metrics.log_freq=9"]
    stops = pool.run(train_with_nan, argv, str(tmp_path), 1, 3, world=3)
    assert (
        stops
        == [(4, "at step 3 the loss of rank 1 was not finite; nothing was saved after it")] * 3
    )


def test_a_nan_in_the_last_steps_stops_the_run(pool, tmp_path):
    for step in (2, 3):
        stops = pool.run(train_with_nan, TINY, str(tmp_path), 0, step, world=2)
        assert [message.split(";")[0] for _, message in stops] == [
            f"at step {step} the loss of rank 0 was not finite"
        ] * 2


def train_with_an_infinite_norm(folder: str, step: int) -> str:
    """Train with infinite gradients at one step, while its loss is finite; return the message."""
    run = trainer([*TINY, "--training.steps=9", "--metrics.log_freq=9"], folder)
    original = run.runner.clip_gradients

    def clip_gradients() -> torch.Tensor:
        for parameter in run.runner.parameters if run.step == step else ():
            parameter.grad.fill_(float("inf"))
        return original()

    run.runner.clip_gradients = clip_gradients  # type: ignore[method-assign]
    with pytest.raises(NonFinite) as caught:
        run.train()
    return str(caught.value)


def test_an_infinite_gradient_norm_stops_the_run_although_every_loss_was_finite(pool, tmp_path):
    message = "at step 3 the gradient norm was not finite; nothing was saved after it"
    assert pool.run(train_with_an_infinite_norm, str(tmp_path), 3, world=2) == [message] * 2


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
    return rates, loss_over_ranks(loss, torch.tensor(valid), run.mesh.loss)


def test_the_log_has_the_step_s_own_rate_tokens_per_device_and_the_largest_mean_of_a_rank(
    pool, tmp_path
):
    found = pool.run(logged_numbers, str(tmp_path), world=3)
    rates, losses = found[0]
    logged_steps = records(tmp_path)
    assert [record["lr"] for record in logged_steps] == rates and len(set(rates)) == 3
    for record in logged_steps:
        assert record["tps"] * record["step_seconds"] == pytest.approx(2 * 16), (
            "one rank's tokens in a step"
        )
    assert losses == (11 / 4, 5.0) and all(others == losses for _, others in found)


def collection_steps(folder: str) -> list[int]:
    """Return the steps at which garbage of all generations was collected."""
    run = trainer([*TINY, "--training.steps=10", "--training.gc_freq=4"], folder)
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


def notices_of_a_run_without_a_weight(folder: str, argv: list[str]) -> list[str]:
    log, lines = logging.getLogger("a run"), list[str]()
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)

    def forward(layer: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        return layer.w2(layer.w1(x))

    with patch.object(SwiGLU, "forward", forward):
        trainer([*TINY, *argv], folder, log).train()
    return [line for line in lines if "no gradient" in line]


@pytest.mark.parametrize("argv", [[], ["--activation_checkpoint.mode=full"]])
def test_parameters_that_forward_does_not_use_are_named_in_the_first_step(pool, tmp_path, argv):
    for lines in pool.run(notices_of_a_run_without_a_weight, str(tmp_path), argv, world=2):
        names = "".join(f"\n  layers.{block}.feed_forward.w3.weight" for block in (0, 1))
        assert lines == [f"forward does not use these, which get no gradient:{names}"]


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(pool, tmp_path):
    assert pool.run(collection_steps, str(tmp_path), world=2) == [[4, 8], [4, 8]]


def other_data_on_rank_1(folder: str, texts: str) -> None:
    import torch.distributed as dist

    path = f"{texts}/{dist.get_rank()}"
    trainer([*TINY, "--training.dataset=text", f"--training.dataset_path={path}"], folder)


def test_ranks_with_different_data_stop(pool, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_text("abc" * (100 + rank))
    with pytest.raises(
        RankFailed, match=r"the data of \[training\] differs between ranks: rank 0 has"
    ):
        pool.run(other_data_on_rank_1, str(tmp_path / "out"), str(tmp_path), world=2)


def other_torch_on_rank_1(folder: str) -> None:
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.{dist.get_rank()}")
        trainer(TINY, folder)


def test_ranks_with_different_software_stop(pool, tmp_path):
    with pytest.raises(
        RankFailed,
        match=r"the software differs between ranks: .* torch 2.0, rank 1 on host1 has .* torch 2.1",
    ):
        pool.run(other_torch_on_rank_1, str(tmp_path), world=2)


def nondeterministic(folder: str) -> str:
    trainer([*TINY, "--debug.deterministic"], folder)
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return "no error"


def test_deterministic_refuses_nondeterministic_operations(pool, tmp_path):
    (message,) = pool.run(nondeterministic, str(tmp_path), world=1)
    assert "does not have a deterministic implementation" in message


def seeds_drawn(folder: str) -> int:
    return trainer([*TINY, "--debug.seed=none"], folder).seed


def test_without_a_seed_rank_0_draws_one_for_all(pool, tmp_path):
    first, again = (pool.run(seeds_drawn, str(tmp_path), world=3) for _ in range(2))
    assert len(set(first)) == len(set(again)) == 1 and first != again


def timeouts_before_and_after_the_first_step(folder: str) -> list[float]:
    import torch.distributed as dist

    run = trainer([*TINY, "--comm.train_timeout_seconds=7"], folder)

    def seconds(group) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    groups = [dist.group.WORLD, run.mesh.loss, run.mesh.fsdp.get_group()]
    before = [seconds(group) for group in groups]
    run.train()
    assert all(value > 7 + WATCH_SECONDS for value in before)
    return [seconds(group) for group in groups]


def test_every_group_has_the_training_timeout_after_the_first_step(pool, tmp_path):
    assert (
        pool.run(timeouts_before_and_after_the_first_step, str(tmp_path), world=2)
        == [[7.0 + WATCH_SECONDS] * 3] * 2
    )


def sampled(folder: str, local_batch_size: int) -> str:
    lines: list[str] = []
    sample = ["--generate.at_end", "--generate.prompt=def", "--generate.tokens=20"]
    run = trainer([*TINY, *sample, f"--training.local_batch_size={local_batch_size}"], folder)
    run.train()
    run.log.info = lambda line: lines.append(str(line))  # type: ignore[method-assign,assignment]
    run.show_sample()
    return "\n".join(lines)


def test_generated_text_is_the_same_on_every_mesh(pool, tmp_path):
    (expected,), pair = (pool.run(sampled, str(tmp_path), 4 // n, world=n) for n in (1, 2))
    assert pair == [expected, expected]
    assert "    def" in expected and not any(ord(c) < 32 and c != "\n" for c in expected)


def dtypes_and_weights(folder: str) -> dict:
    run = trainer([*TINY, "--training.mixed_precision_param=bfloat16"], folder)
    run.train()
    return {"types": {str(p.dtype) for p in run.parts[0].parameters()}, "weights": weights(run)}


def test_mixed_precision_keeps_float32_weights_and_trains_near_float32(pool, tmp_path):
    mixed = pool.run(dtypes_and_weights, str(tmp_path / "a"), world=2)[0]
    exact = pool.run(run_to_end, TINY, str(tmp_path / "b"), world=2)[0]["weights"]
    assert mixed["types"] == {"torch.float32"}
    worst = max((mixed["weights"][n] - exact[n]).abs().max().item() for n in exact)
    assert 0 < worst < 5e-3, "must compute in bfloat16, and stay close"
