"""Traces and snapshots: only where enabled, only of the configured steps, with the phases of a step
by name.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import TINY, job, run_to_end
from tests.messages import refused
from titanlite.config.schema import Profiling
from titanlite.observe.profiler import Profiler, action

# Of two micro-batches
STEP = Counter(data=1, forward=2, backward=2, optimizer=1, **{"gradient norm": 1})
PROFILED = [*TINY, "--profiling.enable_profiling", "--profiling.profiler_warmup=1"]


def phases(trace: Path) -> tuple[list[str], Counter[str]]:
    """Return the steps in a trace, and how often each phase is in it."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    steps = sorted(name for name in names if name.startswith("ProfilerStep"))
    return steps, Counter(name for name in names if name in {*STEP, "validation"})


@pytest.mark.long
def test_each_rank_traces_the_configured_steps_with_their_phases(pool, tmp_path):
    argv = [*PROFILED, "--training.steps=9", "--training.global_batch_size=8"]
    argv += ["--validation.enable", "--validation.freq=4", "--validation.steps=1"]
    argv += ["--profiling.profile_freq=4", "--profiling.profiler_active=2"]
    pool.run(run_to_end, argv, str(tmp_path), world=2)
    traces = {
        path.relative_to(tmp_path / "profile_traces").as_posix(): phases(path)
        for path in tmp_path.rglob("rank-*.json")
    }
    two = STEP + STEP + Counter(validation=1)
    assert traces == {
        f"step-{last}/rank-{rank}.json": ([f"ProfilerStep#{last - 1}", f"ProfilerStep#{last}"], two)
        for last in (4, 8)
        for rank in (0, 1)
    }


def test_nothing_is_recorded_by_default(pool, tmp_path):
    pool.run(run_to_end, [*TINY, "--profiling.profile_freq=1"], str(tmp_path), world=1)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"metrics.jsonl", "config.toml", "environment.json"}


def test_a_trace_is_kept_if_the_run_ends_within_it(pool, tmp_path):
    argv = [*PROFILED, "--profiling.profile_freq=5", "--profiling.profiler_active=3"]
    pool.run(run_to_end, argv, str(tmp_path), world=1)
    (trace,) = tmp_path.rglob("rank-0.json")
    assert trace.parent.name == "step-3" and phases(trace)[1]["optimizer"] == 1


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
    assert trace.parent.name == "step-8"
    assert phases(trace)[0] == ["ProfilerStep#2"], "the second step of this run"


def test_overlapping_traces_are_refused_with_the_legal_value():
    """The default warm-up has 3 steps."""
    argv = [*TINY, "--profiling.enable_profiling", "--profiling.profile_freq=4"]
    argv.append("--profiling.profiler_active=2")
    with refused("profiling.profile_freq = 4", "at least 5"):
        job(argv, world=1)
    job([*argv, "--profiling.profiler_warmup=2"], world=1)
