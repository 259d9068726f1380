"""`titanlite plot`: losses or other metrics of one or several runs, from their metrics.jsonl; in
the terminal, or as a picture with matplotlib.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titanlite.config.options import declare
from titanlite.errors import UserError, columns, format_table, nearest, print_notice
from titanlite.observe.page import Number, Table
from titanlite.tools.record import Run, chart, read_run, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = ("loss", "validation_loss")
AS_LOGGED = ("lr", "validation_loss")
"""Metrics drawn without a moving mean."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the runs, the metrics, the x axis, and the file to write."""
    options = {
        "[DUMP …]": (
            "dump folder of a run, or metrics.jsonl (default: outputs)",
            Path,
            [Path("outputs")],
        ),
        "--metrics NAME,NAME": "names of metrics.jsonl (default: loss,validation_loss)",
        "--x steps|tokens": ("x axis of a picture (default: steps)", str, "steps"),
        "--out FILE": ("a picture to write: .png or .svg", Path),
    }
    declare(parser, options)
    parser.epilog = "example: titanlite plot outputs other_run --metrics loss,lr --out curves.png"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print each run's progress and curves, or draw them to a file."""
    runs = read_runs(arguments.dump)
    keys = choose_metrics(runs, arguments.metrics)
    out = arguments.out
    if not out:
        print(summarize(runs))
        for key in keys:
            print(f"\n{key}", format_table(_charts(runs, key)), sep="\n")
        return 0
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {out}: must end in .png or .svg")
    try:
        draw(runs, keys, arguments.x).savefig(out, dpi=150)
    except OSError as error:
        raise UserError(f"--out {out} can't be written: {error.strerror}") from error
    print(f"{summarize(runs)}\nwrote {out}")
    return 0


def read_runs(dumps: list[Path]) -> list[Run]:
    """Read the runs; if there are several, skip other files, such as a log that a shell matched."""
    runs: list[Run] = []
    for dump in dumps:
        try:
            run = read_run(dump)
            if not run.steps:
                raise UserError(f"{dump} has no logged step yet; there is nothing to draw")
            runs.append(run)
        except UserError as error:
            if dump == dumps[-1] and not runs:
                raise
            print_notice(f"skipped: {error}")
    return runs


def choose_metrics(runs: list[Run], names: str | None) -> list[str]:
    """Return the metrics to draw: the requested ones, or the losses that the runs have."""
    known = set[str]()
    for run in runs:
        known.update(*run.records)
    known -= {"step", "time"}
    if not names:
        return [key for key in LOSSES if key in known]
    keys = names.split(",")
    for key in keys:
        if key not in known:
            close = nearest(key, known)
            hint = f"they have {', '.join(sorted(known))}"
            if close:
                hint = f"did you mean {close}?"
            raise UserError(f"--metrics {names}: no run has {key}; {hint}")
    return keys


def progress(runs: list[Run]) -> Table:
    """Return the progress of the runs, and their speed."""
    rows = []
    for run in runs:
        steps, losses = run.column("validation_loss")
        finite = np.isfinite(losses)
        best = "none"
        if finite.any():
            lowest = losses[finite].min()
            best = f"{lowest:.5f} at step {steps[losses == lowest][0]:,}"
        reached = [Number(run.steps[-1]), Number(run.last("tokens")), f"{run.last('loss'):.5f}"]
        rows.append([run.name, *reached, best, Number(float(np.nanmedian(run.values("tps"))))])
    header = ["run", "steps", "tokens", "last loss", "best validation loss", "median tps"]
    return Table("progress", "", header, rows)


def summarize(runs: list[Run]) -> str:
    """Return the progress of runs as text, in columns or, if the terminal is narrow, in rows."""
    header = progress(runs).header
    rows = [[*map(str, row)] for row in progress(runs).rows]
    table = format_table(rows, header, "<>>>>>")
    if len(table.partition("\n")[0]) > columns():
        return format_table([*zip(header, *rows, strict=True)], align="<" + ">" * len(rows))
    return table


def _charts(runs: list[Run], key: str) -> list[tuple[str, str]]:
    """Return a metric of each run as a line of blocks, all on one scale and as long as the run."""
    width = max(8, columns(80) - 2 - max(len(run.name) for run in runs))
    having = [run for run in runs if len(run.values(key))]
    longest = max(run.column(key)[0][-1] for run in having)
    values = np.concatenate([run.values(key) for run in having])
    ends = np.fmin.reduce(values), np.fmax.reduce(values)
    charts = []
    for run in having:
        length = max(1, round(width * run.column(key)[0][-1] / longest))
        charts.append((run.name, chart(run.values(key), length, ends)))
    return charts


def draw(runs: list[Run], keys: list[str], x_axis: str) -> Figure:
    """Return a figure with a panel for each metric."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(Path(__file__).with_suffix(".mplstyle"))
    figure = Figure(figsize=(8, 1 + 3 * len(keys)), layout="constrained")
    panels = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        _draw_panel(axes, key, [run.curve(key, x_axis) for run in runs])
    panels[-1].set_xlabel(x_axis)
    figure.legend(
        panels[0].get_lines()[1::2],
        [run.name for run in runs],
        loc="outside upper left",
        title="thin: as logged; thick: moving mean over 1/30 of the run",
        alignment="left",
    )
    return figure


def _draw_panel(axes: Axes, key: str, curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw two lines for each run: as logged, and its moving mean."""
    for number, (x, y) in enumerate(curves):
        color = f"C{number}"  # defined by the style
        marker = ""
        if len(y) <= 60 or not np.isfinite(y).all():  # a line shows no value between two nans
            marker = "."
        axes.plot(x, y, color=color, alpha=0.5, lw=0.8, marker=marker)
        mean = y if key in AS_LOGGED else smooth(y)
        axes.plot(x, mean, color=color, lw=1.8)
    axes.set_title(key)
