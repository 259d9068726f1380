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
from titanlite.errors import UserError
from titanlite.planner.hardware import load_hardware
from titanlite.planner.page import STACK, write_page
from titanlite.planner.plan import Plan, make_plan
from titanlite.planner.record import KINDS, Collective, Operation, Recording
from titanlite.planner.search import Candidate
from titanlite.planner.speed import speed_of

GIB = 1 << 30
DEGREES = ("data_parallel_replicate_degree", "tensor_parallel_degree")
MESH = ["--model.overrides.n_kv_heads=2", *(f"--parallelism.{degree}=2" for degree in DEGREES)]
HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> \" & ${tiles}"
DESCRIBED = f"--job.description={json.dumps(HOSTILE)}"


def step(layers: int, micro_batches: int) -> Recording:
    """Return a step as FSDP with tensor parallel would make it; its bytes are those of no model."""
    operations, bytes_kept = [], 3 * GIB

    def add(phase: str, activations: int, flops: int) -> None:
        by_kind = dict.fromkeys(KINDS, 0) | {
            "parameters": GIB,
            "optimizer": 2 * GIB,
            "activations": activations,
        }
        gathers = [("all-gather", "dp_shard", 4, GIB // 8), ("all-gather", "tp", 2, GIB // 100)]
        reductions = [("reduce-scatter", "dp_shard", 4, GIB // 8)] * phase.startswith("backward")
        alive = {"live": bytes_kept + activations, "by_kind": tuple(by_kind.values())}
        for kind, dimension, ranks, size in gathers:
            collective = Collective(kind, dimension, ranks, "bfloat16", size)
            operations.append(Operation(phase, **alive, collective=collective))
        operations.append(
            Operation(phase, **alive, flops=flops, dtype="bfloat16", moved=GIB, awaits=True)
        )
        for kind, dimension, ranks, size in reductions:
            collective = Collective(kind, dimension, ranks, "float32", size)
            operations.append(Operation(phase, **alive, collective=collective))

    for _ in range(micro_batches):
        for layer in range(layers):
            add(f"forward {layer}", (layer + 1) * GIB // layers, 10**13)
        add("head", 3 * GIB, 10**12)
        for layer in reversed(range(layers)):
            add(f"backward {layer}", (layer + 2) * GIB // layers, 2 * 10**13)
    static = {"parameters": GIB, "optimizer": 2 * GIB, "gradients": GIB, "buffers": 0}
    return Recording(operations, static)


def plan(
    layers: int = 4, micro_batches: int = 1, world: int = 8, usable: float = 75.1, *options: str
) -> Plan:
    planned, recording = (
        job([*TINY, *MESH, DESCRIBED, *options], world),
        step(layers, micro_batches),
    )
    h100 = load_hardware("h100-80g")
    hardware = replace(h100, gpu=replace(h100.gpu, memory_gib=usable + h100.reserve.gib))
    speed = speed_of([recording], planned.layout, hardware, tokens_per_step=10**6)[0]
    return Plan(planned, hardware, recording, speed, flops_per_token=10**6, tokens=10**12)


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
    phases = [
        [phase["phase"], phase["live"], *(phase["by_kind"][kind] for kind in STACK)]
        for phase in memory["phases"]
    ]
    assert [[row[0], *row[3:]] for row in tables["phases"]] == phases
    kinds = [(kind, memory["at_peak"][kind], memory["static"].get(kind, 0)) for kind in KINDS]
    rows = [[*row] for row in kinds if any(row[1:])]
    assert tables["memory"] == [
        *rows,
        [f"peak, in {memory['moment']}", memory["peak"], sum(memory["static"].values())],
    ]
    keys = "dimension", "kind", "dtype", "where", "number", "bytes"
    assert [row[:6] for row in tables["communication"]] == [
        [row[key] for key in keys] for row in found["communication"]
    ]
    assert {row[0]: row[6] for row in tables["communication"] if row[6] == row[6]} == speed[
        "exposed"
    ]
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


def test_the_tables_have_every_number_of_the_plan(tmp_path):
    made = plan()
    _, page = written(made, tmp_path)
    assert_tables_say(page, made)
    assert all(text in page for text in (*made.speed.assumptions, *made.assumptions))
    times = [(row[1], row[2]) for row in tables_of(page)["phases"]]
    assert times[0][0] > 0 and sum(times[-1]) == pytest.approx(made.speed.estimate)
    assert all(
        start + takes == pytest.approx(after) for (start, takes), (after, _) in pairwise(times)
    )


def test_a_page_needs_no_script_and_no_other_file_and_text_of_a_config_is_inert(tmp_path):
    _, page = written(plan(), tmp_path)
    page = page.replace(escape(HOSTILE), "")
    assert "window.ran" not in page and not re.search(
        r"<(script|link|iframe|img)|\b(src|href)=|@import|https?:|url", page
    )


def test_what_does_not_fit_is_said_with_what_would(tmp_path):
    made = plan(usable=5)
    (change,) = [Candidate({}, made.job, "--activation_checkpoint.mode=full", 5 * GIB, made.speed)]
    _, page = written(replace(made, changes=[change]), tmp_path)
    assert "It does not fit" in page and "1.00 missing" in page
    times = [made.speed.estimate, made.speed.bound]
    assert tables_of(page)["changes"] == [["--activation_checkpoint.mode=full", 5 * GIB, *times]]
    assert "It does not fit" in written(plan(4, 1, 8, 5, "--compile.enable"), tmp_path)[1]


def test_a_page_of_a_deep_model_on_many_gpus_with_accumulation_stays_small(tmp_path):
    made = plan(layers=126, micro_batches=4, world=4096)
    path, page = written(made, tmp_path)
    assert path.stat().st_size < 500_000
    rows = tables_of(page)["phases"]
    assert 200 <= len(rows) <= 400
    assert (
        max(row[3] for row in rows) == made.recording.peak
    )  # neighbors that share a row show the fuller one
    assert sum(row[2] for row in rows) == pytest.approx(made.speed.estimate - rows[0][1])


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="--html .*plan.html can't be written: No such file"):
        write_page(plan(), tmp_path / "none" / "plan.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    add = "python3 scripts/environment.py --browser installs it"
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=f"the package playwright is missing; {add}"
    )
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip(f"no Chromium is installed; {add}")
    flags = (
        "--no-sandbox --disable-gpu --disable-background-networking "
        "--disable-component-update --disable-sync"
    )
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=flags.split())
        yield running
        running.close()


@pytest.fixture(scope="module")
def rehearsed() -> Plan:
    return make_plan(job([*TINY, *MESH, DESCRIBED], 8), load_hardware("h100-80g"), tokens=1e9)


@pytest.mark.long
def test_in_a_browser_without_scripts_the_mouse_shows_the_plans_numbers(
    browser, rehearsed, tmp_path
):
    path, _ = written(rehearsed, tmp_path)
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": 1280, "height": 900}
    )
    page, requests = context.new_page(), []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert HOSTILE in page.inner_text("body") and requests == [path.as_uri()]
    assert_tables_say(page.content(), rehearsed)

    def shown(place: Any) -> str:
        """Return the title under the mouse: moving there fails where anything else covers it."""
        place.hover()
        return place.locator("title").text_content()

    hits = page.locator("#memory-picture .hit").all()
    for hit, phase in zip(hits, rehearsed.to_json()["memory"]["phases"], strict=True):
        first, *alive = shown(hit).splitlines()
        assert first == f"{phase['phase']}: {phase['live'] / GIB:,.2f} GiB"
        assert {*alive[:-1]} == {
            f"{kind}: {n / GIB:,.2f} GiB" for kind, n in phase["by_kind"].items() if n
        }
    longest = max(
        page.locator("#speed-picture .hit").all(), key=lambda hit: hit.bounding_box()["width"]
    )
    taken = {
        f"{row[0]}: from {row[1]:.3f} s for {row[2]:.3f} s"
        for row in tables_of(page.content())["phases"]
    }
    assert shown(longest) in taken
    squares = page.locator("#mesh-picture rect:not(.node)").all()
    assert shown(squares[5]) == "rank 5: dp_replicate 1 of 2, dp_shard 0 of 2, tp 1 of 2"
    colors = [square.get_attribute("class") for square in squares]
    assert colors == "rank0 tp dp_shard rank dp_replicate rank rank rank".split()


@pytest.mark.long
def test_a_page_is_no_wider_than_its_window_and_dark_mode_has_a_dark_page(
    browser, rehearsed, tmp_path
):
    path, _ = written(rehearsed, tmp_path)
    brightness = {}
    for scheme in "light", "dark":
        page = browser.new_context(
            color_scheme=scheme, viewport={"width": 1280, "height": 900}
        ).new_page()
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        color = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", color)))
    assert brightness["dark"] < 150 < 700 < brightness["light"]
