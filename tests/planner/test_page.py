"""The page of a plan: one file with every number of the plan in a table, and also under the
mouse.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.jobs import TINY, job
from tests.messages import refused
from tests.planner.steps import H100
from titanlite.planner.page import STACK, write_page
from titanlite.planner.plan import Plan, make_plan
from titanlite.planner.record import KINDS
from titanlite.planner.search import Candidate

GIB = 1 << 30
WINDOW = {"width": 1280, "height": 900}
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


def assert_tables_say(page: str, plan: Plan) -> None:
    """Compare the numbers of the tables with the plan's JSON."""
    found = plan.to_json()
    tables, memory, speed = tables_of(page), found["memory"], found["speed"]
    assert [[row[0], *row[3:]] for row in tables["phases"]] == [
        [phase["phase"], phase["live"], *(phase["by_kind"][kind] for kind in STACK)]
        for phase in memory["phases"]
    ]
    kinds = ([kind, memory["at_peak"][kind], memory["static"].get(kind, 0)] for kind in KINDS)
    peak = [f"peak, in {memory['moment']}", memory["peak"], sum(memory["static"].values())]
    assert tables["memory"] == [*(row for row in kinds if any(row[1:])), peak]
    keys = "dimension", "kind", "dtype", "where", "number", "bytes"
    assert [row[:6] for row in tables["communication"]] == [
        [row[key] for key in keys] for row in found["communication"]
    ]
    shown = {row[0]: row[6] for row in tables["communication"] if row[6] == row[6]}
    dimensions = (row["dimension"] for row in found["communication"])
    assert shown == dict.fromkeys(dimensions, 0) | speed["exposed"]
    rates = "seconds", "tokens_per_second_per_gpu", "mfu_percent", "days"
    assert [row[1:] for row in tables["speed"]] == [
        [speed[way][key] for way in ("bound", "estimate")] for key in rates
    ]
    assert tables["terms"] == [
        [row[key] for key in ("resource", "of", "amount", "seconds")] for row in speed["terms"]
    ]


def written(plan: Plan, folder: Path) -> tuple[Path, str]:
    path = folder / "plan.html"
    write_page(plan, path)
    return path, path.read_text()


@pytest.mark.long
def test_the_tables_have_every_number_of_the_plan(plan, tmp_path):
    _, page = written(plan, tmp_path)
    assert_tables_say(page, plan)
    assert all(text in page for text in (*plan.speed.assumptions, *plan.assumptions))
    times = [(row[1], row[2]) for row in tables_of(page)["phases"]]
    assert sum(times[-1]) == pytest.approx(plan.speed.estimate)
    for (start, takes), (after, _) in pairwise(times):
        assert start + takes == pytest.approx(after)


def test_a_page_needs_no_script_and_no_other_file_and_text_of_a_config_is_inert(plan, tmp_path):
    _, page = written(plan, tmp_path)
    page = page.replace(escape(HOSTILE), "")
    outside = r"<(script|link|iframe|img)|\b(src|href)=|@import|https?:|url"
    assert "window.ran" not in page and not re.search(outside, page)


def test_what_does_not_fit_is_said_with_what_would(plan, tmp_path):
    peak, reserve = plan.recording.peak, plan.hardware.reserve.gib
    gpu = replace(plan.hardware.gpu, memory_gib=reserve + peak / 2 / GIB)
    change = Candidate({}, plan.job, "--activation_checkpoint.mode=full", peak // 2, plan.speed)
    small = replace(plan, hardware=replace(plan.hardware, gpu=gpu), changes=[change])
    _, page = written(small, tmp_path)
    assert "not fit" in page and " missing" in page
    times = [plan.speed.estimate, plan.speed.bound]
    assert tables_of(page)["changes"] == [[change.option, peak // 2, *times]]


@pytest.mark.nightly
def test_a_page_of_a_deep_model_on_many_gpus_with_accumulation_stays_small(tmp_path):
    made = planned(4096, "--model.overrides.n_layers=126", "--training.global_batch_size=16384")
    assert made.job.batch.accumulation == 4
    path, page = written(made, tmp_path)
    assert path.stat().st_size < 600_000
    rows = tables_of(page)["phases"]
    assert 200 <= len(rows) <= 400
    # Neighbors that share a row show the fuller one.
    assert max(row[3] for row in rows) == made.recording.peak
    assert sum(row[2] for row in rows) == pytest.approx(made.speed.estimate - rows[0][1])


def test_a_page_that_cannot_be_written_is_one_clear_line(plan, tmp_path):
    with refused("--html", "plan.html", "No such file"):
        write_page(plan, tmp_path / "none" / "plan.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    add = "python3 scripts/environment.py --browser installs it"
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=f"the package playwright is missing; {add}"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip(f"no Chromium is installed; {add}")
    flags = "--no-sandbox --disable-gpu --disable-background-networking --disable-sync"
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=flags.split())
        yield running
        running.close()


@pytest.mark.nightly
def test_in_a_browser_without_scripts_the_mouse_shows_the_plans_numbers(browser, plan, tmp_path):
    path, _ = written(plan, tmp_path)
    page, requests = browser.new_context(java_script_enabled=False, viewport=WINDOW).new_page(), []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert HOSTILE in page.inner_text("body") and requests == [path.as_uri()]
    assert_tables_say(page.content(), plan)

    def shown(place: Any) -> str:
        """Return the title under the mouse: moving there fails where anything else covers it."""
        place.hover()
        return place.locator("title").text_content()

    hits = page.locator("#memory-picture .hit").all()
    for hit, phase in zip(hits, plan.to_json()["memory"]["phases"], strict=True):
        first, *alive = shown(hit).splitlines()
        assert first == f"{phase['phase']}: {phase['live'] / GIB:,.2f} GiB"
        sizes = {kind: size for kind, size in phase["by_kind"].items() if size}
        assert {*alive[:-1]} == {f"{kind}: {n / GIB:,.2f} GiB" for kind, n in sizes.items()}
    hits = page.locator("#speed-picture .hit").all()
    longest = max(hits, key=lambda hit: hit.bounding_box()["width"])
    assert shown(longest) in {
        f"{row[0]}: from {row[1]:.3f} s for {row[2]:.3f} s"
        for row in tables_of(page.content())["phases"]
    }
    squares = page.locator("#mesh-picture rect:not(.node)").all()
    assert shown(squares[5]) == "rank 5: dp_replicate 1 of 2, dp_shard 0 of 2, tp 1 of 2"


@pytest.mark.nightly
def test_a_page_is_no_wider_than_its_window_and_dark_mode_has_a_dark_page(browser, plan, tmp_path):
    path, _ = written(plan, tmp_path)
    brightness = {}
    for scheme in "light", "dark":
        page = browser.new_context(color_scheme=scheme, viewport=WINDOW).new_page()
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= WINDOW["width"]
        color = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", color)))
    assert brightness["dark"] < 150 < 700 < brightness["light"]
