"""A bad step leaves no trace: it is skipped on the device, or the run goes back to a checkpoint
from before it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.checkpoint.saved import SAVING, digests, steps_in
from tests.jobs import MOE, TINY, job, keeping_log, trainer
from tests.lanes import sample
from tests.messages import refused, says
from tests.observe.test_sinks import tensorboard
from tests.runs import losses, records, run
from titanlite.config.schema import FaultSection
from titanlite.errors import GIVEN_UP, GivenUp, RunFailed
from titanlite.optim.update import update
from titanlite.parallel.dtensor import local_part
from titanlite.train.guard import BadSteps, Window
from titanlite.train.trainer import Trainer
from titanlite.verify.pool import Pool

SKIP = "--fault.on_nonfinite=skip"
SPIKES = ["--fault.spike_sigma=8.0", "--fault.spike_window=3"]
SKIP_BOTH = [SKIP, *SPIKES, "--fault.on_spike=skip"]
DP2_TP2 = "--parallelism.tensor_parallel_degree=2 --model.overrides.n_kv_heads=2"
FLOAT8 = "--model.overrides.dim=64 --model.overrides.hidden_dim=64 --quantize.linear.float8.enable "
FLOAT8 += "--quantize.linear.float8.emulate"
FLOAT8_SCALES = [
    *FLOAT8.split(),
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
]
CASES = {
    "AdamW": "",
    "foreach": "--optimizer.implementation=foreach",
    "Muon": "--optimizer.name=Muon",
    "bfloat16 state, Muon": "--optimizer.state_dtype=bfloat16 --optimizer.name=Muon",
    "stages": "--parallelism.pipeline_parallel_degree=2",
}


def poison(run: Trainer, factors: dict[int, float]) -> None:
    """Multiply the gradients after this many batches of the data by a factor, whatever the
    number of the step. NaN spoils the loss too.
    """
    forward_backward = run.runner.forward_backward
    gradient_norm = run.runner.gradient_norm

    def factor() -> float:
        return factors.get(1 + run.consumed // run.data.rank_slice.per_step, 1.0)

    def poisoned_loss(*args: Any) -> torch.Tensor:
        loss = forward_backward(*args)
        return loss * math.nan if math.isnan(factor()) else loss

    def norm_of_poisoned() -> torch.Tensor:
        for parameter in run.runner.parameters:
            assert parameter.grad is not None
            local_part(parameter.grad).mul_(factor())
        return gradient_norm()

    run.runner.forward_backward = poisoned_loss  # type: ignore[method-assign]
    run.runner.gradient_norm = norm_of_poisoned  # type: ignore[method-assign]


def changes_of_steps(argv: list[str], folder: str, factors: dict[int, float]) -> list[bool]:
    """Train with poisoned batches; return of each step whether anything of the state changed, bit
    for bit.
    """
    # The first state is of another run, since this makes the optimizer's state
    states = [digests(trainer(argv, folder))]
    run = trainer(argv, folder)
    poison(run, factors)
    update = run.runner.update

    def update_and_keep(*args: Any) -> None:
        update(*args)
        states.append(digests(run))

    run.runner.update = update_and_keep  # type: ignore[method-assign]
    run.train()
    return [after != before for before, after in pairwise(states)]


def require_skips(pool: Pool, argv: list[str], folder: str) -> None:
    """Require that steps which are not finite change no bit; the first one makes the state."""
    factors = {1: math.nan, 3: math.inf, 4: math.nan}
    given = [*argv, SKIP, "--training.steps=5"]
    ranks = pool.run(changes_of_steps, given, folder, factors, world=2)
    assert ranks == [[False, True, False, False, True]] * 2


@pytest.mark.parametrize("case", sample(CASES, "AdamW"))
def test_a_step_that_is_not_finite_changes_no_bit_of_parameters_and_state(pool, tmp_path, case):
    require_skips(pool, [*TINY, *CASES[case].split()], str(tmp_path))


@pytest.mark.long
def test_a_skipped_step_moves_no_router_bias(pool, tmp_path):
    argv = [*MOE, *SKIP_BOTH, "--model.overrides.balance=bias", "--training.steps=6"]
    argv.append("--parallelism.expert_parallel_degree=2")
    ranks = pool.run(changes_of_steps, argv, str(tmp_path), {2: math.nan, 5: 1e4}, world=2)
    assert ranks == [[True, False, True, True, False, True]] * 2


def end_of(
    argv: list[str],
    folder: str,
    factors: dict[int, float],
    without_updates: tuple[int, ...] = (),
    larger_loss: int = 0,
    consumed: int | None = None,
) -> dict[str, Any]:
    """Train with poisoned batches, with steps that leave out their updates, with a batch whose
    loss alone is larger, or from a later position in the data; return the state of the end.
    """
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    begun = run.step
    run.consumed = run.consumed if consumed is None else consumed
    poison(run, factors)
    forward_backward = run.runner.forward_backward
    update = run.runner.update

    def poisoned_loss(*args: Any) -> torch.Tensor:
        batch = 1 + run.consumed // run.data.rank_slice.per_step
        return forward_backward(*args) * (2.0 if batch == larger_loss else 1.0)

    def unless_left_out(step: int, *args: Any) -> None:
        if step in without_updates:
            run.runner.optimizer.zero_grad()
        else:
            update(step, *args)

    run.runner.forward_backward = poisoned_loss  # type: ignore[method-assign]
    run.runner.update = unless_left_out  # type: ignore[method-assign]
    error: Any = None
    try:
        run.train()
    except RunFailed as failed:
        error = failed.code, str(failed)
    return {
        "begun": begun,
        "state": digests(run),
        "log": lines,
        "error": error,
        "guard": run.guard.state_dict(),
        "step": run.step,
        "batches": run.consumed // run.data.rank_slice.per_step,
        "consumed": run.consumed,
        "tokens": run.tokens,
    }


def of(ranks: list[dict[str, Any]], *keys: str) -> list[list[Any]]:
    return [[rank[key] for key in keys] for rank in ranks]


@pytest.mark.parametrize(
    ("world", "more"), sample([(2, ""), (4, DP2_TP2)], (2, ""), nightly=[(4, DP2_TP2)])
)
def test_a_run_that_skips_steps_equals_one_that_never_made_their_updates(
    pool, tmp_path, world, more
):
    """And one without a bad step equals a run in which skipping is off."""
    argv = [*TINY, *more.split(), "--training.steps=7", "--metrics.log_freq=1"]

    def end(name: str, *bad: Any) -> list[dict[str, Any]]:
        options = [] if name.startswith("off") else SKIP_BOTH
        return pool.run(end_of, [*argv, *options], str(tmp_path / name), *bad, world=world)

    plain = end("off", {})
    assert of(end("nothing to skip", {}), "state") == of(plain, "state")
    found = end("skipped", {2: math.nan, 6: 1e4})
    expected = end("off, two updates left out", {}, (2, 6))
    assert of(found, "state") == of(expected, "state") != of(plain, "state")
    skipped = [each for each in records(tmp_path / "skipped") if "skipped" in each]
    assert [(each["step"], each["skipped"], each["bad_norm"] is None) for each in skipped] == [
        (2, 1, True),
        (6, 1, False),
    ]
    lines = [line for line in found[0]["log"] if "skipped" in line]
    for line, step, used in zip(lines, (2, 6), (1, 2), strict=True):
        says(line, f"step {step} ", "norm", f"{used} in 1,000 steps", "fault.skip_budget")
    logged = losses(tmp_path / "skipped")
    good = [logged[step] for step in (4, 5, 7)]
    assert found[0]["guard"]["losses"] == pytest.approx(good, rel=1e-6), "of tensor parallel too"


def test_the_first_of_several_bad_steps_is_named_also_where_only_spikes_are_skipped(pool, tmp_path):
    argv = [*TINY, *SPIKES, "--training.steps=6", "--fault.on_spike=skip"]
    found = pool.run(end_of, argv, str(tmp_path), {3: math.inf, 4: math.inf}, world=2)
    code, error = found[0]["error"]
    assert code == 1
    says(error, "step 3 ", "gradient norm")


ROLLBACK = [
    *SAVING,
    *("--fault.spike_sigma=100", "--fault.spike_window=4", "--fault.on_spike=rollback"),
    *("--checkpoint.interval=2", "--training.steps=7"),
]


@pytest.mark.long
@pytest.mark.parametrize("action", ["warn", "skip", "rollback"])
def test_a_spike_of_the_loss_is_known_a_step_late(pool, tmp_path, action):
    """It is too late to skip its update."""
    argv = [*ROLLBACK, *SPIKES, f"--fault.on_spike={action}"]
    for rank in pool.run(end_of, argv, str(tmp_path), {}, (), 4, world=2):
        (line,) = [line for line in rank["log"] if "its loss" in line]
        assert line.startswith("step 4") and ("is a spike" in line) == (action != "rollback")
        assert (rank["step"], rank["batches"]) == (7, 9 if action == "rollback" else 7)


BACK = {
    "the step after it is taken before it is known": ([], {5: 1e4}),
    "its step is due to be saved, and an earlier one skipped": ([SKIP], {5: math.nan, 6: 1e4}),
    "with scales of float8": (FLOAT8_SCALES, {6: 1e4}),
}


@pytest.mark.parametrize("case", sample(BACK, nightly=[*BACK][-1:]))
def test_a_run_that_goes_back_equals_one_resumed_from_that_checkpoint_with_later_data(
    pool, tmp_path, case
):
    """Its next steps are judged by those that still count."""
    options, factors = BACK[case]
    argv = [*ROLLBACK, *options, "--metrics.enable_tensorboard"]
    found = pool.run(end_of, argv, str(tmp_path / "back"), factors, world=2)
    pool.run(end_of, argv, str(tmp_path / "cut"), {}, world=2)
    later = 6 * found[0]["consumed"] // 9
    argv.append("--checkpoint.load_step=4")
    expected = pool.run(end_of, argv, str(tmp_path / "cut"), {}, (), 0, later, world=2)
    assert of(found, "step", "batches") == [[7, 9]] * 2, "4 to 6 twice"
    assert of(expected, "begun") == [[4]] * 2
    assert of(found, "state", "tokens") == of(expected, "state", "tokens")
    for window in ("norms", "losses"):
        judged_by = [rank["guard"][window] for rank in (*found, *expected)]
        assert judged_by == [judged_by[0]] * 4 and len(judged_by[0]) == 4
    (line,) = [line for line in found[0]["log"] if "rollback" in line]
    says(line, f"step {max(factors)}: ", "norm", "rollback 1", "fault.rollback_budget = 2")
    skips = [step for step, factor in factors.items() if math.isnan(factor)]
    assert found[0]["guard"]["skips"] == skips, "none is forgotten"
    logged = losses(tmp_path / "back")
    assert [*logged] == [*range(1, 8)]
    board = tensorboard(tmp_path / "back/tb")
    assert board["loss_metrics/global_avg_loss"] == pytest.approx(logged)


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "factors", "code"),
    [
        ("--checkpoint.interval=8", {5: 1e4}, 1),  # there is nothing to go back to
        ("--fault.rollback_budget=1", {5: 1e4, 7: 1e4}, GIVEN_UP),
    ],
)
def test_a_run_that_cannot_go_back_ends_on_all_ranks(pool, tmp_path, option, factors, code):
    for rank in pool.run(end_of, [*ROLLBACK, option], str(tmp_path), factors, world=2):
        assert rank["error"][0] == code
        says(rank["error"][1], "step 5")


@pytest.mark.long
def test_the_launcher_returns_the_exit_code_of_a_used_up_budget(tmp_path):
    """The first update makes the weights so large that no gradient is finite from then on."""
    argv = [*TINY, SKIP, "--fault.skip_budget=3", "--optimizer.lr=1e30", "--training.steps=20"]
    argv += ["--checkpoint.enable", "--checkpoint.interval=3", "--lr_scheduler.warmup_steps=0"]
    out = run(argv, tmp_path, ranks=2, code=GIVEN_UP).out
    says(out, "step 5 ", "gradient norm", "4 in 1,000 steps", "fault.skip_budget = 3")
    assert "Traceback" not in out
    assert steps_in(tmp_path)[0] == "step-3", "a step that is skipped changes nothing"


def after_updates(
    kind: type[torch.optim.Optimizer], fused: bool, divisor: float, skipped: float, in_kernel: bool
) -> list[torch.Tensor]:
    """Return values, gradient and state after three updates, with gradients divided before or by
    the update.
    """
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = kind([parameter], lr=1e-2, fused=fused, foreach=not fused)  # type: ignore[call-arg]
    for _ in range(3):
        parameter.grad = torch.randn(1000, generator=generator)
        by = torch.tensor(divisor)
        if not in_kernel:
            parameter.grad.div_(by)
        update(optimizer, by if in_kernel else None, torch.tensor(skipped))
    assert isinstance(parameter.grad, torch.Tensor)
    return [parameter.detach(), parameter.grad, *optimizer.state[parameter].values()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_divided_in_the_kernel_have_the_bits_of_those_divided_before(kind, fused):
    for divisor in (1.0, 3.7, math.inf, math.nan):
        for skipped in (0.0, 1.0):
            before, inside = (
                after_updates(kind, fused, divisor, skipped, in_kernel)
                for in_kernel in (False, True)
            )
            for one, other in zip(before[:1] + before[2:], inside[:1] + inside[2:], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_gradients_in_float64_are_not_divided_by_a_number_in_float32():
    third = torch.tensor(3.0, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    update(torch.optim.Adam([parameter], fused=True), third + 1e-12)
    assert parameter.grad.item() == 1 / (third + 1e-12).item()


class OwnCount(torch.optim.SGD):
    """Counts its steps in a Python number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_an_optimizer_whose_count_is_no_tensor_is_refused():
    optimizer = OwnCount([torch.nn.Parameter(torch.zeros(3))])
    update(optimizer)
    with refused("OwnCount", "fault.on_nonfinite"):
        update(optimizer, skipped=torch.tensor(False))


class Drifting(torch.optim.AdamW):
    """Does more than what torch's class skips by itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1)


def test_a_skipped_step_of_a_class_derived_from_torchs_changes_nothing():
    parameter = torch.nn.Parameter(torch.zeros(3))
    for skipped in (True, False):
        parameter.grad = torch.ones(3)
        update(Drifting([parameter], fused=True), skipped=torch.tensor(skipped))
        assert bool(parameter.any()) != skipped


def spikes(window: Window, *values: float) -> list[bool]:
    """Return of each value whether it is one."""
    return [bool(window.judge(torch.tensor(each, dtype=torch.float64))[1]) for each in values]


def test_a_spike_does_not_hide_the_next_one_and_a_loaded_window_goes_on_where_it_was():
    settings = FaultSection(spike_sigma=4.0, spike_window=3)
    window, resumed = (Window(settings, torch.device("cpu")) for _ in range(2))
    spikes(window, 1.0, 1.1)  # it is not full
    resumed.load(window.state())
    for either in (window, resumed):
        found = spikes(either, 0.9, 9.0, 9.0, 1.0, 9.0)
        assert found == [False, True, True, False, True]
    assert resumed.state() == window.state()


def test_skips_older_than_a_thousand_steps_are_forgotten():
    settings = job([*TINY, SKIP, "--fault.skip_budget=1"], 1).config.fault
    bad_steps = BadSteps(settings, torch.device("cpu"), lambda *_: None)
    for step in (1, 1001, 2001):
        bad_steps._act(step, math.nan, 0.0, 0.0, 0.0)
    with refused("step 3000 ", "2 in 1,000 steps", "fault.skip_budget = 1", kind=GivenUp):
        bad_steps._act(3000, math.nan, 0.0, 0.0, 0.0)
