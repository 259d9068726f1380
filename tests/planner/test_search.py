"""What `titanlite plan --search` tries, and what it rules out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pytest import approx

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import says
from tests.planner.steps import H100, plan_step
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.config.toml import values_to_toml
from titanlite.planner import search as searching
from titanlite.planner.depth import ranks_in
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.hardware import GIB, Hardware
from titanlite.planner.rehearse import static_bytes
from titanlite.planner.search import SearchResult, changed, search
from titanlite.planner.speed import speed_of_job
from titanlite.planner.tables import search_table

CP = "parallelism.context_parallel_degree"
SMALL = [
    *TINY,
    "--model.overrides.n_kv_heads=2",
    "--training.global_batch_size=8",
    "--training.seq_len=64",
]


def hardware_of(usable: int) -> Hardware:
    """Return a GPU with this many bytes for a step."""
    gpu, reserve = replace(H100.gpu, memory_gib=usable / GIB), replace(H100.reserve, gib=0)
    return replace(H100, gpu=gpu, reserve=reserve)


def llama(name: str, world: int, *files: str) -> Job:
    line = parse_command_line(["--config", name, *files], {})
    return job_from(line, world=world, training=True, device="cuda")


def space_of(given: Job) -> list[Job]:
    """Return the legal jobs that a search would try."""
    settings = searching.space(given, H100)
    return [other for each in settings if (other := changed(given, each))]


def test_a_search_tries_only_what_the_rules_allow_and_keeps_the_global_batch():
    tried = space_of(job([*SMALL, "--training.global_batch_size=-1"], 4))
    assert {other.layout.tp for other in tried} == {1, 2}  # 4 do not divide 2 heads
    assert {(other.batch.total, other.layout.world) for other in tried} == {(8, 4)}
    modes = {other.config.activation_checkpoint.mode for other in tried}
    assert modes == {"none", "selective", "full"}
    assert {other.layout.dp_replicate for other in tried} == {1, 2, 4}
    assert {other.batch.accumulation for other in tried} == {1, 2, 4}


def test_a_search_tries_pipelines_with_their_schedules_and_micro_batches():
    legal = space_of(job([*TINY, "--training.global_batch_size=8"], 2))
    stages = {(one.layout.pp, one.stages.schedule, one.stages.size) for one in legal}
    tried = {(2, name, size) for name in ("1F1B", "Interleaved1F1B") for size in (1, 2)}
    assert tried <= stages and any(one[0] == 1 for one in stages)


def test_nothing_is_rehearsed_that_the_state_of_training_alone_rules_out():
    found = search(job(SMALL, 4), hardware_of(1000), max_seconds=1000)
    assert not found.best
    assert [what for what, number in found.counts.items() if number] == ["ruled out"]
    says(search_table(found, hardware_of(1000), 4), "optimizer state", "0.0")


def test_the_state_that_rules_a_plan_out_is_what_a_rank_keeps_whatever_its_replicas():
    for replicas in (1, 2):
        given = job([*SMALL, f"--{searching.REPLICATE}={replicas}"], 4)
        kept = static_bytes(given)
        state = sum(kept.values()) - kept["buffers"]
        of_rank = searching._Model(given).state / given.layout.model_shards
        assert of_rank == approx(state, rel=0.01)


SHORT = ["--model.overrides.n_layers=3", "--training.seq_len=64", "--training.local_batch_size=1"]
HEAD = ["--model.freeze=['tok_embeddings.*','layers.*','norm.*']"]
LAST = ["--model.freeze=['tok_embeddings.*','layers.0.*']", "--activation_checkpoint.mode=full"]
TP4 = ["--parallelism.tensor_parallel_degree=4", "--model.overrides.n_kv_heads=4"]


@pytest.mark.parametrize("more", sample([HEAD, [], [*LAST, *TP4]], HEAD))
def test_a_bound_is_not_above_what_is_rehearsed_also_of_frozen_and_split_parts(more):
    given = job([*SHORT, *more], 8)
    with FakeWorld() as world:
        speed = speed_of_job(given, ranks_in(world, given, limit=H100.usable_bytes), H100)
    bound = searching._Model(given).bound(given, H100)
    for found, least in zip(speed.order, bound, strict=True):
        assert least <= found * (1 + 1e-9), (speed.order, bound)


def test_short_sequences_are_split_as_given_or_not_at_all():
    assert {one.layout.cp for one in space_of(job([*SMALL, f"--{CP}=2"], 4))} == {1, 2}


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(job(SMALL, 2), H100, max_seconds=0)


@pytest.mark.long
def test_a_search_without_time_rehearses_only_those_that_share_the_first_model(found):
    assert 1 <= found.counts["rehearsed"] <= 6 and found.counts["not reached in time"] > 10
    best = found.best[0]
    assert plan_step(best.job).peak == best.peak


@pytest.mark.long
def test_the_ranking_reads_at_100_columns_names_each_plan_once_and_has_no_empty_column(found):
    best = [replace(found.best[0], job=other) for other in space_of(job(SMALL, 4))]
    counts = {"rehearsed": 2, "ruled out": 0, "not reached in time": 0}
    table = search_table(SearchResult(best, counts), H100, 4)
    names = {row[-1] for row in table.rows}
    assert len(names) == len(best) > 30 and "rep2 dp2, batch 1, selective, kept" in names
    above, _, assumed = str(table).partition("  assumed:\n")
    assert max(map(len, above.splitlines())) <= 100
    assert not [word for word in ("reached", "ruled", "measured") if word in above]
    assert "assumed" not in assumed
    counts = {"rehearsed": 2, "ruled out": 1, "not reached in time": 7}
    says(search_table(SearchResult(best, counts), H100, 4), "2 rehearsed", "1 ruled", "7 not")


def test_every_plan_for_70b_is_a_config_that_titanlite_accepts_with_all_its_settings(tmp_path):
    given = llama("llama_70b.toml", 256)
    space = [*searching.space(given, H100)][::97]
    legal = [settings for settings in space if changed(given, settings)]
    assert {2, 16} <= {settings[searching.PP] for settings in legal}
    for number in (0, len(legal) // 2, len(legal) - 1):
        file = Path(tmp_path, f"{number}.toml")
        file.write_text(values_to_toml(legal[number]))
        laid_over = llama("llama_70b.toml", 256, str(file))
        expected = changed(given, legal[number])
        assert expected and (laid_over.layout, laid_over.batch) == (expected.layout, expected.batch)
        assert laid_over.config.activation_checkpoint == expected.config.activation_checkpoint
        assert laid_over.batch.total == given.batch.total


@pytest.mark.long
def test_the_fastest_that_fit_come_first():
    given = job([*SMALL, "--training.global_batch_size=2"], 1)
    everything = search(given, H100, max_seconds=1000, most=1000)
    assert not everything.counts["ruled out"] and not everything.counts["not reached in time"]
    order = [one.speed.order for one in everything.best]
    assert order == sorted(order) and len(order) == everything.counts["rehearsed"]
    peaks = sorted(one.peak for one in everything.best)
    usable = peaks[len(peaks) // 4]
    some = search(given, hardware_of(usable), max_seconds=1000, most=1000)
    fitting = [one.settings for one in everything.best if one.peak <= usable]
    assert len(fitting) < len(everything.best)
    assert [one.settings for one in some.best] == fitting
