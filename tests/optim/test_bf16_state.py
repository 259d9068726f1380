"""Optimizer state in bfloat16: half the memory, an unbiased mean, the same bits on every mesh and
after a resume.
"""

import hashlib

import pytest
import torch
from torch._dynamo.utils import counters

from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import TINY, full, job, run_to_end, trainer
from tests.runs import losses
from titanlite.config.layout import Layout
from titanlite.optim import TrainedParam, bf16_state, build_optimizer, optimizer_bytes
from titanlite.optim.bf16_state import BF16State, chunk_by_numel, random_bits, round_at_random
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.planner.counting import Counting
from titanlite.train.trainer import Trainer

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
    many, other = (
        random_bits((slice(0, 512), slice(0, 512)), seed, torch.device("cpu")) for seed in (9, 10)
    )
    for bit in range(32):
        ones = many >> bit & 1
        independent = [
            torch.zeros_like(ones),
            other >> bit & 1,
            ones.roll(1, 0),
            ones.roll(1, 1),
            many >> (bit + 7) % 32 & 1,
        ]
        for bits in independent:
            assert abs((ones ^ bits).double().mean() - 0.5) < 0.005, bit


def optimizer_state(run: Trainer) -> dict[str, torch.Tensor]:
    """Return its tensors; they have the size that is logged at the start."""
    tensors = run.state.tensors()
    found = {name: tensors[name] for name in tensors if name.startswith("optimizer.")}
    size = sum(local_part(tensor).nbytes for tensor in found.values())
    assert size == optimizer_bytes(run.runner.trained, run.job.config)
    return found


def states_after_steps(argv: list[str], folder: str) -> dict[str, str]:
    """Return hashes of the optimizer state after steps whose gradients depend only on the
    parameter's name.
    """
    run = trainer([*argv, FOREACH], folder)
    for step in range(1, 4):
        for group in run.runner.optimizer.param_groups:
            group["training_step"] = step
        for item in run.runner.trained:
            generator = torch.Generator().manual_seed(
                int(hashlib.md5(item.name.encode()).hexdigest()[:8], 16) + step
            )
            full_gradient = torch.randn(item.parameter.shape, generator=generator)
            gradient = torch.zeros_like(item.parameter)
            local_part(gradient).copy_(full_gradient[box_of(item.parameter)])
            item.parameter.grad = gradient
        run.runner.optimizer.step()
    tensors = optimizer_state(run)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    return {
        name: hashlib.sha256(full(tensor).float().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


@pytest.mark.long
def test_state_has_the_same_bits_on_every_mesh(pool, tmp_path):
    argv = [*TINY, "--model.overrides.n_kv_heads=2", NARROW]
    expected = pool.run(states_after_steps, argv, str(tmp_path), world=1)
    for world, options in ((3, []), (2, ["--parallelism.tensor_parallel_degree=2"])):
        found = pool.run(states_after_steps, [*argv, *options], str(tmp_path), world=world)
        assert found == expected * world


def test_training_is_close_to_that_with_float32_state(pool, tmp_path):
    argv = [*TINY, "--training.steps=20", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=2"]
    found = []
    for name, options in (("wide", []), ("narrow", [NARROW])):
        pool.run(run_to_end, [*argv, *options], str(tmp_path / name), world=1)
        found.append([*losses(tmp_path / name).values()])
    wide, narrow = found
    assert wide != narrow, "the state must be in bfloat16"
    assert narrow == pytest.approx(wide, abs=0.02)
    assert wide[0] - wide[-1] > 0.1


def test_small_changes_accumulate():
    """A running mean with a constant gradient of 1: its last changes are below 1/512 of it, and
    rounding to nearest would drop them."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = BF16State(torch.optim.AdamW([parameter], lr=0.0, betas=(0.99, 0.99)), seed=0)
    for step in range(1, 251):
        parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["training_step"] = step
        optimizer.step()
    mean = optimizer.state[parameter]["exp_avg"].double().mean().item()
    assert mean == pytest.approx(1 - 0.99**250, rel=2e-3)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
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
    means = [optimizer.state[parameter][name].double() for name in ("exp_avg", "exp_avg_sq")]
    assert [len(mean.unique()) for mean in means] == [2, 2]
    assert abs(torch.corrcoef(torch.stack(means))[0, 1]) < 0.02


def test_the_state_of_a_few_parameters_is_in_float32_at_a_time(monkeypatch):
    parameters = [torch.nn.Parameter(torch.zeros(100, 10)) for _ in range(8)]
    trained = [TrainedParam(str(n), p, "column", True, True) for n, p in enumerate(parameters)]
    in_chunks = lambda parameters: chunk_by_numel(parameters, 1000)  # noqa: E731
    monkeypatch.setattr(bf16_state, "chunk_by_numel", in_chunks)
    optimizer = build_optimizer(trained, job([*TINY, NARROW, FOREACH], 1).config)
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with Counting(Layout()) as counted:
        counted.mark("parameters", [*parameters, *gradients])
        before = counted.alive
        optimizer.step()
        half_of_float32 = 2 * 2 * 8 * 1000
        assert counted.alive - before == pytest.approx(half_of_float32, abs=300)
        before = counted.alive
        counted.restart()
        optimizer.step()
        more = counted.recording().peak - before
        assert more < 10 * 4 * 1000, "float32 state of one parameter in eight"


@pytest.mark.long
def test_another_state_dtype_is_converted_and_logged(pool, tmp_path):
    pool.run(run_until, SAVING, str(tmp_path), 2, world=2)
    for begun, options, change in (
        (2, [NARROW], '"like_parameters" -> "bfloat16"'),
        (3, [], '"bfloat16" -> "like_parameters"'),
    ):
        argv = [*SAVING, *options, f"--training.steps={begun + 1}"]
        part = pool.run(run_until, argv, str(tmp_path), world=2)[0]
        assert part["begun"] == begun
        assert any(f"optimizer.state_dtype {change}" in line for line in part["log"])
