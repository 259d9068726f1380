"""A bad step leaves no trace: it is skipped on the device, or the run goes back to a checkpoint
from before it.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.checkpoint.saved import SAVING, digests, keeping_log, steps_in
from tests.jobs import MOE, TINY, job, trainer
from tests.lanes import sample
from tests.observe.test_sinks import tensorboard
from tests.runs import train
from titanlite.config.load import ConfigError
from titanlite.config.schema import FaultSection
from titanlite.errors import GivenUp, RunFailed, UserError
from titanlite.optim.skip import step_unless
from titanlite.parallel.dtensor import local_part
from titanlite.train.bad_steps import BadSteps, Window
from titanlite.train.guard import StepGuard
from titanlite.train.trainer import Trainer

WHY = "is not finite", r"[\d.e+]+ is above [\d.]+"
SKIP = "--fault.on_nonfinite=skip"
SPIKES = ["--fault.spike_sigma=8.0", "--fault.spike_window=3"]
DP2_TP2 = ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=2"]
OPTIMIZERS = {
    "AdamW": "",
    "Adam": "--optimizer.name=Adam",
    "foreach": "--optimizer.implementation=foreach",
    "for-loop": "--optimizer.implementation=for-loop",
    "SGD": "--optimizer.name=SGD",
    "Muon": "--optimizer.name=Muon",
    "Muon, foreach": "--optimizer.name=Muon --optimizer.implementation=foreach",
    "bfloat16 state": "--optimizer.state_dtype=bfloat16",
    "bfloat16 state, foreach": (
        "--optimizer.state_dtype=bfloat16 --optimizer.implementation=foreach"
    ),
    "bfloat16 state, Muon": "--optimizer.state_dtype=bfloat16 --optimizer.name=Muon",
    "bfloat16": "--training.dtype=bfloat16 --training.mixed_precision_param=bfloat16",
    "bfloat16 of both": "--training.dtype=bfloat16 --optimizer.state_dtype=bfloat16",
    "offload": "--training.enable_cpu_offload",
}


def poison(run: Trainer, factors: dict[int, float]) -> None:
    """Multiply the gradients after so many batches of the data by a factor, whatever the number of
    the step. NaN spoils the loss too.
    """
    forward_backward = run.runner.forward_backward
    clip = run.runner.clip_gradients

    def factor() -> float:
        return factors.get(1 + run.consumed // run.rank_slice.per_step, 1.0)

    def poisoned_loss(*args: Any) -> torch.Tensor:
        loss = forward_backward(*args)
        return loss * math.nan if math.isnan(factor()) else loss

    def clip_gradients() -> torch.Tensor:
        for parameter in run.runner.parameters:
            assert parameter.grad is not None
            local_part(parameter.grad).mul_(factor())
        return clip()

    run.runner.forward_backward = poisoned_loss  # type: ignore[method-assign]
    run.runner.clip_gradients = clip_gradients  # type: ignore[method-assign]


def changes_of_steps(argv: list[str], folder: str, factors: dict[int, float]) -> list[bool]:
    """Train with poisoned batches; return of each step whether anything of the state changed, bit
    for bit.
    """
    states = [
        digests(trainer(argv, folder))
    ]  # of another run, since this makes the optimizer's state
    run = trainer(argv, folder)
    poison(run, factors)
    update = run.runner.update

    def update_and_keep(*args: Any) -> None:
        update(*args)
        states.append(digests(run))

    run.runner.update = update_and_keep  # type: ignore[method-assign]
    run.train()
    return [after != before for before, after in pairwise(states)]


@pytest.mark.parametrize("optimizer", sample(OPTIMIZERS, "AdamW", every=4))
def test_a_step_that_is_not_finite_changes_no_bit_of_parameters_and_state(
    pool, tmp_path, optimizer
):
    """The first one too, in which the state is made."""
    argv = [*TINY, *DP2_TP2, SKIP, "--training.steps=5", *OPTIMIZERS[optimizer].split()]
    factors = {1: math.nan, 3: math.inf, 4: math.nan}
    ranks = pool.run(changes_of_steps, argv, str(tmp_path), factors, world=4)
    assert ranks == [[False, True, False, False, True]] * 4


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    sample(
        [
            ("", math.nan),
            ("--optimizer.name=Muon", math.nan),
            ("", 1e4),
            ("--optimizer.name=Muon", 1e4),
        ],
        every=3,
    ),
)
def test_a_skipped_step_moves_no_router_bias(pool, tmp_path, optimizer, factor):
    argv = [
        *MOE,
        '--model.overrides.balance="bias"',
        SKIP,
        "--training.steps=6",
        *optimizer.split(),
    ]
    argv += ["--parallelism.expert_parallel_degree=2", *SPIKES, "--fault.on_spike=skip"]
    ranks = pool.run(changes_of_steps, argv, str(tmp_path), {5: factor}, world=2)
    assert ranks == [[True, True, True, True, False, True]] * 2


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["pp2", "fp8"])
def test_skipping_works_with_stages_and_with_float8(pool, tmp_path, mesh):
    options = {
        "pp2": "--parallelism.pipeline_parallel_degree=2",
        "fp8": (
            "--quantize.linear.float8.enable --quantize.linear.float8.emulate "
            "--model.overrides.dim=64 --model.overrides.hidden_dim=64"
        ),
    }[mesh]
    argv = [*TINY, SKIP, "--training.steps=3", *options.split()]
    assert (
        pool.run(changes_of_steps, argv, str(tmp_path), {2: math.nan}, world=2)
        == [[True, False, True]] * 2
    )


def end_of(
    argv: list[str], folder: str, factors: dict[int, float], without_update: int = 0
) -> dict[str, Any]:
    """Train with poisoned batches, or with a step that leaves out its update; return the state of
    the end.
    """
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    poison(run, factors)
    update = run.runner.update

    def unless_left_out(step: int, *args: Any) -> None:
        if step == without_update:
            run.runner.optimizer.zero_grad()
        else:
            update(step, *args)

    run.runner.update = unless_left_out  # type: ignore[method-assign]
    error = ""
    try:
        run.train()
    except RunFailed as failed:
        error = f"{type(failed).__name__} {failed.code}: {failed}"
    position = {"step": run.step, "consumed": run.consumed, "tokens": run.tokens}
    return {
        "state": digests(run),
        "log": lines,
        "error": error,
        "guard": run.guard.state_dict(),
        **position,
    }


def test_a_run_that_skips_a_step_equals_one_that_never_made_its_update(pool, tmp_path):
    """And one without a bad step equals a run in which skipping is off."""
    argv = [*TINY, "--training.steps=6", "--metrics.log_freq=1"]
    skipping = [*argv, SKIP, *SPIKES, "--fault.on_spike=skip"]
    plain = pool.run(end_of, argv, str(tmp_path / "plain"), {}, world=2)
    assert [r["state"] for r in pool.run(end_of, skipping, str(tmp_path / "on"), {}, world=2)] == [
        r["state"] for r in plain
    ]
    expected = pool.run(end_of, argv, str(tmp_path / "without"), {}, 5, world=2)
    for number, factor in enumerate((math.nan, 1e4)):
        folder = tmp_path / str(number)
        found = pool.run(end_of, skipping, str(folder), {5: factor}, world=2)
        assert (
            [r["state"] for r in found]
            == [r["state"] for r in expected]
            != [r["state"] for r in plain]
        )
        (line,) = [line for line in found[0]["log"] if "skipped" in line]
        assert re.fullmatch(
            rf"step 5 was skipped: its gradient norm {WHY[number]} \(1 in 1,000 steps; .*\)", line
        )
        records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        (record,) = [record for record in records if "skipped" in record]
        good = [
            record["loss"]
            for record in records
            if record.get("loss") and record["step"] in (3, 4, 6)
        ]
        assert found[0]["guard"]["losses"] == pytest.approx(good, rel=1e-6), (
            "the loss of a skipped step does not count"
        )
        assert (
            record["step"] == 5
            and record["skipped"] == 1
            and (record["bad_norm"] is None) == (number == 0)
        )


def test_the_losses_by_which_spikes_are_judged_are_those_of_the_log_under_tensor_parallel(
    pool, tmp_path
):
    argv = [
        *TINY,
        *DP2_TP2,
        *SPIKES,
        "--fault.spike_sigma=1e6",
        "--training.steps=4",
        "--metrics.log_freq=1",
    ]
    found = pool.run(end_of, argv, str(tmp_path), {}, world=2)[0]
    records = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found["guard"]["losses"] == pytest.approx(
        [r["loss"] for r in records if "loss" in r][-3:], rel=1e-6
    )


@pytest.mark.parametrize("skips", sample([False, True], False))
def test_the_first_of_several_bad_steps_is_named_also_where_only_spikes_are_skipped(
    pool, tmp_path, skips
):
    argv = [*TINY, "--training.steps=6", *[*SPIKES, "--fault.on_spike=skip"] * skips]
    found = pool.run(end_of, argv, str(tmp_path), {3: math.inf, 4: math.inf}, world=2)
    assert found[0]["error"].startswith("NonFinite 1: at step 3 the gradient norm was not finite")


@pytest.mark.long
def test_a_rollback_forgets_no_skipped_step(pool, tmp_path):
    argv = [*ROLLBACK, SKIP]
    found = pool.run(end_of, argv, str(tmp_path), {5: math.nan, 6: 1e4}, world=2)
    assert (
        found[0]["error"] == ""
        and found[0]["guard"]["skips"] == [5]
        and found[0]["guard"]["rollbacks"] == 1
    )


@pytest.mark.long
def test_a_rollback_restores_float8_scales(pool, tmp_path):
    float8 = "--quantize.linear.float8."
    options = [f"{float8}{name}" for name in ("enable", "emulate", "enable_fsdp_float8_all_gather")]
    options += [f"{float8}precompute_float8_dynamic_scale_for_fsdp", "--model.overrides.dim=64"]
    argv = [*ROLLBACK, *options, "--model.overrides.hidden_dim=64"]
    found = pool.run(end_of, argv, str(tmp_path / "back"), {6: 1e4}, world=2)
    pool.run(end_of, [*argv, "--training.steps=4"], str(tmp_path / "cut"), {}, world=2)
    per_step = found[0]["consumed"] // 10
    expected = pool.run(resumed_later, argv, str(tmp_path / "cut"), 6 * per_step, world=2)
    assert [part["state"] for part in found] == [part["state"] for part in expected]


@pytest.mark.long
def test_a_spike_is_warned_of_and_kept(pool, tmp_path):
    """Spikes are not among the good steps by which later ones are judged."""
    argv, factors = [*TINY, "--training.steps=7", *SPIKES], {5: 1e4, 7: 1e4}
    expected, _ = pool.run(end_of, argv[:-2], str(tmp_path / "off"), factors, world=2)
    found, _ = pool.run(end_of, argv, str(tmp_path / "on"), factors, world=2)
    assert found["state"] == expected["state"]
    warnings = [line for line in found["log"] if "is a spike: its gradient norm" in line]
    assert [line.partition(" is")[0] for line in warnings] == ["step 5", "step 7"]


def loss_spike(argv: list[str], folder: str) -> dict[str, Any]:
    """Train with batches of which the fourth has a large loss, and gradients like the others."""
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    forward_backward = run.runner.forward_backward

    def larger(*args: Any) -> torch.Tensor:
        return forward_backward(*args) * (
            2.0 if run.consumed == 3 * run.rank_slice.per_step else 1.0
        )

    run.runner.forward_backward = larger  # type: ignore[method-assign]
    run.train()
    return {
        "log": lines,
        "step": run.step,
        "left out": run.consumed // run.rank_slice.per_step - run.step,
    }


@pytest.mark.long
@pytest.mark.parametrize("action", ["warn", "skip", "rollback"])
def test_a_spike_of_the_loss_is_known_a_step_late(pool, tmp_path, action):
    """It is too late to skip its update."""
    argv = [
        *SAVING,
        *SPIKES,
        f"--fault.on_spike={action}",
        "--training.steps=6",
        "--checkpoint.interval=2",
    ]
    for rank in pool.run(loss_spike, argv, str(tmp_path), world=2):
        lines = [line for line in rank["log"] if "its loss" in line]
        assert len(lines) == 1 and lines[0].startswith(
            "step 4: " if action == "rollback" else "step 4 is a spike: "
        )
        assert (rank["step"], rank["left out"]) == (6, 2 if action == "rollback" else 0)


def resumed_later(argv: list[str], folder: str, consumed: int) -> dict[str, Any]:
    """Resume, at a later position in the data."""
    run = trainer(argv, folder)
    begun, run.consumed = run.step, consumed
    run.train()
    return {
        "begun": begun,
        "state": digests(run),
        "tokens": run.tokens,
        "guard": run.guard.state_dict(),
    }


ROLLBACK = [
    *SAVING,
    *SPIKES,
    "--fault.on_spike=rollback",
    "--checkpoint.interval=2",
    "--training.steps=8",
]


@pytest.mark.parametrize("bad", sample([5, 6], 6))
def test_a_run_that_goes_back_equals_one_resumed_from_that_checkpoint_with_later_data(
    pool, tmp_path, bad
):
    """Step 6 is due to be saved, and is not; the step after a spike of step 5 is taken before it is
    known.
    """
    traced = [*ROLLBACK, "--metrics.enable_tensorboard"]
    found = pool.run(end_of, traced, str(tmp_path / "back"), {bad: 1e4}, world=2)
    pool.run(end_of, [*ROLLBACK, "--training.steps=4"], str(tmp_path / "cut"), {}, world=2)
    per_step = found[0]["consumed"] // 10
    expected = pool.run(resumed_later, ROLLBACK, str(tmp_path / "cut"), 6 * per_step, world=2)
    assert [part["begun"] for part in expected] == [4, 4]
    assert [part["state"] for part in found] == [part["state"] for part in expected]
    assert [part["tokens"] for part in found] == [part["tokens"] for part in expected]
    assert [(part["step"], part["consumed"]) for part in found] == [(8, 10 * per_step)] * 2, (
        "4 to 6 twice"
    )
    (line,) = [line for line in found[0]["log"] if "rollback" in line]
    assert (
        line.startswith(f"step {bad}: its gradient norm ")
        and "(rollback 1; fault.rollback_budget = 2)" in line
    )
    records = [
        json.loads(text) for text in (tmp_path / "back/metrics.jsonl").read_text().splitlines()
    ]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert [record["step"] for record in records if "loss" in record] == [*range(1, 9)]
    assert tensorboard(tmp_path / "back/tb")["loss_metrics/global_avg_loss"] == pytest.approx(
        losses
    )


@pytest.mark.parametrize("bad", sample([5, 6], 5))
def test_after_a_rollback_steps_are_judged_by_those_that_still_count(pool, tmp_path, bad):
    """Of a spike of step 5, the loss of step 6 is not summed yet."""
    argv = [*ROLLBACK, "--fault.spike_window=4", "--fault.spike_sigma=100", "--training.steps=7"]
    found = pool.run(end_of, argv, str(tmp_path / "back"), {bad: 1e4}, world=2)
    pool.run(end_of, argv, str(tmp_path / "cut"), {}, world=2)
    per_step = found[0]["consumed"] // 9
    earlier = [*argv, "--checkpoint.load_step=4"]
    expected = pool.run(resumed_later, earlier, str(tmp_path / "cut"), 6 * per_step, world=2)
    for window in ("norms", "losses"):
        assert (
            len(found[0]["guard"][window]) == 4
            and found[0]["guard"][window] == expected[0]["guard"][window]
        )


@pytest.mark.long
def test_nothing_to_go_back_to_is_said(pool, tmp_path):
    argv = [*ROLLBACK, "--checkpoint.interval=8"]
    error = pool.run(end_of, argv, str(tmp_path), {5: 1e4}, world=2)[1]["error"]
    assert error.startswith("RunFailed 1: ") and error.endswith(
        "has no checkpoint from before step 5 to go back to"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "factors", "says"),
    [
        (
            [SKIP, "--fault.skip_budget=2"],
            {2: math.nan, 4: math.nan, 5: math.nan},
            "step 5 is one bad step too many",
        ),
        ([SKIP, "--fault.skip_budget=0"], {2: math.nan}, "step 2 is one bad step too many"),
        (["--fault.rollback_budget=1"], {5: 1e4, 7: 1e4}, "step 5 is one spike too many"),
    ],
)
def test_a_used_up_budget_ends_the_run_with_its_own_exit_code_on_all_ranks(
    pool, tmp_path, options, factors, says
):
    for rank in pool.run(end_of, [*ROLLBACK, *options], str(tmp_path), factors, world=2):
        assert rank["error"].startswith(f"GivenUp 77: {says}")
    assert "step-8" not in steps_in(tmp_path)


@pytest.mark.exhaustive
def test_the_launcher_returns_the_exit_code_of_a_used_up_budget(tmp_path):
    """The first update makes the weights so large that no gradient is finite from then on."""
    argv = [*TINY, SKIP, "--fault.skip_budget=3", "--optimizer.lr=1e30", "--training.steps=20"]
    argv += ["--checkpoint.enable", "--checkpoint.interval=3", "--lr_scheduler.warmup_steps=0"]
    code, out = train(argv, tmp_path, NGPU="2")
    assert (
        code == 77
        and "step 5 is one bad step too many: its gradient norm is not finite (4 in 1,000 steps"
        in out
    )
    assert (
        "Traceback" not in out
        and steps_in(tmp_path) == ["step-3", "step-6"][: len(steps_in(tmp_path))]
    )
    assert steps_in(tmp_path)[0] == "step-3", (
        "what was saved stands: a step that is skipped changes nothing"
    )


def test_a_resume_keeps_the_window_and_the_budgets(pool, tmp_path):
    """Stopped and resumed, the run skips the same steps, and gives up at the same one."""
    argv = [
        *SAVING,
        SKIP,
        *SPIKES,
        "--fault.on_spike=skip",
        "--fault.skip_budget=2",
        "--checkpoint.interval=3",
    ]
    factors = {3: math.nan, 5: math.nan, 7: 1e4, 8: 1.0}
    straight = pool.run(
        end_of, [*argv, "--training.steps=9"], str(tmp_path / "straight"), factors, world=2
    )
    pool.run(end_of, [*argv, "--training.steps=6"], str(tmp_path / "cut"), factors, world=2)
    resumed = pool.run(
        end_of, [*argv, "--training.steps=9"], str(tmp_path / "cut"), factors, world=2
    )
    assert resumed[0]["error"] == straight[0]["error"]
    assert "step 7 is one bad step too many: its gradient norm" in resumed[0]["error"]


class OwnCount(torch.optim.SGD):
    """Counts its steps in a Python number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_an_optimizer_whose_count_is_no_tensor_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer, kept = OwnCount([parameter]), torch.zeros((), dtype=torch.bool)
    step_unless(None, optimizer)
    with pytest.raises(UserError, match="OwnCount counts in Python numbers"):
        step_unless(kept, optimizer)


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
        step_unless(torch.tensor(skipped), Drifting([parameter], fused=True))
        assert bool(parameter.any()) != skipped


def window_of(values: list[float]) -> Window:
    window = Window(FaultSection(spike_sigma=4.0, spike_window=3), torch.device("cpu"))
    for value in values:
        window.judge(torch.tensor(value, dtype=torch.float64))
    return window


def is_spike(window: Window, value: float) -> bool:
    return bool(window.judge(torch.tensor(value, dtype=torch.float64))[1])


def test_a_spike_does_not_hide_the_next_one():
    window = window_of([1.0, 1.1, 0.9])
    assert [is_spike(window, value) for value in (9.0, 9.0, 1.0, 9.0)] == [True, True, False, True]


def test_a_window_that_was_not_full_goes_on_where_it_was():
    window, resumed = window_of([1.0, 1.1]), window_of([])
    resumed.load(window.state())
    for value in (0.9, 9.0, 1.2):
        assert is_spike(resumed, value) == is_spike(window, value) == (value == 9.0)
    assert resumed.state() == window.state()


def test_skips_older_than_a_thousand_steps_are_forgotten():
    settings = job([*TINY, SKIP, "--fault.skip_budget=1"], 1).config.fault
    bad_steps = BadSteps(settings, torch.device("cpu"), lambda *_: None)
    for step in (1, 1001, 2001):
        bad_steps._act(step, math.nan, 0.0, 0.0, 0.0)
    with pytest.raises(GivenUp, match="step 3000 .*2 in 1,000 steps; fault.skip_budget = 1"):
        bad_steps._act(3000, math.nan, 0.0, 0.0, 0.0)


def test_what_is_off_judges_no_step_and_a_rollback_needs_checkpoints():
    assert StepGuard(job(TINY, 1).config.fault, torch.device("cpu"), 1)._bad_steps is None
    with pytest.raises(ConfigError, match="(?s)fault.on_spike.*there is nothing to go back to"):
        job([*TINY, *SPIKES, "--fault.on_spike=rollback"], 1)
