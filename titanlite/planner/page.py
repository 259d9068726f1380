"""A plan as one HTML file that needs no other and no script: pictures over the tables that
`titanlite plan` prints.

The pictures are SVG, made here; hovering shows their titles. page.html has the style.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from titanlite.layout import DIMENSIONS, Layout
from titanlite.observe.page import Number, Table, html_table, write_html
from titanlite.planner.hardware import GIB
from titanlite.planner.plan import Plan, phases_of
from titanlite.planner.speed import LANES, SENDS
from titanlite.planner.tables import gib, heading, tables

STACK = "optimizer parameters buffers gradients gathered communication activations logits".split()
"""Kinds of memory from the bottom of the stack: lasting ones are below temporary ones."""
WIDTH, HEIGHT = 1000, 300
MOST_COLUMNS, MOST_NODES, SQUARE = 400, 64, 12
Row = dict[str, Any]


def write_page(plan: Plan, path: Path) -> None:
    """Write the page of a plan."""
    title, step, verdict = heading(plan)
    phases = [*_phases(plan)]
    hardware = plan.hardware
    node = hardware.node
    links = (
        f"<p>In a node {node.link:g} GB/s of each GPU, "
        f"between nodes {node.nics} x {hardware.nic:g} GB/s.</p>"
    )
    pictures = {
        "memory": _legend(STACK) + _draw_memory(plan, phases),
        "communication": draw_mesh(plan.job.layout, node.gpus) + links,
        "speed": _legend(_lanes(plan)) + _draw_lanes(plan, phases),
    }
    parts = [f"<p>{escape(plan.job.config.job.description)}</p><p>{escape(step)}</p>"]
    state = "fits" if plan.fits else "over"
    parts.append(f'<p id="verdict" class="{state}">{escape(verdict)}</p>')
    for table in tables(plan):
        parts.append(html_table(table, pictures.get(table.name, "")))
    header = ("phase", "starts, s", "takes, s", "GiB together", *STACK)
    rows = [
        (
            p["phase"],
            Number(p["start"], 3),
            Number(p["seconds"], 3),
            *(gib(p[key]) for key in ("live", *STACK)),
        )
        for p in phases
    ]
    parts.append(
        "<details><summary>Every phase</summary>"
        f"{html_table(Table('phases', '', header, rows))}</details>"
    )
    write_html(path, f"Plan of {title}", "\n".join(parts))


def _phases(plan: Plan) -> Iterator[Row]:
    """Yield memory and time of the phases; of very many, neighbors share a row, with the fuller
    one's memory.
    """
    phases, starts = [*phases_of(plan.recording)], [0.0]
    for start in plan.speed.starts:
        starts.append(starts[-1] if start is None else start)
    starts = [*starts[1:], _end(plan)]
    each = ceil(len(phases) / MOST_COLUMNS)
    for first in range(0, len(phases), each):
        chunk = phases[first : first + each]
        fullest = max(chunk, key=lambda phase: phase["live"])
        name = " to ".join(dict.fromkeys([chunk[0]["phase"], chunk[-1]["phase"]]))
        start = starts[first]
        seconds = starts[first + len(chunk)] - start
        when = f"from {start:.3f} s for {seconds:.3f} s"
        memory = {**dict.fromkeys(STACK, 0), **fullest["by_kind"], "live": fullest["live"]}
        yield {"phase": name, "start": start, "seconds": seconds, "when": when, **memory}


def _end(plan: Plan) -> float:
    return max((span.end for span in plan.speed.spans), default=0.0)


def _svg(name: str, parts: Iterable[str], height: float, label: str) -> str:
    head = (
        f'<svg id="{name}-picture" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    )
    return f"{head}{''.join(parts)}</svg>"


def _legend(names: Iterable[str]) -> str:
    entries = (f"<span><i class={name.replace(' ', '')}></i>{name}</span>" for name in names)
    return f"<p>{' '.join(entries)}</p>"


def _draw_memory(plan: Plan, phases: Sequence[Row]) -> str:
    """Draw the bytes alive by kind, a column for each phase, below the GPU's limit."""
    peak, usable = plan.recording.peak, plan.hardware.usable_bytes
    top = 1.05 * peak
    if peak > usable / 5:
        top = max(top, usable)
    scale, width = HEIGHT / top, WIDTH / len(phases)
    parts, low = [], [HEIGHT] * len(phases)
    for kind in STACK:
        high = [below - phase[kind] * scale for below, phase in zip(low, phases, strict=True)]
        over = "".join(f"V{y:.1f}H{(n + 1) * width:.1f}" for n, y in enumerate(high))
        under = "".join(f"V{y:.1f}H{n * width:.1f}" for n, y in reversed([*enumerate(low)]))
        parts.append(f'<path class="{kind}" d="M0,{low[0]:.1f}{over}{under}Z"/>')
        low = high
    y = max(HEIGHT - usable * scale, 0)
    far = "" if usable <= top else ", far above"
    parts.append(f'<rect x="0" y="{y:g}" width="{WIDTH}" height="1" class="limit"></rect>')
    parts.append(
        f'<text x="4" y="{y + 14:g}" text-anchor="start">{usable / GIB:.2f} GiB usable{far}</text>'
    )
    x = 0.0
    for name, group in groupby(phases, key=lambda phase: phase["phase"].rstrip("0123456789 ")):
        wide = len([*group]) * width
        if wide > 60:
            parts.append(
                f'<text x="{x + wide / 2:g}" y="{HEIGHT + 16}" text-anchor="middle">{name}</text>'
            )
        x += wide
    for n, phase in enumerate(phases):
        alive = "".join(
            f"\n{kind}: {gib(phase[kind])} GiB" for kind in reversed(STACK) if phase[kind]
        )
        title = f"{phase['phase']}: {gib(phase['live'])} GiB{alive}\n{phase['when']}"
        parts.append(_hit(n * width, width, HEIGHT, title))
    return _svg(
        "memory", parts, HEIGHT + 24, f"Memory over the phases of a step, at most {gib(peak)} GiB"
    )


def _hit(x: float, width: float, height: float, title: str) -> str:
    """Return an area that shows a title under the mouse."""
    area = f'x="{x:g}" y="0" width="{width:g}" height="{height}"'
    return f'<rect {area} class="hit"><title>{escape(title)}</title></rect>'


def _lanes(plan: Plan) -> list[str]:
    return [*LANES, *([SENDS] if any(span.lane == SENDS for span in plan.speed.spans) else [])]


def _draw_lanes(plan: Plan, phases: Sequence[Row]) -> str:
    """Draw when each lane is busy, and when compute waits."""
    lanes = _lanes(plan)
    end, height = _end(plan), 40 * len(lanes)
    busy = defaultdict[str, list[list[float]]](list)
    for span in sorted(plan.speed.spans, key=lambda span: span.start):
        start, stop = WIDTH * span.start / end, WIDTH * span.end / end
        line = busy[span.lane]
        if line and start - line[-1][1] < 0.1:  # too near to be seen apart
            line[-1][1] = max(stop, line[-1][1])
        else:
            line.append([start, stop])
    parts = []
    for lane, name in enumerate(lanes):
        boxes = ((start, max(stop - start, 0.3)) for start, stop in busy[name])
        path = "".join(f"M{x:.2f},{40 * lane}h{width:.2f}v30h{-width:.2f}z" for x, width in boxes)
        parts.append(f'<path class="{name}" d="{path}"/>')
    for n, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        place = f'x="{WIDTH * n / 4:g}" y="{height + 8}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{end * n / 4:.2f} s</text>")
    for phase in phases:
        if width := WIDTH * phase["seconds"] / end:
            title = f"{phase['phase']}: {phase['when']}"
            parts.append(_hit(WIDTH * phase["start"] / end, width, height, title))
    return _svg("speed", parts, height + 12, "When a GPU computes, gathers, reduces, and waits")


def _split(layout: Layout) -> list[str]:
    return [name for name in DIMENSIONS if getattr(layout, name) > 1]


def draw_mesh(layout: Layout, gpus: int) -> str:
    """Draw nodes as boxes and ranks as squares; colored are rank 0 and the ranks that share a group
    with it.
    """
    parts = []
    across = ceil((2 * gpus) ** 0.5)
    width, height = SQUARE * across + 8, SQUARE * ceil(gpus / across) + 8
    # A power of two, so that groups end where rows do.
    in_a_row = 1 << (int(WIDTH // (width + 8)).bit_length() - 1)
    nodes = ceil(layout.world / gpus)
    drawn = min(nodes, MOST_NODES)
    split = _split(layout)
    for rank in range(min(layout.world, drawn * gpus)):
        number, place = divmod(rank, gpus)
        x, y = number % in_a_row * (width + 8), number // in_a_row * (height + 8)
        if not place:
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="node"></rect>'
            )
        at = layout.coordinates(rank)
        differs = [name for name in split if at[name]]
        color = "rank"
        if len(differs) < 2:
            color = "".join(differs) or "rank0"
        title = ", ".join(f"{name} {at[name]} of {getattr(layout, name)}" for name in split)
        x += place % across * SQUARE + 5
        y += place // across * SQUARE + 5
        square = f'x="{x}" y="{y}" width="{SQUARE - 2}" height="{SQUARE - 2}" class="{color}"'
        parts.append(f"<rect {square}><title>rank {rank}: {title}</title></rect>")
    legend = _legend(["rank 0", *split])
    picture = _svg("mesh", parts, ceil(drawn / in_a_row) * (height + 8), f"{nodes} nodes")
    more = (
        f"<p>The other {nodes - MOST_NODES:,} nodes are not drawn.</p>"
        if nodes > MOST_NODES
        else ""
    )
    return f"{legend}{picture}{more}"
