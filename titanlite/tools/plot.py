"""`titanlite plot`: draw the curves of one or several runs from their metrics.jsonl, with
matplotlib.
"""

from __future__ import annotations

import io
import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlite.config.options import declare
from titanlite.errors import UserError, format_table, install_command, print_notice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "loss": "Training loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tps": "Tokens per second per device",
}
FIELDS = {
    "loss": "step tokens step_seconds loss grad_norm lr tps".split(),
    "validation_loss": ["step", "validation_loss"],
}
"""Those of a record, by the one that only such a record has."""
# Okabe and Ito's colors, which color-blind readers can distinguish; their yellow and black made
# readable on white.
COLORS = "#0072b2", "#d55e00", "#009e73", "#b9579a", "#d99500", "#4a4f57", "#45a9e6", "#7a4b1e"
HTML = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Training curves</title>
<style>body {{max-width: 1500px; margin: 2em auto}} svg {{width: 100%; height: auto}}</style>
<svg{}<pre>{}</pre></html>
"""


@dataclass(frozen=True)
class Run:
    """One metrics.jsonl as arrays with named fields: its logged steps and its validations."""

    name: str
    logged: np.ndarray
    validated: np.ndarray

    def curve(self, key: str, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the x and y values of a curve. Hours are spent in steps: without saves and
        validation.
        """
        steps = self.logged["step"]
        seconds = np.cumsum(self.logged["step_seconds"] * np.diff(steps, prepend=steps[0] - 1))
        x = {"steps": steps, "tokens": self.logged["tokens"], "hours": seconds / 3600}[x_axis]
        if key != "validation_loss":
            return x, self.logged[key]
        # A validation may lie between two logged steps, or after the last one of a run that is
        # still training.
        known_steps, known_x = ([0.0, *values, 2 * values[-1]] for values in (steps, x))
        return np.interp(self.validated["step"], known_steps, known_x), self.validated[key]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the runs, the file to write, and the x axis."""
    options = {
        "DUMP …": ("dump folder of a run, or metrics.jsonl", Path),
        "--out FILE": (
            "an .html (default: curves.html), .png, .svg or .pdf",
            Path,
            Path("curves.html"),
        ),
        "--x steps|tokens|hours": ("x axis (default: steps)", str, "steps"),
    }
    declare(parser, options)
    parser.epilog = "example: titanlite plot outputs other_run --out curves.png --x hours"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Draw the runs into a file, and print how far each has come."""
    out, runs, svg = arguments.out, read_runs(arguments.dump), io.StringIO()
    if out.suffix not in (".html", ".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: must end in .html, .png, .svg or .pdf")
    figure, table = draw(runs, arguments.x), summarize(runs)
    try:
        if out.suffix == ".html":
            figure.savefig(svg, format="svg")
            out.write_text(
                HTML.format(svg.getvalue().partition("<svg")[2], escape(table)), encoding="utf-8"
            )
        else:
            figure.savefig(out, dpi=150)
    except OSError as error:
        raise UserError(f"--out {out} can't be written: {error.strerror}") from error
    print(f"{table}\nwrote {out}")
    return 0


def read_runs(dumps: list[Path]) -> list[Run]:
    """Read the runs; of several, skip files that are none, such as a log that a pattern of the
    shell matched.
    """
    runs: list[Run] = []
    for dump in dumps:
        try:
            runs.append(read_run(dump))
        except UserError as error:
            if dump == dumps[-1] and not runs:
                raise
            print_notice(f"skipped: {error}")
    return runs


def read_run(dump: Path) -> Run:
    """Read the metrics in a dump folder, or a metrics.jsonl itself, without a last line that is not
    complete yet.
    """
    file = dump / "metrics.jsonl" if dump.is_dir() else dump
    if not file.is_file():
        raise UserError(f"{file} does not exist; give the dump folder of a run (job.dump_folder)")
    rows: dict[str, dict[int, tuple[float, ...]]] = {key: {} for key in FIELDS}
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line or "{}")
            for key, fields in FIELDS.items():
                if key in record:
                    rows[key][int(record["step"])] = tuple(
                        _number(record[field]) for field in fields
                    )
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines) or not isinstance(error, json.JSONDecodeError):
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                raise UserError(
                    f"line {number} of {file} is not a metrics record: {reason}"
                ) from error
            print(f"line {number} of {file} is incomplete and skipped", file=sys.stderr)
    if not rows["loss"]:
        raise UserError(f"{file} has no logged step yet; there is nothing to draw")
    tables = [[row for _, row in sorted(rows[key].items())] for key in FIELDS]
    types = ([(field, float) for field in fields] for fields in FIELDS.values())
    return Run(str(dump), *map(np.array, tables, types))


def _number(value: Any) -> float:
    """Return a record's value; null stands for one that was not finite."""
    return float("nan" if value is None else value)


def summarize(runs: list[Run]) -> str:
    """Return a table of how far the runs have come, and how fast."""
    rows = []
    for run in runs:
        last, finite = run.logged[-1], run.validated[np.isfinite(run.validated["validation_loss"])]
        best = (
            "{1:.5f} at step {0:,.0f}".format(*min(finite, key=lambda row: row[1]))
            if len(finite)
            else "none"
        )
        reached = f"{last['step']:,.0f}", f"{last['tokens']:,.0f}", f"{last['loss']:.5f}"
        rows.append([run.name, *reached, best, f"{np.nanmedian(run.logged['tps']):,.0f}"])
    return format_table(
        rows,
        ["run", "steps", "tokens", "last loss", "best validation loss", "median tps"],
        "<>>>>>",
    )


def draw(runs: list[Run], x_axis: str) -> Figure:
    """Return the figure; validation has a panel where a run validated."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = install_command("matplotlib")
        raise UserError(
            f"titanlite plot needs the package matplotlib, which is not installed: {remedy}"
        ) from error
    style.use(Path(__file__).with_suffix(".mplstyle"))
    figure = Figure(figsize=(12.4, 7.2), layout="constrained")
    validation = "validation_loss" if any(len(run.validated) for run in runs) else "loss"
    panels: Any = [["loss", "loss", validation], ["grad_norm", "lr", "tps"]]
    for key, axes in figure.subplot_mosaic(panels, sharex=True, height_ratios=[4, 3]).items():
        _draw_panel(axes, key, [run.curve(key, x_axis) for run in runs], x_axis)
    lines, names = axes.get_lines()[1::3], [run.name for run in runs]
    title = "thin: as logged; thick: moving mean over 1/30 of the run; crosses: NaN or infinite"
    figure.legend(lines, names, loc="outside upper left",
                  ncols=max(1, 140 // (max(map(len, names)) + 8)),
                  title=title, alignment="left")  # fmt: skip
    return figure


def _draw_panel(
    axes: Axes, key: str, curves: list[tuple[np.ndarray, np.ndarray]], x_axis: str
) -> None:
    """Draw three lines for each run: as logged, smoothed, and crosses where a value is not
    finite.
    """
    from matplotlib import ticker

    finite = np.concatenate([y[np.isfinite(y)] for _, y in curves])
    low, middle, high = np.quantile(finite, [0, 0.5, 1]) if len(finite) else (0.0, 0.0, 0.0)
    from_zero, smoothed = key in ("lr", "tps"), key not in ("lr", "validation_loss")
    # A linear axis would flatten most of the run.
    log = low > 0 and high > 2.5 * middle and not from_zero
    for number, (x, y) in enumerate(curves):
        color, dashes = COLORS[number % len(COLORS)], ("-", "--", ":")[number // len(COLORS) % 3]
        valid = np.pad(np.isfinite(y), 1)
        # A line alone would not show such a value.
        isolated = valid & ~np.roll(valid, 1) & ~np.roll(valid, -1)
        marked, crosses = list(isolated[1:-1] | (len(y) <= 40)), x[~valid[1:-1]]
        mean = y if not smoothed else np.exp(smooth(np.log(y))) if log else smooth(y)
        axes.plot(x, y, color=color, alpha=0.35, lw=0.8)
        axes.plot(x, mean, dashes, color=color, lw=1.8, marker="o", ms=3.5, markevery=marked)
        axes.plot(
            crosses, [0.98] * len(crosses), "x", color=color, transform=axes.get_xaxis_transform()
        )
    axes.set(title=TITLES[key] + (", log scale" if log else ""), xlabel=x_axis)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(
            ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 30 * low else (1, 3))
        )
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif from_zero:
        axes.set_ylim(bottom=0)
    prefixed = ticker.EngFormatter(sep="")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=x_axis != "hours"))
    axes.xaxis.set_major_formatter(
        "{x:g}" if x_axis == "hours" else lambda x, _: prefixed(x).replace("G", "B")
    )
    axes.tick_params(labelbottom=True)  # in the upper row too


def smooth(y: np.ndarray) -> np.ndarray:
    """Return the moving mean over a thirtieth of the points, centered so that it does not lag.

    At the start, where curves are steep, the window shrinks; at the end it is cut.
    """
    index, valid = np.arange(len(y)), np.isfinite(y)
    half = np.minimum(max(2, len(y) // 60), index) if len(y) >= 12 else 0 * index
    first, end = index - half, np.minimum(index + half + 1, len(y))
    sums, counts = (np.append(0, np.cumsum(values)) for values in (np.where(valid, y, 0.0), valid))
    return np.where(
        valid, (sums[end] - sums[first]) / np.maximum(counts[end] - counts[first], 1), np.nan
    )
