"""Draw the pictures of the documents from the code: python docs/pictures.py [--run DUMP_FOLDER].

rooms.svg shows the floors of tests/test_house.py and the rings of CONTRIBUTING.md, order.svg the
order of parallelize.py with its comments, mesh.svg the groups of a mesh that build_mesh made, and
loss.svg and images/top.svg a run. --run FOLDER takes its files into benchmarks/records first.
tests/test_docs.py fails when a picture is not what this script draws.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import runpy
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from titanlite.config.layout import DIMENSIONS, Layout  # noqa: E402
from titanlite.parallel import parallelize  # noqa: E402
from titanlite.planner.fake_world import FakeWorld  # noqa: E402
from titanlite.tools.top import view  # noqa: E402

FIRST_RUN = ROOT / "benchmarks/records/cpu/first_run"
TAKEN = "metrics.jsonl", "config.toml", "events.jsonl", "logs/ranks.json"
INK, SOFT, LINE, PAPER = "#1f2933", "#5f6b7a", "#d5dbe3", "#ffffff"
RINGS = {1: "#0072b2", 2: "#009e73", 3: "#d99500", 4: "#8a94a3"}
WIDTH = 920
ROOMS = {
    "cli": "the titanlite command",
    "tools": "the commands around training",
    "verify": "the proof, against one process",
    "launch": "checks, workers, restarts: one process a node",
    "planner": "memory and speed without a GPU",
    "train": "a worker: the loop, one step, its log",
    "checkpoint": "whole or absent, on any mesh",
    "optim": "optimizers, norm, schedule",
    "parallel": "techniques in one fixed order",
    "data": "which sample is whose",
    "fault": "statuses, one decision",
    "observe": "metrics, profiles",
    "runtime": "process groups, seeds, pages",
    "config": "keys, rules, the job",
    "models": "plain modules, one table each",
    "registry": "what a row of a table says",
    "errors": "a user's mistakes",
    "version": "the release",
}
TECHNIQUES = {
    "convert.apply": "Converters, such as float8",
    "tensor_parallel.apply": "Tensor and sequence parallel",
    "expert_parallel.apply": "Expert parallel: the split",
    "context_parallel.apply": "Context parallel",
    "cast.apply": "Mixed precision of the rest",
    "recompute.apply": "Activation checkpointing",
    "expert_parallel.dispatch": "Expert parallel: the exchange",
    "compile.apply": "torch.compile of each block",
    "recompute.apply around_graphs": "Activation checkpointing around graphs",
    "fsdp.apply": "FSDP2 or HSDP",
}
EXAMPLE = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, experts=True)


def text(
    x: float,
    y: float,
    words: str,
    size: float = 13,
    color: str = INK,
    style: str = "",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
        f"{style and ' ' + style}>{escape(words)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, fill: str = PAPER, line: str = LINE
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="6" fill="{fill}" stroke="{line}"/>'
    )


def down(x: float, y: float, length: float) -> str:
    """Return an arrow down."""
    tip = y + length
    return (
        f'<path d="M{x:g} {y:g}V{tip:g}M{x - 4:g} {tip - 5:g}L{x:g} {tip:g}L{x + 4:g} {tip - 5:g}" '
        f'fill="none" stroke="{SOFT}" stroke-width="1.5"/>'
    )


def picture(height: float, label: str, shapes: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, DejaVu Sans, sans-serif">'
    )
    paper = f'<rect width="{WIDTH}" height="{height:g}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, paper, *shapes, "</svg>", ""])


BOLD = 'font-weight="600"'
CODE = 'font-family="ui-monospace, DejaVu Sans Mono, monospace"'


# ------------------------------------------------------------------------- rooms


def rings_of_rooms() -> dict[str, list[int]]:
    """Return the rings that have files in a room, or in a file that stands alone."""
    count = runpy.run_path(str(ROOT / "scripts" / "count.py"))
    found: dict[str, set[int]] = {}
    for ring, paths in count["rings"]().items():
        for path in paths:
            room = path.parts[1] if path.parts[0] == "titanlite" else "models"
            found.setdefault(room.removesuffix(".py"), set()).add(ring)
    return {room: sorted(rings) for room, rings in found.items()}


def draw_rooms() -> str:
    floors = runpy.run_path(str(ROOT / "tests" / "test_house.py"))["FLOORS"]
    rings = rings_of_rooms()
    left, gap, height, y = 40, 8, 50, 52
    shapes = [text(left, 30, "The rooms of titanlite", 17, INK, BOLD)]
    x = 392
    shapes.append(text(x - 16, 30, "has files of ring", 12, SOFT, "", "end"))
    words = {1: "a training step", 2: "other techniques", 3: "what surrounds it", 4: "tools"}
    for ring, name in words.items():
        shapes += [disc(x, 26, ring), text(x + 13, 30, name, 12, SOFT)]
        x += 32 + 7.2 * len(name)
    for floor in floors:
        names = [name for name in floor.split() if not name.startswith("__")]
        if not names:
            continue
        width = (WIDTH - left - 24 - gap * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            x = left + column * (width + gap)
            shapes.append(box(x, y, width, height, "#f7f9fb"))
            shapes.append(text(x + 12, y + 20, name, 14, INK, BOLD))
            shapes.append(text(x + 12, y + 38, ROOMS[name], 11.5, SOFT))
            for number, ring in enumerate(reversed(rings[name])):
                shapes.append(disc(x + width - 18 - 20 * number, y + 17, ring))
        y += height + gap
    shapes.append(down(20, 60, y - 70))
    turned = f'transform="rotate(-90 14 {y / 2:g})"'
    shapes.append(text(14, y / 2, "an import points down, never up", 11.5, SOFT, turned, "middle"))
    return picture(y + 10, "The rooms of titanlite on their floors", shapes)


def disc(x: float, y: float, ring: int) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="{RINGS[ring]}"/>' + text(
        x, y + 3.7, str(ring), 10.5, PAPER, BOLD, "middle"
    )


# ------------------------------------------------------------------------- order


def technique_names(techniques: Sequence[Any]) -> list[str]:
    """Return "module.function" of each technique, with the names of the options that are set."""
    names = []
    for technique in techniques:
        function = getattr(technique, "func", technique)
        options = " ".join(getattr(technique, "keywords", {}))
        module = function.__module__.rpartition(".")[2]
        names.append(f"{module}.{function.__name__} {options}".rstrip())
    return names


def reasons(variable: str) -> list[str]:
    """Return the comment at each technique of WHOLE or ORDER: above it, or behind it."""
    source = inspect.getsource(parallelize)
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("# ")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == variable:
            assert isinstance(node.value, ast.Tuple)
            lines = [element.lineno for element in node.value.elts]
            return [comments.get(line) or comments[line - 1] for line in lines]
    raise AssertionError(variable)


def draw_order() -> str:
    x, y, height = 60, 50, 46
    shapes = [text(24, 30, "The order of parallelize.py", 17, INK, BOLD)]

    def milestone(words: str) -> None:
        nonlocal y
        shapes.append(box(24, y, WIDTH - 48, 28, "#e8f1f8", "#b9d3e6"))
        shapes.append(text(WIDTH / 2, y + 18.5, words, 12.5, INK, "", "middle"))
        y += 36

    milestone("the plain model, whole, on the meta device: names and shapes, no memory")
    number = 0
    for variable in ("WHOLE", "ORDER"):
        names = technique_names(getattr(parallelize, variable))
        for name, reason in zip(names, reasons(variable), strict=True):
            number += 1
            shapes.append(f'<circle cx="38" cy="{y + 17}" r="12" fill="{RINGS[1]}"/>')
            shapes.append(text(38, y + 21.3, str(number), 12, PAPER, BOLD, "middle"))
            shapes.append(text(x, y + 15, TECHNIQUES[name], 13.5, INK, BOLD))
            function, _, option = name.partition(" ")
            shown = function + (f"({option})" if option else "")
            shapes.append(text(x, y + 31, shown, 11, SOFT, CODE))
            lines = textwrap.wrap(reason, 72)
            for row, line in enumerate(lines):
                shapes.append(text(390, y + 15 + 16 * row + 8 * (len(lines) == 1), line, 12, INK))
            y += height
        if variable == "WHOLE":
            milestone(
                "pipeline parallel cuts the model into stages; "
                "the rest acts on each stage of a rank"
            )
    milestone(
        "memory is allocated, initial values are drawn by each rank for its shard, "
        "replicas are compared"
    )
    return picture(y + 6, "The fixed order of the techniques, and why each is where it is", shapes)


# ------------------------------------------------------------------------- mesh


def groups_of_rank_0() -> dict[str, tuple[list[int], str]]:
    """Return the ranks of each group of the example's rank 0, and what they share or split."""
    with FakeWorld() as world:
        mesh = world.mesh(EXAMPLE)
        assert mesh.experts and mesh.ep
        found = {name: mesh.world[name].mesh.tolist() for name in DIMENSIONS}
        for name in ("data", "loss", "stage"):
            found[name] = dist.get_process_group_ranks(getattr(mesh, name))
        found["fsdp"] = mesh.fsdp.mesh[0].tolist()  # the replicas are the other row
        found["ep"] = mesh.ep.mesh.tolist()
    words = {
        "pp": "stages of the model",
        "dp_replicate": "replicas of all shards",
        "dp_shard": "different data",
        "cp": "parts of each sequence",
        "tp": "parts of each matrix",
        "fsdp": "shard parameters",
        "data": "same weights, other tokens",
        "loss": "sum the loss: all but tp",
        "stage": "same stage: all but pp",
        "ep": f"different experts, with ep {EXAMPLE.ep}",
    }
    return {name: (found[name], words[name]) for name in words}


def draw_mesh() -> str:
    columns = EXAMPLE.dp_shard * EXAMPLE.cp * EXAMPLE.tp
    rows = EXAMPLE.world // columns
    left, top, cell, tall = 210, 118, 82, 36
    title = f"{EXAMPLE.world} ranks: " + str(EXAMPLE).partition(",")[0]
    shapes = [text(24, 30, title, 17, INK, BOLD)]
    note = "a row is a node of 8 GPUs here: the dimensions that communicate most are innermost"
    shapes.append(text(24, 49, note, 12, SOFT))
    for depth, name in enumerate(("dp_shard", "cp", "tp")):
        for column in range(columns):
            first = EXAMPLE.coordinates(column)
            before = EXAMPLE.coordinates(column - 1) if column else {}
            span = columns >> (depth + 1)
            if column % span == 0 and first[name] != before.get(name):
                x, width = left + column * cell, span * cell
                y = top - 44 + 14 * depth
                words = f"{name} {first[name]}"
                shapes.append(bracket(x + 3, y + 3, width - 6))
                shapes.append(text(x + width / 2, y, words, 11, SOFT, "", "middle"))
    for row in range(rows):
        own = EXAMPLE.coordinates(row * columns)
        y = top + row * (tall + 6)
        words = f"pp {own['pp']}, dp_replicate {own['dp_replicate']}"
        shapes.append(text(left - 12, y + 23, words, 12, SOFT, "", "end"))
        for column in range(columns):
            rank = row * columns + column
            fill, line, ink = ("#0072b2", "#0072b2", PAPER) if rank == 0 else ("#f7f9fb", LINE, INK)
            shapes.append(box(left + column * cell + 2, y, cell - 4, tall, fill, line))
            x = left + (column + 0.5) * cell
            shapes.append(text(x, y + 23, str(rank), 13, ink, "", "middle"))
    y = top + rows * (tall + 6) + 34
    shapes.append(
        text(24, y, "Rank 0 and the other ranks of its group, for each purpose", 14, INK, BOLD)
    )
    y += 16
    width = (WIDTH - 48 - 4 * 16) / 5
    for number, (name, (ranks, words)) in enumerate(groups_of_rank_0().items()):
        x = 24 + number % 5 * (width + 16)
        panel = y + number // 5 * 134
        shapes.append(text(x, panel + 16, name, 13, INK, BOLD))
        groups = EXAMPLE.world // len(ranks)
        sizes = f"{groups} groups of {len(ranks)}" if groups > 1 else "all ranks"
        shapes.append(text(x, panel + 31, words, 10.5, SOFT))
        shapes.append(text(x, panel + 118, sizes, 10.5, SOFT))
        for rank in range(EXAMPLE.world):
            across, below = rank % columns, rank // columns
            side = width / columns
            fill = "#0072b2" if rank == 0 else "#56b4e9" if rank in ranks else "#e6eaef"
            shapes.append(
                f'<rect x="{x + across * side:.4g}" y="{panel + 40 + below * 16}" '
                f'width="{side - 2:.4g}" height="14" rx="2" fill="{fill}"/>'
            )
    return picture(y + 266, f"The mesh of {EXAMPLE.world} ranks and the groups of rank 0", shapes)


def bracket(x: float, y: float, width: float) -> str:
    return f'<path d="M{x:g} {y + 4:g}V{y:g}H{x + width:g}V{y + 4:g}" fill="none" stroke="{LINE}"/>'


# ------------------------------------------------------------------------- loss


def take_run(folder: Path) -> None:
    """Keep the files of a run that the pictures need."""
    for name in TAKEN:
        target = FIRST_RUN / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / name).read_bytes())


def draw_loss() -> str:
    lines = (FIRST_RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validated = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    left, top, width, height = 56, 52, WIDTH - 80, 230
    steps = losses[-1][0]
    low, high = 1, round(max(loss for _, loss in losses))

    def place(step: float, loss: float) -> tuple[float, float]:
        return left + width * step / steps, top + height * (high - loss) / (high - low)

    title = "The loss of train_configs/debug.toml: 853,120 parameters, 2 CPU processes"
    shapes = [text(24, 30, title, 15, INK, BOLD)]
    for value in range(low, high + 1):
        y = place(0, value)[1]
        shapes.append(f'<path d="M{left} {y:g}H{left + width}" stroke="#e8ecf1"/>')
        shapes.append(text(left - 10, y + 4, str(value), 11.5, SOFT, "", "end"))
    for step in range(0, steps + 1, 50):
        x = place(step, low)[0]
        shapes.append(text(x, top + height + 20, str(step), 11.5, SOFT, "", "middle"))
    shapes.append(text(left + width / 2, top + height + 38, "step", 11.5, SOFT, "", "middle"))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in losses))
    shapes.append(
        f'<polyline points="{points}" fill="none" stroke="{RINGS[1]}" stroke-width="1.8"/>'
    )
    for step, loss in validated:
        x, y = place(step, loss)
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="#d55e00" stroke="{PAPER}"/>'
        )
    x = left + width - 250
    shapes.append(f'<path d="M{x} {top + 14}h24" stroke="{RINGS[1]}" stroke-width="1.8"/>')
    shapes.append(text(x + 32, top + 18, "training loss of each step", 12))
    shapes.append(f'<circle cx="{x + 12}" cy="{top + 34}" r="4.5" fill="#d55e00"/>')
    last = f"validation loss, {validated[-1][1]:.3f} at step {validated[-1][0]}"
    shapes.append(text(x + 32, top + 38, last, 12))
    return picture(top + height + 48, title, shapes)


# -------------------------------------------------------------------------- top


def draw_top() -> str:
    """Draw what `titanlite top` shows of the run at its end."""
    ranks = FIRST_RUN / "logs" / "ranks.json"
    os.utime(ranks)
    with patch.dict(os.environ, COLUMNS="92"):
        lines = view(FIRST_RUN)[0].replace(str(FIRST_RUN), "outputs").splitlines()
    shapes = []
    for number, line in enumerate(["$ titanlite top outputs", "", *lines]):
        style = f'{CODE} xml:space="preserve"'
        shapes.append(text(24, 34 + 18 * number, line, 13, INK, style))
    return picture(52 + 18 * number, "The run in the terminal", shapes)


PICTURES = {
    "rooms": draw_rooms,
    "order": draw_order,
    "mesh": draw_mesh,
    "loss": draw_loss,
    "images/top": draw_top,
}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--run"]:
        take_run(Path(arguments[1]))
    for name, draw in PICTURES.items():
        (ROOT / "docs" / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
