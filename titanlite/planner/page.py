"""A plan as one HTML file that needs no other and no script: pictures over the tables that `titanlite plan` prints.

The pictures are SVG, made here; hovering shows their titles. page.html has the style.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import ceil
from pathlib import Path
from string import Template
from typing import Any

from titanlite.errors import UserError
from titanlite.layout import DIMENSIONS
from titanlite.planner.hardware import GIB
from titanlite.planner.plan import Plan, phases_of
from titanlite.planner.speed import LANES, Span
from titanlite.planner.tables import Number, Table, gib, heading, tables

STACK = "optimizer parameters buffers gradients gathered communication activations logits".split()
"""Kinds of memory from the bottom of the stack: lasting ones are below temporary ones."""
WIDTH, HEIGHT = 1000, 300
MOST_COLUMNS, MOST_NODES, SQUARE = 400, 64, 12
Row = dict[str, Any]


def write_page(plan: Plan, path: Path) -> None:
    """Write the page of a plan."""
    try:
        path.write_text(render(plan), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path} can't be written: {error.strerror}") from error


def render(plan: Plan) -> str:
    """Return the page."""
    title, step, verdict = map(escape, heading(plan))
    phases = [*_phases(plan)]
    pictures = {
        "memory": _legend(STACK) + _draw_memory(plan, phases),
        "communication": _legend(["rank 0", *_split(plan)]) + _draw_mesh(plan),
        "speed": _legend(LANES) + _draw_lanes(plan, phases),
    }
    parts = [f"<p>{escape(plan.job.config.job.description)}</p><p>{step}</p>"]
    parts.append(f'<p id="verdict" class="{"fits" if plan.fits else "over"}">{verdict}</p>')
    for table in tables(plan):
        parts += [f"<h2>{escape(table.title)}</h2>", pictures.get(table.name, ""), _html(table)]
    header = ("phase", "starts, s", "takes, s", "GiB together", *STACK)
    rows = [
        (p["phase"], Number(p["start"], 3), Number(p["seconds"], 3), *(gib(p[key]) for key in ("live", *STACK)))
        for p in phases
    ]
    parts.append(f"<details><summary>Every phase</summary>{_html(Table('phases', '', header, rows))}</details>")
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(title=title, body="\n".join(parts))


def _html(table: Table) -> str:
    """Return a table, numbers with their exact values."""

    def cell(value: str | Number) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        return f'<td><data value="{value.value}">{value}</data></td>'

    heads = "".join(f"<th>{escape(head)}</th>" for head in table.header)
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    notes = [table.note, *(f"assumed: {text}" for text in table.assumed)]
    return "".join(
        [
            f'<table id="{table.name}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>' if rows else "",
            *(f'<p class="note">{escape(note)}</p>' for note in notes if note),
        ]
    )


def _phases(plan: Plan) -> Iterator[Row]:
    """Yield memory and time of the phases; of very many, neighbors share a row, with the fuller one's memory."""
    phases, starts = [*phases_of(plan.recording)], [0.0]
    names = {phase["phase"] for phase in phases}
    computing = [span for span in plan.speed.spans if span.what in names]
    visits = [(what, next(group).start) for what, group in groupby(computing, key=lambda span: span.what)]
    for phase in phases:
        starts.append(visits.pop(0)[1] if visits and visits[0][0] == phase["phase"] else starts[-1])
    starts = [*starts[1:], _end(plan)]
    each = ceil(len(phases) / MOST_COLUMNS)
    for first in range(0, len(phases), each):
        chunk = phases[first : first + each]
        fullest = max(chunk, key=lambda phase: phase["live"])
        name = " to ".join(dict.fromkeys([chunk[0]["phase"], chunk[-1]["phase"]]))
        seconds = starts[first + len(chunk)] - starts[first]
        memory = {kind: fullest["by_kind"].get(kind, 0) for kind in STACK}
        yield {"phase": name, "live": fullest["live"], "start": starts[first], "seconds": seconds, **memory}


def _end(plan: Plan) -> float:
    return max((span.end for span in plan.speed.spans), default=0.0)


def _svg(name: str, parts: Sequence[str], height: float, label: str) -> str:
    head = f'<svg id="{name}-picture" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _box(x: float, y: float, width: float, height: float, color: str, title: str = "") -> str:
    """Return a rectangle, with what the mouse shows over it."""
    about = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{color}">{about}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str]) -> str:
    return f"<p>{' '.join(f'<span><i class={_color(name)}></i>{escape(name)}</span>' for name in names)}</p>"


def _color(name: str) -> str:
    return name.replace(" ", "")


def _draw_memory(plan: Plan, phases: Sequence[Row]) -> str:
    """Draw the bytes alive by kind, a column for each phase, below the GPU's limit."""
    peak, usable = plan.recording.peak, plan.hardware.usable_bytes
    top = max(1.05 * peak, usable if peak > usable / 5 else 0)
    scale, width = HEIGHT / top, WIDTH / len(phases)
    parts, low = [], [HEIGHT] * len(phases)
    for kind in STACK:
        high = [below - phase[kind] * scale for below, phase in zip(low, phases, strict=True)]
        over = "".join(f"V{y:.1f}H{(n + 1) * width:.1f}" for n, y in enumerate(high))
        under = "".join(f"V{y:.1f}H{n * width:.1f}" for n, y in reversed([*enumerate(low)]))
        parts.append(f'<path class="{kind}" d="M0,{low[0]:.1f}{over}{under}Z"/>')
        low = high
    y, far = HEIGHT - usable * scale, "" if usable <= top else ", far above"
    parts.append(
        _box(0, max(y, 0), WIDTH, 1, "limit") + _text(4, max(y, 0) + 14, f"{usable / GIB:.2f} GiB usable{far}")
    )
    x = 0
    for name, group in groupby(phases, key=lambda phase: phase["phase"].rstrip("0123456789 ")):
        columns = len([*group])
        parts.append(_text((x + columns / 2) * width, HEIGHT + 16, name, "middle") if columns * width > 60 else "")
        x += columns
    for n, phase in enumerate(phases):
        alive = "".join(f"\n{kind}: {gib(phase[kind])} GiB" for kind in reversed(STACK) if phase[kind])
        times = f"\nstarts at {phase['start']:.3f} s, takes {phase['seconds']:.3f} s"
        title = f"{phase['phase']}: {gib(phase['live'])} GiB{alive}{times}"
        parts.append(_box(n * width, 0, width, HEIGHT, "hit", title))
    return _svg("memory", parts, HEIGHT + 24, f"Memory over the phases of a step, at most {gib(peak)} GiB")


def _draw_lanes(plan: Plan, phases: Sequence[Row]) -> str:
    """Draw when each lane is busy, and when compute waits."""
    end, boxes = _end(plan), dict[str, list[list[float]]]()
    spans = [*plan.speed.spans, *_waiting(plan.speed.spans)]
    for span in sorted(spans, key=lambda span: span.start):
        start, stop = (WIDTH * second / end for second in (span.start, span.end))
        line = boxes.setdefault(span.lane, [])
        if line and start - line[-1][1] < 0.1:  # too near to be seen apart
            line[-1][1] = max(stop, line[-1][1])
        else:
            line.append([start, stop])
    parts = []
    for lane, name in enumerate(LANES):
        path = "".join(
            f"M{a:.2f},{40 * lane}h{max(b - a, 0.3):.2f}v30h{-max(b - a, 0.3):.2f}z" for a, b in boxes.get(name, [])
        )
        parts.append(f'<path class="{name}" d="{path}"/>')
    for n in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[n]
        parts.append(_text(WIDTH * n / 4, 40 * len(LANES) + 8, f"{end * n / 4:.2f} s", anchor))
    for phase in phases:
        x, width = (WIDTH * phase[key] / end for key in ("start", "seconds"))
        title = f"{phase['phase']}: from {phase['start']:.3f} s for {phase['seconds']:.3f} s"
        parts.append(_box(x, 0, width, 40 * len(LANES), "hit", title) if width else "")
    return _svg("speed", parts, 40 * len(LANES) + 12, "When a GPU computes, gathers, reduces, and waits")


def _waiting(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield when compute waits for a lane."""
    now = 0.0
    for span in sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start):
        if span.start > now:
            yield Span("waiting", "", now, span.start)
        now = max(now, span.end)


def _split(plan: Plan) -> list[str]:
    return [name for name in DIMENSIONS if getattr(plan.job.layout, name) > 1]


def _draw_mesh(plan: Plan) -> str:
    """Draw nodes as boxes and ranks as squares; colored are rank 0 and the ranks that share a group with it."""
    layout, node, parts = plan.job.layout, plan.hardware.node, []
    across = ceil((2 * node.gpus) ** 0.5)
    width, height = SQUARE * across + 8, SQUARE * ceil(node.gpus / across) + 8
    in_a_row = 1 << (int(WIDTH // (width + 8)).bit_length() - 1)  # a power of two, so that groups end where rows do
    nodes = ceil(layout.world / node.gpus)
    for rank in range(min(layout.world, MOST_NODES * node.gpus)):
        down, right = divmod(rank // node.gpus, in_a_row)
        left, top = right * (width + 8), down * (height + 8)
        if rank % node.gpus == 0:
            parts.append(_box(left, top, width, height, "node"))
        row, column = divmod(rank % node.gpus, across)
        places = layout.coordinates(rank)
        differs = [name for name, place in places.items() if place]
        color = ["rank0", *differs][len(differs)] if len(differs) < 2 else "rank"
        title = f"rank {rank}: " + ", ".join(
            f"{name} {places[name]} of {getattr(layout, name)}" for name in _split(plan)
        )
        parts.append(_box(left + SQUARE * column + 5, top + SQUARE * row + 5, SQUARE - 2, SQUARE - 2, color, title))
    rows = ceil(min(nodes, MOST_NODES) / in_a_row)
    more = f"<p>The other {nodes - MOST_NODES:,} nodes are not drawn.</p>" if nodes > MOST_NODES else ""
    links = f"In a node {node.link:g} GB/s of each GPU, between nodes {node.nics} x {plan.hardware.nic:g} GB/s."
    return _svg("mesh", parts, rows * (height + 8), f"{nodes} nodes") + f"{more}<p>{escape(links)}</p>"
