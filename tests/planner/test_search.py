"""What `titanlite plan --search` tries, what it rules out, and what is proposed where a config does
not fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pytest import approx

from tests.jobs import TINY, job
from tests.planner.steps import plan_step
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.config.toml import values_to_toml
from titanlite.planner import search as searching
from titanlite.planner.bounds import Facts
from titanlite.planner.depth import plan_ranks
from titanlite.planner.hardware import GIB, Hardware, load_hardware
from titanlite.planner.rehearse import static_bytes
from titanlite.planner.search import Found, changed, changes, measured, search
from titanlite.planner.speed import speed_of_job
from titanlite.planner.tables import search_table

SMALL = [
    *TINY,
    "--model.overrides.n_kv_heads=2",
    "--training.global_batch_size=8",
    "--training.seq_len=64",
]


def hardware_of(usable: int) -> Hardware:
    """Return a GPU with so many bytes for a step."""
    h100 = load_hardware("h100-80g")
    return replace(
        h100, gpu=replace(h100.gpu, memory_gib=usable / GIB), reserve=replace(h100.reserve, gib=0)
    )


def llama(name: str, world: int, *files: str) -> Job:
    return job_from(
        parse_command_line(["--config", name, *files], {}),
        world=world,
        training=True,
        device="cuda",
    )


def test_a_search_tries_only_what_the_rules_allow_and_keeps_the_global_batch():
    given = job([*SMALL, "--training.global_batch_size=-1"], 4)
    tried = [
        other
        for settings in searching.space(given, hardware_of(GIB))
        if (other := changed(given, settings))
    ]
    assert {other.layout.tp for other in tried} == {1, 2}  # 4 do not divide 2 heads
    assert {other.batch.total for other in tried} == {8} and {
        other.layout.world for other in tried
    } == {4}
    assert {other.config.activation_checkpoint.mode for other in tried} == {
        "none",
        "selective",
        "full",
    }
    assert {other.layout.dp_replicate for other in tried} == {1, 2, 4}
    assert {other.batch.accumulation for other in tried} == {1, 2, 4}


def test_nothing_is_rehearsed_that_the_state_of_training_alone_rules_out():
    found = search(job(SMALL, 4), hardware_of(1000), max_seconds=1000)
    assert not found.best and [what for what, number in found.counts.items() if number] == [
        "ruled out"
    ]
    text = str(search_table(found, hardware_of(1000), 4))
    assert "at the least parameters, gradients and optimizer state alone needs 0.0" in text


def test_the_state_that_rules_a_plan_out_is_what_a_rank_keeps_whatever_its_replicas():
    for replicas in (1, 2):
        given = job([*SMALL, f"--{searching.REPLICATE}={replicas}"], 4)
        kept = static_bytes(given)
        state = sum(kept.values()) - kept["buffers"]
        assert Facts(given, hardware_of(1)).state / given.layout.model_shards == approx(
            state, rel=0.01
        )


def test_a_plan_is_ruled_out_as_slow_by_no_more_than_its_estimate():
    hardware = load_hardware("h100-80g")
    long = ["--training.seq_len=4096"]  # computing takes longest
    for split in (searching.TP, "parallelism.context_parallel_degree"):
        given = job([*SMALL, *long, f"--{split}=2"], 2)
        estimate = speed_of_job(given, plan_ranks(given), hardware)[0].estimate
        assert Facts(given, hardware).least_seconds(given) <= estimate


def test_a_search_keeps_the_context_parallel_degree():
    given = job([*SMALL, "--parallelism.context_parallel_degree=2"], 4)
    found = search(given, load_hardware("h100-80g"), max_seconds=0)
    assert found.best and all(one.job.layout.cp == 2 for one in found.best)


def test_what_needs_more_than_a_plan_that_did_not_fit_is_not_rehearsed():
    given = job(SMALL, 4)
    least = changed(given, {searching.LOCAL: 1, searching.RECOMPUTE: "full", searching.GLOBAL: 8})
    assert least
    for more in ({searching.RECOMPUTE: "none"}, {searching.LOCAL: 2}, {searching.RESHARD: "never"}):
        other = changed(least, more)
        assert (
            other
            and searching._needs_no_less(other, least)
            and not searching._needs_no_less(least, other)
        )
    mixed = changed(least, {searching.LOCAL: 2, searching.CHUNKS: 8})
    assert mixed and not searching._needs_no_less(mixed, least)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(job(SMALL, 2), load_hardware("h100-80g"), max_seconds=0)


def test_the_best_plan_is_laid_over_the_config(found, tmp_path):
    assert 1 <= found.counts["rehearsed"] <= 6 and found.counts["not reached in time"] > 10, (
        "those that share the first model"
    )
    best = found.best[0]
    (tmp_path / "best.toml").write_text(values_to_toml(best.settings))
    line = parse_command_line(
        ["--config", "debug.toml", str(tmp_path / "best.toml"), *_without_batch(SMALL)], {}
    )
    laid_over = job_from(line, world=2, training=True)
    expected = changed(job(SMALL, 2), best.settings)
    assert expected and (laid_over.layout, laid_over.batch) == (expected.layout, expected.batch)
    assert laid_over.config.activation_checkpoint == expected.config.activation_checkpoint
    assert plan_step(expected).peak == best.peak


def test_the_ranking_reads_at_100_columns_names_each_plan_once_and_has_no_empty_column(found):
    given, hardware = job(SMALL, 4), load_hardware("h100-80g")
    space = [
        other
        for settings in searching.space(given, hardware)
        if (other := changed(given, settings))
    ]
    best = [replace(found.best[0], job=other) for other in space]
    table = search_table(
        Found(best, {"rehearsed": 2, "ruled out": 0, "not reached in time": 0}), hardware, 4
    )
    assert len({row[-1] for row in table.rows}) == len(space) > 30
    assert "rep2 dp2, batch 1, selective, kept" in {row[-1] for row in table.rows}
    above, _, assumed = str(table).partition("  assumed:\n")
    assert max(map(len, above.splitlines())) <= 100
    assert (
        "reached" not in above
        and "ruled out" not in above
        and "measured" not in above
        and "assumed" not in assumed
    )
    timed = Found(
        [replace(best[0], measured=0.25), *best],
        {"rehearsed": 2, "ruled out": 1, "not reached in time": 7},
    )
    text = str(search_table(timed, hardware, 4))
    assert (
        "measured s" in text
        and " 0.250 " in text
        and "2 rehearsed, 1 ruled out, 7 not reached in time" in text
    )


def _without_batch(argv: list[str]) -> list[str]:
    return [argument for argument in argv if "batch_size" not in argument]


def test_every_plan_for_70b_is_a_config_that_titanlite_accepts(tmp_path):
    given = llama("llama_70b.toml", 256)
    space = [*searching.space(given, load_hardware("h100-80g"))]
    legal = [settings for settings in space[::97] if changed(given, settings)]
    assert {2, 16} <= {settings[searching.PP] for settings in legal}
    for number in (0, len(legal) // 2, len(legal) - 1):
        file = Path(tmp_path, f"{number}.toml")
        file.write_text(values_to_toml(legal[number]))
        assert llama("llama_70b.toml", 256, str(file)).batch.total == given.batch.total


@pytest.mark.long
def test_the_fastest_by_estimate_that_fits_comes_first_and_measuring_ranks_anew():
    given = job([*SMALL, "--training.global_batch_size=2"], 1)
    everything = search(given, load_hardware("h100-80g"), max_seconds=1000, most=1000)
    assert everything.counts["ruled out"] and not everything.counts["not reached in time"]
    facts = Facts(given, load_hardware("h100-80g"))
    assert all(facts.least_seconds(one.job) <= one.speed.estimate for one in everything.best), (
        "what rules out"
    )
    estimates = [candidate.speed.estimate for candidate in everything.best]
    assert estimates == sorted(estimates) and len(estimates) == everything.counts["rehearsed"]
    peaks = sorted(candidate.peak for candidate in everything.best)
    usable = peaks[len(peaks) // 4]
    some = search(given, hardware_of(usable), max_seconds=1000, most=1000)
    # What recomputes more than a plan that fits is ruled out, and tried where that one does not.
    assert some.counts["ruled out"] and {c.option for c in some.best} >= {
        c.option for c in everything.best if c.peak <= usable
    }
    assert all(candidate.peak <= usable for candidate in some.best)
    slowest_first = iter([3.0, 1.0, 2.0])
    ranked = measured(everything, 3, lambda settings: next(slowest_first))
    assert [c.measured for c in ranked.best[:4]] == [1.0, 2.0, 3.0, 0.0]
    assert [c.option for c in ranked.best[:3]] == [everything.best[n].option for n in (1, 2, 0)]


@pytest.mark.long
def test_changes_are_rehearsed_and_fit():
    given = job(SMALL, 1)
    hardware = hardware_of(plan_step(given).peak - 1)
    found = changes(given, hardware)
    assert 1 <= len(found) <= 3
    for change in found:
        other = changed(given, change.settings)
        assert other and plan_step(other).peak == change.peak <= hardware.usable_bytes
        assert change.speed.bound > 0 and change.option.startswith("--")


@pytest.mark.exhaustive
def test_8b_on_one_gpu_needs_more_gpus():
    found = changes(llama("llama_8b.toml", 1), load_hardware("h100-80g"))
    assert [change.option.split()[-2:] for change in found] == [
        ["--world", n] for n in ("2", "4", "8")
    ]
    assert found[0].peak > found[1].peak > found[2].peak
