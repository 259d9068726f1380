"""A pipeline is planned on every rank, with what it sends."""

import pytest
import torch

from tests.jobs import TINY, job
from tests.planner.steps import H100
from tests.planner.test_page import tables_of
from titanlite.config.job import Job
from titanlite.planner.page import write_page
from titanlite.planner.plan import make_plan
from titanlite.planner.rehearse import record_step
from titanlite.planner.tables import report

KEYS = "--parallelism.pipeline_parallel_"


def pipelined() -> Job:
    own = [f"{KEYS}degree=2", f"{KEYS}schedule=1F1B", f"{KEYS}microbatch_size=1"]
    return job([*TINY, *own, "--training.local_batch_size=3"], 2)


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
    assert plan.totals.peak == max(rank["peak"] for rank in ranks)
    assert "send-receive" in report(plan)
    write_page(plan, tmp_path / "plan.html")
    rows = tables_of((tmp_path / "plan.html").read_text())["ranks"]
    assert [row[3] for row in rows] == [rank["peak"] for rank in ranks]
