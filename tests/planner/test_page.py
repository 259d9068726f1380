"""The page of a plan: one file with every number of the plan in a table."""

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.jobs import TINY, job
from tests.messages import refused
from tests.planner.steps import H100
from titanlite.planner.page import write_page
from titanlite.planner.plan import Plan, make_plan
from titanlite.planner.record import KINDS

GIB = 1 << 30
DEGREES = ("data_parallel_replicate_degree", "tensor_parallel_degree")
MESH = ["--model.overrides.n_kv_heads=2", *(f"--parallelism.{degree}=2" for degree in DEGREES)]
HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> \" & ${tiles}"


def planned(world: int, *options: str) -> Plan:
    described = f"--job.description={json.dumps(HOSTILE)}"
    given = job([*TINY, *MESH, described, *options], world)
    return make_plan(given, H100, tokens=1e12)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(8)


def tables_of(page: str) -> dict[str | None, list[list[Any]]]:
    """Return the cells of a page's tables: exact values of numbers, texts of others."""
    found = map(ElementTree.fromstring, re.findall(r"<table .*?</table>", page, re.DOTALL))
    return {
        table.get("id"): [[*map(cell, row)] for row in table.iterfind("tbody/tr")]
        for table in found
    }


def cell(element: ElementTree.Element) -> Any:
    number = element.find("data")
    return "".join(element.itertext()) if number is None else float(number.get("value", ""))


def written(plan: Plan, folder: Path) -> str:
    path = folder / "plan.html"
    write_page(plan, path)
    return path.read_text()


@pytest.mark.long
def test_the_tables_have_every_number_of_the_plan(plan, tmp_path):
    """That its JSON has."""
    page = written(plan, tmp_path)
    assert all(text in page for text in plan.assumptions)
    found = plan.to_json()
    tables, memory, speed = tables_of(page), found["memory"], found["speed"]
    kinds = ([kind, memory["at_peak"][kind], memory["static"].get(kind, 0)] for kind in KINDS)
    peak = [f"peak, in {memory['moment']}", memory["peak"], sum(memory["static"].values())]
    assert tables["memory"] == [*(row for row in kinds if any(row[1:])), peak]
    keys = "dimension", "kind", "dtype", "where", "number", "bytes"
    assert [row[:6] for row in tables["communication"]] == [
        [row[key] for key in keys] for row in found["communication"]
    ]
    rates = "seconds", "tokens_per_second_per_gpu", "mfu_percent", "days"
    assert [row[1] for row in tables["speed"]] == [speed["bound"][key] for key in rates]
    assert tables["terms"] == [
        [row[key] for key in ("resource", "of", "amount", "seconds")] for row in speed["terms"]
    ]


def test_a_page_needs_no_script_and_no_other_file_and_text_of_a_config_is_inert(plan, tmp_path):
    page = written(plan, tmp_path)
    page = page.replace(escape(HOSTILE), "")
    outside = r"<(script|link|iframe|img)|\b(src|href)=|@import|https?:|url"
    assert "window.ran" not in page and not re.search(outside, page)


def test_what_does_not_fit_is_said(plan, tmp_path):
    peak, reserve = plan.totals.peak, plan.hardware.reserve.gib
    gpu = replace(plan.hardware.gpu, memory_gib=reserve + peak / 2 / GIB)
    small = replace(plan, hardware=replace(plan.hardware, gpu=gpu))
    page = written(small, tmp_path)
    assert "not fit" in page and " missing" in page


def test_a_page_that_cannot_be_written_is_one_clear_line(plan, tmp_path):
    with refused("--html", "plan.html", "No such file"):
        write_page(plan, tmp_path / "none" / "plan.html")
