"""`titanlite plot`: draw the curves of one or several runs from their metrics.jsonl, with
matplotlib.
"""

from __future__ import annotations

import io
from argparse import ArgumentParser, Namespace
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlite.checkpoint.manifest import CONFIG
from titanlite.config.options import declare
from titanlite.config.toml import flatten, tomllib
from titanlite.errors import UserError, columns, format_table, nearest, print_notice
from titanlite.observe.page import Number, Table, html_table, write_html
from titanlite.tools.record import TITLES, Run, chart, read_run, smooth, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEME = {"#000000": "var(--ink)", "#808080": "var(--soft)", "#e8eaed": "var(--line)"}
"""The colors of plot.mplstyle, and those that a page has instead, which follow its reader's
theme."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the runs, the file to write, and the x axis."""
    options = {
        "[DUMP …]": (
            "dump folder of a run, or metrics.jsonl (default: outputs)",
            Path,
            [Path("outputs")],
        ),
        "--out FILE": (
            "an .html (default: curves.html, of one run in its dump folder), .png, .svg or .pdf",
            Path,
        ),
        "--x steps|tokens|hours": ("x axis (default: steps)", str, "steps"),
        "--by KEY": "draw last losses over a key in which the runs differ",
        "--text": "print the losses in the terminal instead",
    }
    declare(parser, options)
    parser.epilog = "example: titanlite plot outputs other_run --out curves.png --x hours"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Draw the runs into a file, and print how far each has come."""
    runs = read_runs(arguments.dump)
    out = arguments.out or Path(runs[0].folder if len(runs) == 1 else "", "curves.html")
    by_key = draw_by(runs, arguments.by) if arguments.by else None
    if arguments.text and by_key:
        print(by_key[1])
        return 0
    if arguments.text:
        print(summarize(runs), format_table(_charts(runs)), sep="\n\n")
        return 0
    if out.suffix not in (".html", ".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: must end in .html, .png, .svg or .pdf")
    table = by_key[1] if by_key else summarize(runs)
    try:
        if out.suffix == ".html":
            drawn = picture(by_key[0], "single") if by_key else pictures(runs, arguments.x)
            below = f"<pre>{escape(table)}</pre>" if by_key else html_table(progress(runs))
            body = f"{drawn}{below}"
            write_html(out, "Training curves", body, "--out")
        else:
            figure = by_key[0] if by_key else draw(runs, arguments.x)
            figure.savefig(out, dpi=150)
    except OSError as error:
        raise UserError(f"--out {out} can't be written: {error.strerror}") from error
    print(f"{table}\nwrote {out}")
    return 0


def _charts(runs: list[Run]) -> list[tuple[str, str]]:
    """Return the losses as lines of blocks on one scale, as long as the runs are."""
    width = max(8, columns(80) - 2 - max(len(run.name) for run in runs))
    longest = max(run.logged["step"][-1] for run in runs)
    losses = np.concatenate([run.logged["loss"] for run in runs])
    ends = np.fmin.reduce(losses), np.fmax.reduce(losses)
    lengths = [max(1, round(width * run.logged["step"][-1] / longest)) for run in runs]
    return [
        (run.name, chart(run.logged["loss"], length, ends))
        for run, length in zip(runs, lengths, strict=True)
    ]


def pictures(runs: list[Run], x_axis: str) -> str:
    """Return the figure as a part of a page, and the one that a narrow screen has instead."""
    return picture(draw(runs, x_axis)) + picture(draw(runs, x_axis, narrow=True), "narrow")


def picture(figure: Figure, kind: str = "wide") -> str:
    """Return a figure as a part of a page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    for color, name in THEME.items():
        text = text.replace(color, name)
    return f'<div class="{kind}">{text[text.index("<svg") :]}</div>'


def read_runs(dumps: list[Path]) -> list[Run]:
    """Read the runs; of several, skip files that are none, such as a log that a pattern of the
    shell matched.
    """
    runs: list[Run] = []
    for dump in dumps:
        try:
            run = read_run(dump)
            if not len(run.logged):
                raise UserError(f"{dump} has no logged step yet; there is nothing to draw")
            runs.append(run)
        except UserError as error:
            if dump == dumps[-1] and not runs:
                raise
            print_notice(f"skipped: {error}")
    return runs


def progress(runs: list[Run]) -> Table:
    """Return how far the runs have come, and how fast."""
    rows = []
    for run in runs:
        last, finite = run.logged[-1], run.validated[np.isfinite(run.validated["validation_loss"])]
        best = (
            "{1:.5f} at step {0:,.0f}".format(*min(finite, key=lambda row: row[1]))
            if len(finite)
            else "none"
        )
        reached = Number(last["step"]), Number(last["tokens"]), f"{last['loss']:.5f}"
        rows.append([run.name, *reached, best, Number(np.nanmedian(run.logged["tps"]))])
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


def draw(runs: list[Run], x_axis: str, narrow: bool = False) -> Figure:
    """Return the figure; validation has a panel where a run validated. A narrow one, for a phone,
    has a panel a line.
    """
    validation = "validation_loss" if any(len(run.validated) for run in runs) else "loss"
    panels: Any = [["loss", "loss", validation], ["grad_norm", "lr", "tps"]]
    heights = [4, 3]
    if narrow:
        panels = [[key] for key in dict.fromkeys([*panels[0], *panels[1]])]
        heights = [1] * len(panels)
    figure = _empty_figure(*(5, 3 * len(panels)) if narrow else (12.4, 7.2))
    for key, axes in figure.subplot_mosaic(panels, sharex=True, height_ratios=heights).items():
        _draw_panel(axes, key, [run.curve(key, x_axis) for run in runs], x_axis)
    lines, names = axes.get_lines()[1::3], [run.name for run in runs]
    title = "thin: as logged; thick: moving mean over 1/30 of the run; crosses: NaN or infinite"
    if narrow:
        title = fill(title, 60)
    figure.legend(lines, names, loc="outside upper left",
                  ncols=max(1, (50 if narrow else 140) // (max(map(len, names)) + 8)),
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
        color = f"C{number}"  # of the style
        dashes = ("-", "--", ":")[number // 8 % 3]
        crosses = x[~np.isfinite(y)]
        # A line alone would not show a value between two that are not finite.
        marker = "." if len(crosses) or len(y) <= 60 else ""
        has_line = len(y) > 2  # two points are no trend
        mean = y if not smoothed else np.exp(smooth(np.log(y))) if log else smooth(y)
        axes.plot(x, y, color=color, alpha=0.5, lw=0.8 * has_line, marker=marker)
        point = "" if has_line else "o"
        axes.plot(x, mean, dashes, color=color, lw=1.8 * has_line, marker=point)
        axes.plot(
            crosses, [0.98] * len(crosses), "x", color=color, transform=axes.get_xaxis_transform()
        )
    axes.set(title=TITLES[key] + (", log scale" if log else ""), xlabel=x_axis)
    if log:
        _use_logarithms(axes, low, high)
    elif from_zero:
        axes.set_ylim(bottom=0)
    prefixed = ticker.EngFormatter(sep="")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=x_axis != "hours"))
    axes.xaxis.set_major_formatter(
        "{x:g}" if x_axis == "hours" else lambda x, _: prefixed(x).replace("G", "B")
    )
    axes.tick_params(labelbottom=True)  # in the upper row too


def draw_by(runs: list[Run], key: str) -> tuple[Figure, str]:
    """Return a figure and a table of the last losses, those of validation if all runs have it.

    A dot is a run, hollow if it has not finished; a cross is one whose loss is not finite. The line
    goes through the means of each value, and the band from the lowest to the highest loss: the
    spread over seeds.
    """
    measure = "validation_loss" if all(len(run.validated) for run in runs) else "loss"
    steps = np.array([run.logged["step"][-1] for run in runs])
    losses = np.array([smooth(run.values(measure))[-1] for run in runs])
    unfinished = steps < _values(runs, "training.steps")
    values = _values(runs, key)
    distinct = np.unique(values)
    if len(distinct) == 1:
        raise UserError(f"--by {key}: it is {distinct[0]} in all of these runs")
    figure = _empty_figure(8, 5)
    axes = figure.subplots()
    of_value = [losses[values == value] for value in distinct]
    axes.plot(distinct, [same.mean() for same in of_value])
    low, high = ([pick(same) for same in of_value] for pick in (np.fmin.reduce, np.fmax.reduce))
    axes.fill_between(distinct, low, high, alpha=0.2)
    axes.plot(values[~unfinished], losses[~unfinished], "oC0")
    axes.plot(values[unfinished], losses[unfinished], "oC0", fillstyle="none")
    lost = values[~np.isfinite(losses)]
    axes.plot(lost, [0.98] * len(lost), "xC0", transform=axes.get_xaxis_transform())
    notes = "at the end of each run; hollow: not finished; crosses: NaN or infinite"
    axes.set(title=f"{TITLES[measure]} {notes}", xlabel=key)
    least, most = np.fmin.reduce(low), np.fmax.reduce(high)
    if 0 < 5 * least < most:
        _use_logarithms(axes, least, most)
    if distinct.dtype.kind != "U":
        axes.set_xscale("log" if 0 < 5 * distinct[0] < distinct[-1] else "linear")
        axes.set_xticks(distinct, [f"{value:g}" for value in distinct])
        axes.minorticks_off()
    rows = [
        (f"{values[n]}", f"{losses[n]:.5f}", f"{steps[n]:,.0f}", runs[n].name)
        for n in np.argsort(values, kind="stable")
    ]
    return figure, format_table(rows, (key, TITLES[measure].lower(), "steps", "run"), ">>><")


def _values(runs: list[Run], key: str) -> np.ndarray:
    """Return a key's value in each run's config: numbers, or texts where one is no number."""
    values = []
    for run in runs:
        config = flatten(tomllib.loads(text_of(run.folder / CONFIG)))
        if key not in config:
            close = nearest(key, config)
            hint = close and f"; did you mean {close}?"
            raise UserError(f"--by {key}: no such key in {run.folder / CONFIG}{hint}")
        values.append(config[key])
    are_numbers = all(type(value) in (int, float) for value in values)
    return np.array(values if are_numbers else [str(value) for value in values])


def _empty_figure(width: float, height: float) -> Figure:
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(Path(__file__).with_suffix(".mplstyle"))
    return Figure(figsize=(width, height), layout="constrained")


def _use_logarithms(axes: Axes, low: float, high: float) -> None:
    """Make the scale of losses logarithmic, with labels that are plain numbers."""
    from matplotlib import ticker

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(
        ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 30 * low else (1, 3))
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
