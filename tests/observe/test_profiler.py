"""Traces and snapshots: only where enabled, only of the configured steps, with the phases of a step
by name.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import TINY, job, run_to_end
from titanlite.config.load import ConfigError
from titanlite.config.schema import Profiling
from titanlite.observe.profiler import Profiler, action

STEP = Counter(
    data=1, forward=2, backward=2, optimizer=1, **{"gradient norm": 1}
)  # of two micro-batches
VALIDATED = Counter(validation=1)


def phases(trace: Path) -> tuple[list[str], Counter[str]]:
    """Return the steps in a trace, and how often each phase is in it."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    known = {*STEP, *VALIDATED}
    return sorted(n for n in names if n.startswith("ProfilerStep")), Counter(
        n for n in names if n in known
    )


def test_each_rank_traces_the_configured_steps_with_their_phases(pool, tmp_path):
    argv = [*TINY, "--training.steps=9", "--training.global_batch_size=8", "--validation.enable"]
    argv += ["--validation.freq=4", "--validation.steps=1", "--profiling.enable_profiling"]
    argv += [
        "--profiling.profile_freq=4",
        "--profiling.profiler_warmup=1",
        "--profiling.profiler_active=2",
    ]
    pool.run(run_to_end, argv, str(tmp_path), world=2)
    traces = {
        p.relative_to(tmp_path / "profile_traces").as_posix(): phases(p)
        for p in tmp_path.rglob("rank-*.json")
    }
    two = Counter({name: 2 * count for name, count in STEP.items()}) + VALIDATED
    assert traces == {
        f"step-{last}/rank-{rank}.json": ([f"ProfilerStep#{last - 1}", f"ProfilerStep#{last}"], two)
        for last in (4, 8)
        for rank in (0, 1)
    }


def test_nothing_is_recorded_by_default(pool, tmp_path):
    pool.run(run_to_end, [*TINY, "--profiling.profile_freq=1"], str(tmp_path), world=1)
    assert {p.name for p in tmp_path.iterdir()} == {
        "metrics.jsonl",
        "config.toml",
        "environment.json",
    }


def test_a_trace_is_kept_if_the_run_ends_within_it(pool, tmp_path):
    argv = [
        *TINY,
        "--profiling.enable_profiling",
        "--profiling.profile_freq=5",
        "--profiling.profiler_active=3",
    ]
    pool.run(run_to_end, [*argv, "--profiling.profiler_warmup=1"], str(tmp_path), world=1)
    (trace,) = tmp_path.rglob("rank-0.json")
    assert trace.parent.name == "step-3" and phases(trace)[1]["optimizer"] == 1


@pytest.mark.long
def test_the_profiler_does_not_change_the_losses(pool, tmp_path):
    profiled = [
        *TINY,
        "--profiling.enable_profiling",
        "--profiling.profile_freq=1",
        "--profiling.profiler_warmup=0",
    ]
    losses = []
    for argv in (TINY, profiled):
        folder = tmp_path / str(len(argv))
        pool.run(run_to_end, argv, str(folder), world=2)
        losses.append(
            [
                json.loads(line)["loss"]
                for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
        )
    assert losses[0] == losses[1] and len(list(tmp_path.rglob("rank-1.json"))) == 3


@pytest.mark.parametrize(
    "warmup, actions",
    {
        1: "NONE NONE WARMUP RECORD_AND_SAVE NONE",
        3: "WARMUP WARMUP WARMUP RECORD_AND_SAVE WARMUP",
    }.items(),
)
def test_the_profiler_warms_up_before_the_traced_steps(warmup, actions):
    settings = Profiling(profile_freq=4, profiler_warmup=warmup)
    assert [action(settings, step).name for step in range(1, 6)] == actions.split()


def test_a_resumed_run_traces_the_same_steps(tmp_path):
    settings = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1)
    with Profiler(settings, tmp_path, 0, done=6) as profiler:
        for step in (7, 8, 9):
            profiler.step(step)
    (trace,) = tmp_path.rglob("rank-0.json")
    assert trace.parent.name == "step-8" and phases(trace)[0] == ["ProfilerStep#2"], (
        "the second step of this run"
    )


def test_overlapping_traces_are_refused_with_the_legal_value():
    argv = [
        *TINY,
        "--profiling.enable_profiling",
        "--profiling.profile_freq=4",
        "--profiling.profiler_active=2",
    ]
    with pytest.raises(ConfigError, match=r"profile_freq = 4(.|\n)*do not fit into 4; at least 5"):
        job(argv, world=1)
    job([*argv, "--profiling.profiler_warmup=2"], world=1)
