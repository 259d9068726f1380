"""A pipeline is planned on every rank: ranks wait for each other as their sends say."""

from dataclasses import replace

import pytest
import torch

from tests.jobs import TINY, job
from tests.planner.steps import H100, computes
from tests.planner.test_page import tables_of
from titanlite.config.job import Job
from titanlite.layout import Layout
from titanlite.planner.page import write_page
from titanlite.planner.plan import make_plan
from titanlite.planner.record import Collective, Event, Operation, Recording
from titanlite.planner.rehearse import record_step
from titanlite.planner.speed import speed_of
from titanlite.planner.tables import report

KEYS = "--parallelism.pipeline_parallel_"


def pipelined() -> Job:
    own = [f"{KEYS}degree=2", f"{KEYS}schedule=1F1B", f"{KEYS}microbatch_size=1"]
    return job([*TINY, *own, "--training.local_batch_size=3"], 2)


@pytest.mark.long
def test_a_pipeline_that_does_not_fit_is_said_without_changes():
    small = replace(H100, gpu=replace(H100.gpu, memory_gib=H100.reserve.gib + 1e-6))
    plan = make_plan(pipelined(), small)
    assert not plan.fits and not plan.changes
    assert "not fit" in report(plan) and "--search" not in report(plan)


@pytest.mark.long
def test_every_rank_of_a_pipeline_is_planned_with_what_it_sends(tmp_path):
    planned = pipelined()
    plan = make_plan(planned, H100)
    ranks = plan.to_json()["ranks"]
    assert [rank["stages"] for rank in ranks] == [(0,), (1,)]
    dtype = getattr(torch, planned.config.training.mixed_precision_param)
    for number, rank in enumerate(ranks):
        recorded = record_step(planned, number)
        assert (rank["peak"], rank["moment"]) == (recorded.peak, recorded.moment)
        (sent,) = [row for row in rank["communication"] if row["kind"] == "send-receive"]
        assert (sent["dimension"], sent["number"]) == ("pp", 3)
        assert sent["bytes"] == 3 * 16 * 16 * dtype.itemsize, "a hidden state for each"
        assert rank["exposed"]["pp"] > 0
    assert plan.recording.peak == max(rank["peak"] for rank in ranks)
    assert "send-receive" in report(plan)
    write_page(plan, tmp_path / "plan.html")
    rows = tables_of((tmp_path / "plan.html").read_text())["ranks"]
    assert [row[3] for row in rows] == [rank["peak"] for rank in ranks]


def test_a_rank_waits_for_what_others_send_and_for_the_slowest_at_the_end():
    """Two stages of a second a pass, and a send of a quarter: 0F0 0F1 | 1F0 1F1."""
    quarter = int(H100.network_rate * H100.efficiencies["network"].share / 4)
    sent = Collective("send-receive", "pp", 2, "bfloat16", quarter)
    product, send = computes("forward 0"), Operation("send", 1, collective=sent)
    first, second = list[Operation](), list[Operation]()
    for number in range(2):
        first.append(replace(product, event=Event("F", 0, number)))
        first.append(replace(send, event=Event("send F", 0, number)))
        second.append(replace(product, event=Event("F", 1, number)))
    rest = Operation("optimizer", 1, event=Event("rest"))
    recordings = [Recording([*operations, rest], {}) for operations in (first, second)]
    speeds = speed_of(recordings, Layout(pp=2, dp_shard=8), H100, 1, rank_of={0: 0, 1: 1})
    assert [speed.estimate for speed in speeds] == pytest.approx([3.25, 3.25], rel=1e-6)
    assert [speed.exposed["pp"] for speed in speeds] == pytest.approx([1.25, 1.25], rel=1e-6)
