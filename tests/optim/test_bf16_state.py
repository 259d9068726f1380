"""Optimizer state in bfloat16: half the memory, an unbiased mean, the same bits on every mesh and
after a resume.
"""

import hashlib
import json
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import QUIET, TINY, full, job, run_to_end, trainer
from titanlite.layout import Layout
from titanlite.optim import TrainedParam, bf16_state, build_optimizer, optimizer_bytes
from titanlite.optim.bf16_state import BF16State, chunk_by_numel, random_bits, round_at_random
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.planner.counting import Counting

NARROW = "--optimizer.state_dtype=bfloat16"
FOREACH = "--optimizer.implementation=foreach"


def test_rounding_picks_a_neighbor_and_is_unbiased():
    values = torch.tensor([1.0, 1.001, -1.001, 3.14159, 1e-30, -2.5e20, 0.0])
    draws = 20000
    bits = random_bits((slice(0, draws), slice(0, len(values))), 5, values.device)
    rounded = round_at_random(values.expand(draws, -1).contiguous(), bits)
    assert rounded.dtype == torch.bfloat16
    for value, column in zip(values, rounded.double().unbind(1), strict=True):
        step = abs(value.item()) / 128
        assert len(column.unique()) == (1 if value == value.bfloat16() else 2)
        assert (column - value).abs().max() <= step
        assert (column.mean() - value.double()).abs() <= 4 * step / draws**0.5, value
    not_finite = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(
        round_at_random(not_finite, torch.full((3,), -1, dtype=torch.int32)).isfinite(),
        torch.zeros(3).bool(),
    )


def test_random_bits_depend_only_on_the_index_in_the_full_tensor():
    whole = random_bits((slice(0, 60), slice(0, 40)), 9, torch.device("cpu"))
    part = random_bits((slice(7, 20), slice(11, 40)), 9, torch.device("cpu"))
    assert torch.equal(part, whole[7:20, 11:40])
    many = random_bits((slice(0, 512), slice(0, 512)), 9, torch.device("cpu"))
    other = random_bits((slice(0, 512), slice(0, 512)), 10, torch.device("cpu"))
    for bit in range(32):
        ones = many >> bit & 1
        independent = [
            ones.new_zeros(()),
            other >> bit & 1,
            ones.roll(1, 0),
            ones.roll(1, 1),
            many >> (bit + 7) % 32 & 1,
        ]
        for bits in independent:
            assert abs((ones ^ bits).double().mean() - 0.5) < 0.005, bit


def states_after_steps(argv: list[str], folder: str) -> dict[str, str]:
    """Return hashes of the optimizer state after steps whose gradients depend only on the
    parameter's name.
    """
    run = trainer([*argv, FOREACH], folder)
    for step in range(1, 4):
        for group in run.runner.optimizer.param_groups:
            group["training_step"] = step
        for item in run.trained:
            generator = torch.Generator().manual_seed(
                int(hashlib.md5(item.name.encode()).hexdigest()[:8], 16) + step
            )
            full_gradient = torch.randn(item.parameter.shape, generator=generator)
            gradient = torch.zeros_like(item.parameter)
            local_part(gradient).copy_(full_gradient[box_of(item.parameter)])
            item.parameter.grad = gradient
        run.runner.optimizer.step()
    tensors = {
        name: tensor
        for name, tensor in run.state.tensors().items()
        if name.startswith("optimizer.")
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    size = sum(local_part(tensor).nbytes for tensor in tensors.values())
    assert size == optimizer_bytes(run.trained, run.job.config), "the size logged at start"
    return {
        name: hashlib.sha256(full(t).float().numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


def test_state_has_the_same_bits_on_every_mesh(pool, tmp_path):
    argv = [*TINY, "--model.overrides.n_kv_heads=2", NARROW]
    expected = pool.run(states_after_steps, argv, str(tmp_path), world=1)[0]
    for world, options in ((3, []), (4, ["--parallelism.tensor_parallel_degree=2"])):
        assert (
            pool.run(states_after_steps, [*argv, *options], str(tmp_path), world=world)
            == [expected] * world
        )


@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW", "float32"), ("AdamW", "bfloat16"), ("Muon", "float32")]
)
def test_training_is_close_to_that_with_float32_state(pool, tmp_path, name, dtype):
    (tmp_path / "text.txt").write_text(
        "abcdefgh" * 100
    )  # the same in every Python version, unlike the default data set
    argv = [*TINY, "--training.dataset=text", f"--training.dataset_path={tmp_path / 'text.txt'}"]
    argv += ["--training.steps=20", f"--optimizer.name={name}", f"--training.dtype={dtype}"]
    losses = []
    for options in ([], [NARROW]):
        folder = tmp_path / str(len(options))
        pool.run(run_to_end, [*argv, *options, "--metrics.log_freq=1"], str(folder), world=1)
        losses.append(
            [
                json.loads(line)["loss"]
                for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
        )
    assert losses[0] != losses[1], "the state must be in bfloat16"
    assert losses[1] == pytest.approx(losses[0], abs=0.02) and losses[0][0] - losses[0][-1] > 0.1


def test_small_changes_accumulate():
    """A running mean with a constant gradient of 1: its last changes are below 1/256 of it, and
    rounding to nearest would drop them."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = BF16State(torch.optim.AdamW([parameter], lr=0.0, betas=(0.999, 0.999)), seed=0)
    for step in range(1, 2001):
        parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["training_step"] = step
        optimizer.step()
    mean = optimizer.state[parameter]["exp_avg"].double().mean().item()
    assert mean == pytest.approx(1 - 0.999**2000, rel=2e-3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_step_rounds_to_the_same_bits_by_the_same_graphs_for_all_matrices(backend):
    """A graph for two tensors that share bits, and one for a third; the order of tensors stays."""
    counters.clear()
    torch.compiler.reset()
    states = []
    for compiled in ("", backend):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(rows, 24)) for rows in (8, 40, 7)]
        named = [(f"p{number}", each) for number, each in enumerate(parameters)]
        optimizer = BF16State(torch.optim.AdamW(named, amsgrad=True), 3, compiled)
        # The second of two shards
        optimizer._boxes[parameters[1]] = slice(40, 80), slice(0, 24)
        for step in range(1, 4):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.param_groups[0]["training_step"] = step
            optimizer.step()
        states.append([value for p in parameters for value in optimizer.state[p].values()])
        kept = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        assert [*optimizer.state[parameters[0]]] == kept
    assert all(map(torch.equal, *states))
    assert counters["stats"]["unique_graphs"] == 2


def test_the_two_running_means_are_rounded_by_independent_bits():
    """With equal betas and a gradient of one both means are the same number: equal bits would round
    them alike.
    """
    parameter = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = BF16State(torch.optim.AdamW([parameter], lr=0.0, betas=(0.9, 0.9)), seed=0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    means = torch.stack(
        [optimizer.state[parameter][name].double() for name in ("exp_avg", "exp_avg_sq")]
    )
    assert [len(mean.unique()) for mean in means] == [2, 2] and abs(
        torch.corrcoef(means)[0, 1]
    ) < 0.02


def test_the_state_of_a_few_parameters_is_in_float32_at_a_time(monkeypatch):
    parameters = [torch.nn.Parameter(torch.zeros(100, 10)) for _ in range(8)]
    assert [*chunk_by_numel(parameters, 2500)] == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert [*chunk_by_numel(parameters, 10)] == [slice(i, i + 1) for i in range(8)] and not [
        *chunk_by_numel([])
    ]
    trained = [TrainedParam(str(n), p, "column", True, True) for n, p in enumerate(parameters)]
    monkeypatch.setattr(
        bf16_state, "chunk_by_numel", lambda parameters: chunk_by_numel(parameters, 1000)
    )
    optimizer = build_optimizer(trained, job([*TINY, NARROW, FOREACH], 1).config)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Counting(Layout()) as counted:
        counted.mark(
            "parameters", [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        )
        before = counted.alive
        optimizer.step()
        state = 2 * 2 * 8 * 1000
        assert counted.alive - before == pytest.approx(state, abs=300), (
            "half the size of float32 state"
        )
        before = counted.alive
        counted.restart()
        optimizer.step()
        more = counted.recording().peak - before
        assert more < 10 * 4 * 1000, "float32 state of one parameter in eight"


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(pool, tmp_path):
    argv = [*SAVING, "--optimizer.name=Muon", NARROW, "--training.steps=4"]
    uninterrupted = pool.run(run_until, argv, str(tmp_path / "straight"), world=2)
    pool.run(run_until, argv, str(tmp_path / "cut"), 2, world=2)
    resumed = pool.run(run_until, argv, str(tmp_path / "cut"), world=2)
    assert resumed[0]["begun"] == 2 and [part["state"] for part in resumed] == [
        part["state"] for part in uninterrupted
    ]


@pytest.mark.long
def test_another_state_dtype_is_converted_and_logged(pool, tmp_path):
    pool.run(run_until, SAVING, str(tmp_path), 2, world=2)
    for argv, message in (([NARROW], '"float32" -> "bfloat16"'), ([], '"bfloat16" -> "float32"')):
        steps = f"--training.steps={3 + (not argv)}"
        part: dict[str, Any] = pool.run(run_until, [*SAVING, *argv, steps], str(tmp_path), world=2)[
            0
        ]
        assert part["begun"] == (2 if argv else 3)
        assert any(
            "new values apply" in line and f"optimizer.state_dtype {message}" in line
            for line in part["log"]
        )


def test_state_dtype_is_refused_for_an_optimizer_without_state():
    from titanlite.config.load import ConfigError

    with pytest.raises(ConfigError, match="optimizer.state_dtype.*\n?.*SGD does not use this key"):
        job([*QUIET, "--optimizer.name=SGD", NARROW], 1)
