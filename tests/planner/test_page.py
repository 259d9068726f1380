"""The page of a plan: one file with every number of the plan in a table, and in a browser also under the mouse."""

import json
import re
import shutil
from collections.abc import Iterator
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
        by_kind = dict.fromkeys(KINDS, 0) | {"parameters": GIB, "optimizer": 2 * GIB, "activations": activations}
        gathers = [("all-gather", "dp_shard", 4, GIB // 8), ("all-gather", "tp", 2, GIB // 100)]
        reductions = [("reduce-scatter", "dp_shard", 4, GIB // 8)] * phase.startswith("backward")
        alive = {"live": bytes_kept + activations, "by_kind": tuple(by_kind.values())}
        for kind, dimension, ranks, size in gathers:
            collective = Collective(kind, dimension, ranks, "bfloat16", size)
            operations.append(Operation(phase, **alive, collective=collective))
        operations.append(Operation(phase, **alive, flops=flops, dtype="bfloat16", moved=GIB, awaits=True))
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
    return Recording(operations, static, static | {"gradients": 0, "activations": 3 * GIB})


def plan(layers: int = 4, micro_batches: int = 1, world: int = 8) -> dict[str, Any]:
    planned, hardware, recording = (
        job([*TINY, *MESH, DESCRIBED], world),
        load_hardware("h100-80g"),
        step(layers, micro_batches),
    )
    speed = speed_of(recording, planned.layout, hardware, tokens_per_step=10**6)
    return Plan(planned, hardware, recording, speed, flops_per_token=10**6, tokens=10**12).to_json()


def tables_of(page: str) -> dict[str | None, list[list[Any]]]:
    """Return the cells of a page's tables: exact values of numbers, texts of others."""
    found = map(ElementTree.fromstring, re.findall(r"<table .*?</table>", page, re.DOTALL))
    return {table.get("id"): [[*map(cell, row)] for row in table.iterfind("tbody/tr")] for table in found}


def cell(element: ElementTree.Element) -> Any:
    number = element.find("data")
    return "".join(element.itertext()) if number is None else float(number.get("value", ""))


def assert_tables_say(page: str, plan: dict[str, Any]) -> None:
    """Compare every number of the tables with the plan's JSON."""
    tables, memory, speed = tables_of(page), plan["memory"], plan["speed"]
    phases = [
        [phase["phase"], phase["live"], *(phase["by_kind"][kind] for kind in STACK)] for phase in memory["phases"]
    ]
    assert [[row[0], *row[3:]] for row in tables["phases"]] == phases
    at_peak = [[kind, memory["at_peak"][kind], memory["static"].get(kind, 0)] for kind in reversed(STACK)]
    assert tables["at_peak"] == [*at_peak, ["together", memory["peak"], sum(memory["static"].values())]]
    keys = "dimension", "kind", "dtype", "where", "ranks", "number", "bytes"
    assert tables["communication"] == [[row[key] for key in keys] for row in plan["communication"]]
    rate = "seconds", "tokens_per_second_per_gpu", "mfu_percent", "days"
    assert tables["rates"] == [[name, *(speed[name][key] for key in rate)] for name in ("estimate", "bound")]
    assert tables["terms"] == [
        [row[key] for key in ("resource", "of", "amount", "seconds")] for row in speed["terms"]
    ]
    assert tables["exposed"] == [[name, seconds] for name, seconds in speed["exposed"].items()]


def written(plan: dict[str, Any], folder: Path) -> tuple[Path, str]:
    path = folder / "plan.html"
    write_page(plan, path)
    return path, path.read_text()


def test_the_tables_have_every_number_of_the_plan(tmp_path):
    made = plan()
    _, page = written(made, tmp_path)
    assert_tables_say(page, made)
    assert all(text in page for text in made["speed"]["assumptions"] + made["memory"]["assumptions"])
    times = [(row[1], row[2]) for row in tables_of(page)["phases"]]
    assert times[0][0] > 0 and sum(times[-1]) == pytest.approx(made["speed"]["estimate"]["seconds"])
    assert all(start + takes == pytest.approx(after) for (start, takes), (after, _) in pairwise(times))


def test_a_page_needs_no_other_file_and_text_of_a_config_is_inert(tmp_path):
    _, page = written(plan(), tmp_path)
    assert not re.search(
        r"<(link|iframe|img|object)|\b(src|href)=|@import|https?:|url\((?!#)", page.replace(" src=x onerror", "")
    )
    assert "window.ran" in page and "<script>window" not in page and "<img" not in page


def test_what_does_not_fit_is_said_with_what_would(tmp_path):
    change = {"overrides": ["--activation_checkpoint.mode=full"], "peak": 5 * GIB, "bound": 0.5, "estimate": 1.5}
    made = plan() | {"changes": [change]}
    made["memory"] |= {"fits": False, "peak": 90 * GIB}
    _, page = written(made, tmp_path)
    assert "Does not fit" in page and "14.90 GiB are missing" in page
    assert tables_of(page)["changes"] == [["--activation_checkpoint.mode=full", 5 * GIB, 1.5, 0.5]]
    made["memory"] |= {"at_most": True}  # of a compiled model
    assert "May not fit" in written(made, tmp_path)[1]


def test_a_page_of_a_deep_model_on_many_gpus_with_accumulation_stays_small(tmp_path):
    made = plan(layers=126, micro_batches=4, world=4096)
    path, page = written(made, tmp_path)
    assert path.stat().st_size < 400_000
    rows = tables_of(page)["phases"]
    assert 200 <= len(rows) <= 400
    assert max(row[3] for row in rows) == made["memory"]["peak"]  # neighbors that share a row show the fuller one
    assert sum(row[2] for row in rows) == pytest.approx(made["speed"]["estimate"]["seconds"] - rows[0][1])


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="--html .*plan.html can't be written: No such file"):
        write_page(plan(), tmp_path / "none" / "plan.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    add = "python3 scripts/environment.py --browser installs it"
    playwright = pytest.importorskip("playwright.sync_api", reason=f"the package playwright is missing; {add}")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip(f"no Chromium is installed; {add}")
    flags = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=flags.split())
        yield running
        running.close()


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    return make_plan(job([*TINY, *MESH, DESCRIBED], 8), load_hardware("h100-80g"), tokens=1e9).to_json()


@pytest.mark.long
def test_in_a_browser_the_mouse_shows_the_plans_numbers(browser, rehearsed, tmp_path):
    path, _ = written(rehearsed, tmp_path)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert HOSTILE in page.inner_text("body") and page.evaluate("window.ran") is None

    def tip() -> dict[str, str]:
        rows = (row.inner_text().split("\t") for row in page.locator("#tip tr").all())
        return {"title": page.inner_text("#tip b"), **dict(rows)}

    phases = rehearsed["memory"]["phases"]
    for hit, phase in zip(page.locator(".hit").all(), phases, strict=True):
        hit.hover()
        shown = tip()
        alive = {kind: size for kind, size in phase["by_kind"].items() if size}
        assert shown["title"] == phase["phase"] and {*shown} & {*KINDS} == {*alive}
        assert all(shown[kind] == f"{size / GIB:,.2f} GiB" for kind, size in alive.items())
        assert shown["together"] == f"{phase['live'] / GIB:,.2f} GiB"

    lanes, end = page.locator(".wide svg"), rehearsed["speed"]["estimate"]["seconds"]
    span = max(
        (s for s in rehearsed["speed"]["spans"] if s["what"].startswith("backward")),
        key=lambda s: s["end"] - s["start"],
    )
    box = lanes.bounding_box()
    lanes.hover(position={"x": box["width"] * (span["start"] + span["end"]) / 2 / end, "y": 5})
    assert tip()["title"] == span["what"]
    page.click("button:has-text('4×')")
    assert lanes.bounding_box()["width"] == pytest.approx(4 * box["width"])
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280

    page.locator("[data-rank='5']").hover()
    assert tip() == {"title": "rank 5", "dp_replicate": "1 of 2", "dp_shard": "0 of 2", "tp": "1 of 2"}
    colors = [square.get_attribute("class") for square in page.locator("[data-rank]").all()]
    assert colors == ["", "dimension0", "", "", "dimension2", "compute", "", "dimension1"]

    assert requests == [path.as_uri()] and not complaints


@pytest.mark.long
def test_the_tables_need_no_script_and_dark_mode_has_a_dark_page(browser, rehearsed, tmp_path):
    path, _ = written(rehearsed, tmp_path)
    brightness = {}
    for scheme in "light", "dark":
        page = browser.new_context(java_script_enabled=False, color_scheme=scheme).new_page()
        page.goto(path.as_uri())
        assert_tables_say(page.content(), rehearsed)
        assert page.locator("#communication").is_visible()
        color = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", color)))
    assert brightness["dark"] < 150 < 700 < brightness["light"]
