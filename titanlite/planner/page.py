"""A plan as one self-contained HTML file without scripts: the tables that `titanlite plan` prints,
and a picture of the mesh.
"""

from collections.abc import Iterable
from html import escape
from math import ceil
from pathlib import Path

from titanlite.config.layout import DIMENSIONS, Layout
from titanlite.observe.page import html_table, write_html
from titanlite.planner.plan import Plan
from titanlite.planner.tables import heading, tables

WIDTH = 1000
MOST_NODES = 64
SQUARE = 12


def write_page(plan: Plan, path: Path) -> None:
    """Write the page of a plan."""
    title, step, verdict = heading(plan)
    parts = [f"<p>{escape(plan.job.config.job.description)}</p><p>{escape(step)}</p>"]
    state = "over"
    if plan.fits:
        state = "fits"
    parts.append(f'<p id="verdict" class="{state}">{escape(verdict)}</p>')
    pictures = {"communication": draw_mesh(plan.job.layout, plan.hardware.node.gpus)}
    for table in tables(plan):
        parts.append(html_table(table, pictures.get(table.name, "")))
    write_html(path, f"Plan of {title}", "\n".join(parts))


def _svg(name: str, parts: Iterable[str], height: float, label: str) -> str:
    head = (
        f'<svg id="{name}-picture" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    )
    return f"{head}{''.join(parts)}</svg>"


def _legend(names: Iterable[str]) -> str:
    entries = (f"<span><i class={name.replace(' ', '')}></i>{name}</span>" for name in names)
    return f"<p>{' '.join(entries)}</p>"


def _split(layout: Layout) -> list[str]:
    return [name for name in DIMENSIONS if getattr(layout, name) > 1]


def draw_mesh(layout: Layout, gpus: int) -> str:
    """Draw nodes as boxes and ranks as squares, and color rank 0 and the ranks that share a group
    with it.
    """
    parts = []
    across = ceil((2 * gpus) ** 0.5)
    width = SQUARE * across + 8
    height = SQUARE * ceil(gpus / across) + 8
    # A power of two, so that groups end where rows do.
    in_a_row = 1 << (int(WIDTH // (width + 8)).bit_length() - 1)
    nodes = ceil(layout.world / gpus)
    drawn = min(nodes, MOST_NODES)
    split = _split(layout)
    for rank in range(min(layout.world, drawn * gpus)):
        number, place = divmod(rank, gpus)
        x = number % in_a_row * (width + 8)
        y = number // in_a_row * (height + 8)
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
    more = ""
    if nodes > MOST_NODES:
        more = f"<p>The other {nodes - MOST_NODES:,} nodes are not drawn.</p>"
    return f"{legend}{picture}{more}"
