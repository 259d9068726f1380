"""A plan as one HTML file that needs no other: pictures that answer the mouse, and every number in a table as well.

The pictures are SVG, made here. page.html has the style, and a script that shows the table's row under the mouse.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, groupby, pairwise
from math import ceil, log2, log10, sqrt
from pathlib import Path
from string import Template
from typing import Any

from titanlite.errors import UserError
from titanlite.layout import DIMENSIONS, Layout

GIB = 1 << 30
STACK = "optimizer parameters buffers gradients gathered communication activations logits".split()
"""Kinds of memory from the bottom of the stack: what stays is below what comes and goes."""
LANES = "compute", "gathers", "reductions", "waiting"
COLUMNS: dict[str, Sequence[tuple[Any, ...]]] = {
    "changes": [("What would fit, each rehearsed as well", "change"), ("peak, GiB", "peak", 2, GIB),
                ("a step, s", "estimate", 3), ("at least", "bound", 3)],
    "at_peak": [("GiB", "kind"), ("at the peak", "peak", 2, GIB), ("static", "static", 2, GIB)],
    "rates": [("", "name"), ("s a step", "seconds", 3), ("tokens/s of a GPU", "tokens_per_second_per_gpu", 0),
              ("MFU, %", "mfu_percent", 1), ("days", "days", 1)],
    "terms": [("parts of the bound", "resource"), ("of", "of"), ("TFLOP or GB", "shown", None),
              ("s a step", "seconds", 3)],
    "communication": [("dimension", "dimension"), ("collective", "kind"), ("type", "dtype"), ("links", "where"),
                      ("ranks", "ranks", 0), ("a step", "number", 0), ("GiB a step", "bytes", 2, GIB)],
    "exposed": [("compute waits for", "name"), ("s a step", "seconds", 3)],
    "phases": [("phase", "phase"), ("starts, s", "start", 3), ("takes, s", "seconds", 3),
               ("together", "live", 2, GIB), *((kind, kind, 2, GIB) for kind in STACK)],
}  # fmt: skip
"""Columns of the tables: the head, the key of the value, and of a number its digits and unit."""
LEFT, RIGHT, TOP, BOTTOM = 30, 820, 16, 300  # axes of the memory's picture
TIME = 100_000  # width of the lanes' picture
MOST_COLUMNS, MOST_NODES = 400, 64
Row = Mapping[str, Any]


class Html(str):
    """Text that is HTML already; any other text is escaped where it is put in."""


def write_page(plan: Row, path: Path) -> None:
    """Write the page of what `Plan.to_json` returned."""
    try:
        path.write_text(render(plan), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path} can't be written: {error.strerror}") from error


def render(plan: Row) -> str:
    """Return the page."""
    job, memory, speed, hardware = plan["job"], plan["memory"], plan["speed"], plan["hardware"]
    layout, node = Layout(**job["layout"]), hardware["node"]
    used = [name for name in DIMENSIONS if getattr(layout, name) > 1]
    groups = dict.fromkeys([*used, *(row["dimension"] for row in plan["communication"])])
    colors = {name: f"dimension{number % 6}" for number, name in enumerate(groups)}
    spans, computing, end = _spans(speed["spans"], colors)
    phases = _phases(memory["phases"], computing, end)
    whole = {"kind": "together", "peak": memory["peak"], "static": sum(memory["static"].values())}
    kinds = ((kind, memory["at_peak"][kind], memory["static"].get(kind, 0)) for kind in reversed(STACK))
    rows = {
        "changes": [{**change, "change": " ".join(change["overrides"])} for change in plan["changes"]],
        "at_peak": [{"kind": _key(name, name), "peak": peak, "static": kept} for name, peak, kept in kinds] + [whole],
        "rates": [{"name": name, **speed[name]} for name in ("estimate", "bound")],
        "terms": [
            {**term, "shown": _cell(term["amount"], 2, 1e12 if term["resource"] == "compute" else 1e9)}
            for term in speed["terms"]
        ],
        "communication": plan["communication"],
        "exposed": [{"name": name, "seconds": seconds} for name, seconds in speed["exposed"].items()],
        "phases": phases,
    }
    parts = {
        "title": f"{job['model']} {job['flavor']} on {job['world']:,} × {hardware['name']}",
        "description": job["description"],
        "verdict": _verdict(memory, hardware["gpu"]["memory_gib"]),
        "tiles": _tiles(plan),
        "memory": _draw_memory(phases, memory, hardware["gpu"]["memory_gib"]),
        "lanes_colors": _legend({"compute": "compute", **colors, "waiting": "waiting"}),
        "lanes": _draw_lanes(spans, phases, colors, end),
        "links": _links(layout, node, hardware["nic"]),
        "mesh_colors": _legend({name: colors[name] for name in used}),
        "mesh": _draw_mesh(layout, {name: colors[name] for name in used}, node["gpus"]),
        "assumptions": _join(tag("li", text) for text in [*memory["assumptions"], *speed["assumptions"]]),
        **{name: _table(name, rows[name]) for name in COLUMNS},
    }
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute({name: _html(part) for name, part in parts.items()})


def tag(name: str, *children: str, **attributes: object) -> Html:
    """Return an element; `class_` is the attribute class, `data_row` is data-row."""
    written = (f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{''.join(written)}>{_join(children)}</{name}>")


def _html(part: str) -> Html:
    return part if isinstance(part, Html) else Html(escape(part))


def _join(parts: Iterable[str]) -> Html:
    return Html("".join(map(_html, parts)))


def _key(color: str, name: str) -> Html:
    return tag("span", tag("i", class_=color), name)


def _legend(colors: Mapping[str, str]) -> Html:
    return _join(_key(color, name) for name, color in colors.items())


def _table(name: str, rows: Sequence[Row]) -> Html:
    heads = (tag("th", head, scope="col", class_="number" if form else "text") for head, _, *form in COLUMNS[name])
    body = (tag("tr", *(tag("td", _cell(row[key], *form)) for _, key, *form in COLUMNS[name])) for row in rows)
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), id=name) if rows else Html("")


def _cell(value: Any, digits: int | None = None, unit: float = 1) -> str:
    """Return a text, or a number as people read it with its exact value for programs and the script."""
    if digits is None or value is None:
        return "–" if value is None else value
    return tag("data", f"{value / unit:,.{digits}f}", value=value)


def _verdict(memory: Row, gpu_gib: float) -> Html:
    fits, usable, peak = memory["fits"], memory["usable"] / GIB, memory["peak"] / GIB
    need = f"A step needs {'at most ' * memory['at_most']}{peak:,.2f} GiB, in {memory['moment']}."
    left = f"{abs(usable - peak):,.2f} GiB {'stay free' if fits else 'are missing'}"
    text = tag("span", f"{need} A GPU has {gpu_gib:g} GiB, {usable:g} of them usable: {left}.")
    may_fit = memory["at_most"] and sum(memory["static"].values()) <= memory["usable"]
    word, color = ("Fits", "fits") if fits else ("May not fit" if may_fit else "Does not fit", "over")
    return tag("p", tag("strong", word), text, id="verdict", class_=color)


def _links(layout: Layout, node: Row, nic: float) -> str:
    nodes, gpus, nics = ceil(layout.world / node["gpus"]), node["gpus"], node["nics"]
    return (
        f"{layout}, on {nodes:,} node{'s' * (nodes > 1)} of {gpus} GPUs. In a node: {node['link']:g} GB/s of each "
        f"GPU. Between nodes: {nics} NIC{'s' * (nics > 1)} of {nic:g} GB/s in each node."
    )


def _tiles(plan: Row) -> Html:
    """Return the numbers that a decision rests on."""
    memory, bound, estimate = plan["memory"], plan["speed"]["bound"], plan["speed"]["estimate"]
    rate, waits = "tokens_per_second_per_gpu", sum(plan["speed"]["exposed"].values())
    tiles = [
        ("peak memory", f"{memory['peak'] / GIB:,.2f} GiB", f"{memory['usable'] / GIB:g} usable"),
        ("a step", f"{estimate['seconds']:,.2f} s", f"at least {bound['seconds']:,.2f}: {plan['speed']['bound_by']}"),
        ("tokens/s of a GPU", f"{estimate[rate]:,.0f}", f"at most {bound[rate]:,.0f}"),
        ("MFU", f"{estimate['mfu_percent']:.1f} %", f"at most {bound['mfu_percent']:.1f}"),
        ("exposed", f"{100 * waits / estimate['seconds']:.1f} %", f"{waits:,.2f} s of communication"),
    ]
    if estimate["days"]:
        tiles.append(("for all tokens", f"{estimate['days']:,.4g} days", f"at least {bound['days']:,.4g}"))
    return _join(
        tag("div", tag("span", what), tag("b", number), tag("small", limit)) for what, number, limit in tiles
    )


def _spans(spans: Sequence[Row], colors: Mapping[str, str]) -> tuple[list[Row], list[Row], float]:
    """Return the spans with those in which compute waits, those that compute, and the end of the step."""
    computing = [span for span in spans if span["lane"] == "compute" and span["what"] not in colors]
    end = max((span["end"] for span in spans), default=0.0)
    borders = [0.0, *(border for span in computing for border in (span["start"], span["end"])), end]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    waiting = [{"lane": "waiting", "what": "waiting", "start": a, "end": b} for a, b in gaps if b > a]
    return [*spans, *waiting], computing, end


def _phases(phases: Sequence[Row], computing: Sequence[Row], end: float) -> list[Row]:
    """Join memory and time of the phases; of very many, neighbors become one row, with the fuller one's memory."""
    visits = [(what, next(group)["start"]) for what, group in groupby(computing, key=lambda span: span["what"])]
    starts = [0.0]
    for phase in phases:
        starts.append(visits.pop(0)[1] if visits and visits[0][0] == phase["phase"] else starts[-1])
    starts = [*starts[1:], end]
    each, rows = ceil(len(phases) / MOST_COLUMNS), []
    for first in range(0, len(phases), each):
        chunk = phases[first : first + each]
        fullest = max(chunk, key=lambda phase: phase["live"])
        name = " to ".join(dict.fromkeys([chunk[0]["phase"], chunk[-1]["phase"]]))
        times = {"start": starts[first], "seconds": starts[first + len(chunk)] - starts[first]}
        memory = {kind: fullest["by_kind"].get(kind, 0) for kind in STACK}
        rows.append({"phase": name, "live": fullest["live"], **times, **memory})
    return rows


def _parts(phases: Sequence[Row]) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of the step, such as "forward", with their first phase and the one after the last."""
    first = 0
    for name, group in groupby(re.sub(r" \d.*", "", phase["phase"]) for phase in phases):
        yield name, first, (first := first + len([*group]))


def _nice(most: float, ticks: int) -> list[float]:
    """Return about so many round numbers from 0 to the most."""
    power = 10.0 ** (log10(most / ticks) // 1)
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * ticks >= most)
    return [number * step for number in range(int(most / step) + 1)]


def _draw_memory(phases: Sequence[Row], memory: Row, gpu_gib: float) -> Html:
    """Draw the bytes alive by kind, a column for each phase, below the limit of the GPU."""
    # A phase that comes once, such as the head, matters more than one of a hundred layers, and is drawn wider.
    parts = [*_parts(phases)]
    widths = [
        max(1.0, len(phases) / 40) if last - first == 1 else 1.0
        for _, first, last in parts
        for _ in range(first, last)
    ]
    xs = [round(LEFT + (RIGHT - LEFT) * x / sum(widths), 1) for x in accumulate(widths, initial=0.0)]
    usable, peak = memory["usable"] / GIB, memory["peak"] / GIB
    top = max(gpu_gib, peak) * 1.05 if peak > 0.2 * usable else 1.2 * peak  # or the limit would flatten the picture

    def y(gib: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * gib / top, 1)

    drawn = []
    for gib in _nice(top, 5):
        drawn.append(tag("path", d=f"M{LEFT},{y(gib)}H{RIGHT}", class_="grid"))
        drawn.append(tag("text", f"{gib:g}", x=LEFT - 6, y=y(gib) + 4, class_="end"))
    low = [0.0] * len(phases)
    for kind in STACK:
        high = [below + phase[kind] / GIB for below, phase in zip(low, phases, strict=True)]
        over = "".join(f"V{y(gib)}H{x}" for gib, x in zip(high, xs[1:], strict=True))
        under = "".join(f"V{y(gib)}H{x}" for gib, x in zip(low[::-1], xs[-2::-1], strict=True))
        drawn.append(tag("path", d=f"M{LEFT},{y(low[0])}{over}{under}Z", class_=kind))
        low = high
    limit = y(min(usable, top))
    drawn.append(
        tag(
            "rect",
            x=LEFT,
            y=y(min(gpu_gib, top)),
            width=RIGHT - LEFT,
            height=limit - y(min(gpu_gib, top)),
            fill="url(#reserve)",
        )
    )
    drawn.append(tag("path", d=f"M{LEFT},{limit}H{RIGHT}", class_="limit"))
    far = "" if top > usable else " (far above)"
    drawn.append(tag("text", f"usable {usable:g} GiB of {gpu_gib:g}{far}", x=LEFT + 6, y=limit + 14, class_="limit"))
    for name, first, last in parts:
        center, room = (xs[first] + xs[last]) / 2, xs[last] - xs[first]
        turned = (
            {"transform": f"rotate(-50 {center} {BOTTOM + 18})", "class_": "end"}
            if room < 7 * len(name)
            else {"class_": "middle"}
        )
        drawn.append(tag("path", d=f"M{xs[first] + 1},{BOTTOM + 5}H{xs[last] - 1}", class_="part"))
        drawn.append(tag("text", name, x=center, y=BOTTOM + 18, **turned))
    for left, right in pairwise(xs):
        drawn.append(tag("rect", x=left, y=TOP, width=round(right - left, 1), height=BOTTOM - TOP, class_="hit"))
    fullest = max(range(len(phases)), key=lambda number: phases[number]["live"])
    x, side = (xs[fullest] + xs[fullest + 1]) / 2, 1 if xs[fullest] < (LEFT + RIGHT) / 2 else -1
    drawn.append(tag("circle", cx=x, cy=y(peak), r=4))
    drawn.append(
        tag("text", f"{peak:,.2f} GiB", x=x + 9 * side, y=y(peak) - 6, class_="peak" if side > 0 else "peak end")
    )
    label = f"Memory by kind over the phases of a step, at most {peak:,.2f} GiB in {memory['moment']}"
    return tag("svg", *drawn, viewBox=f"0 0 {RIGHT} {BOTTOM + 92}", role="img", aria_label=label, id="memory")


def _draw_lanes(spans: Sequence[Row], phases: Sequence[Row], colors: Mapping[str, str], end: float) -> Html:
    """Draw when each lane is busy: a path of boxes for each lane and color."""
    lines: dict[tuple[int, str], list[list[int]]] = {}
    shades = {"waiting": "waiting", **colors}
    phase, light = "", False
    for span in sorted(spans, key=lambda span: span["start"]):
        if span["what"] not in shades and span["what"] != phase:  # neighboring phases differ
            phase, light = span["what"], not light
        color = shades.get(span["what"], "compute light" if light else "compute")
        start, stop = round(TIME * span["start"] / end), round(TIME * span["end"] / end)
        line = lines.setdefault((LANES.index(span["lane"]), color), [])
        if line and start - line[-1][1] <= 2:  # too near to be seen apart
            line[-1][1] = max(stop, line[-1][1])
        else:
            line.append([start, max(stop, start + 9)])
    drawn = [
        tag("path", d="".join(f"M{a},{10 * lane + 1}h{b - a}v8H{a}" for a, b in line), class_=color)
        for (lane, color), line in lines.items()
    ]
    label = "When a GPU computes, gathers, reduces, and waits for communication"
    picture = tag("svg", *drawn, viewBox=f"0 0 {TIME} {10 * len(LANES)}", preserveAspectRatio="none", role="img",
                  aria_label=label, data_end=end)  # fmt: skip
    parts = [
        (name, phases[first]["start"], sum(row["seconds"] for row in phases[first:last]))
        for name, first, last in _parts(phases)
    ]
    heads = (
        tag("span", name, style=f"left:{100 * start / end:.3f}%")
        for name, start, length in parts
        if length > end / 20
    )
    ticks = (tag("span", f"{second:g} s", style=f"left:{100 * second / end:.3f}%") for second in _nice(end, 8))
    wide = tag("div", tag("div", *heads, class_="ticks"), picture, tag("div", *ticks, class_="ticks"), class_="wide")
    return _join(
        [tag("div", *(tag("span", lane) for lane in LANES), class_="names"), tag("div", wide, class_="scroll")]
    )


def _draw_mesh(layout: Layout, colors: Mapping[str, str], per_node: int) -> Html:
    """Draw nodes as boxes and ranks as squares; colored are rank 0 and the ranks that share a group with it."""
    across = ceil(sqrt(2 * per_node))
    width, height = 12 * across + 8, 12 * ceil(per_node / across) + 8
    in_a_row = 1 << int(log2(1120 // (width + 8)))  # a power of two, so that groups end where rows do
    nodes, drawn = ceil(layout.world / per_node), []
    for node in range(min(nodes, MOST_NODES)):
        left, top = node % in_a_row * (width + 8), node // in_a_row * (height + 8)
        drawn.append(tag("rect", x=left, y=top, width=width, height=height, rx=4, class_="node"))
        for rank in range(node * per_node, min(layout.world, (node + 1) * per_node)):
            row, column = divmod(rank % per_node, across)
            differs = [name for name, place in layout.coordinates(rank).items() if place]
            color = {"class_": colors[differs[0]] if differs else "compute"} if len(differs) < 2 else {}
            drawn.append(tag("rect", x=left + 12 * column + 5, y=top + 12 * row + 5, data_rank=rank, **color))
    rows = ceil(min(nodes, MOST_NODES) / in_a_row)
    degrees = {
        "data_names": " ".join(colors),
        "data_degrees": " ".join(str(getattr(layout, name)) for name in colors),
    }
    picture = tag(
        "svg",
        *drawn,
        viewBox=f"-1 -1 1121 {rows * (height + 8)}",
        role="img",
        aria_label=f"{nodes} nodes",
        id="mesh",
        **degrees,
    )
    return _join([picture, f"The other {nodes - MOST_NODES:,} nodes are not drawn." if nodes > MOST_NODES else ""])
