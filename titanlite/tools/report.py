"""`titanlite report`: a run as one page, made from its files."""

import io
import json
import re
import time
from argparse import ArgumentParser, Namespace
from html import escape
from pathlib import Path
from textwrap import dedent

from titanlite.checkpoint.manifest import CONFIG, ENVIRONMENT
from titanlite.config.layout import Layout
from titanlite.config.options import A_RUN, declare
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml, toml_differences, tomllib
from titanlite.observe.console import rank_log, untimed
from titanlite.observe.events import starts
from titanlite.observe.page import Table, html_table, write_html
from titanlite.runtime.rank_files import RANKS
from titanlite.tools.record import Run, text_of
from titanlite.tools.top import ABOUT, rank_table, state_of

FACTS = "model data batch device mesh titanlite".split()
"""Lines logged at a start that are also on the page."""
THEME = {"#000000": "var(--ink)", "#808080": "var(--soft)", "#e8eaed": "var(--line)"}
"""The colors of plot.mplstyle, and their replacements, which follow the reader's theme."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the run and the page."""
    page = "the page (default: report.html in the dump folder)"
    declare(parser, {**A_RUN, "--html FILE": (page, Path)})
    parser.description = f"{ABOUT} One page, which needs no network and no script."
    parser.epilog = "example: titanlite report outputs"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Write the page of a run."""
    from titanlite.planner.page import draw_mesh
    from titanlite.tools.plot import progress, read_runs

    (record,) = read_runs([arguments.dump])
    folder = record.folder
    path = arguments.html or folder / "report.html"
    config = text_of(folder / CONFIG)
    environment = text_of(folder / ENVIRONMENT)
    layout = Layout(**json.loads(environment or "{}").get("mesh", {}))
    ranks = rank_table(folder / "logs" / RANKS, live=False)
    hosts = len({row[-1] for row in ranks.rows}) or 1
    changed = toml_differences(to_toml(JobConfig()), config)
    steps, losses = record.column("validation_loss")
    validated = []
    for step, loss in zip(steps, losses, strict=True):
        validated.append((f"{step}", f"{loss:.5f}"))
    tables = [
        ranks,
        Table("events", "Events", (), record.events()),
        Table("config", "Config", ("key", "default -> here"), [*changed.items()]),
    ]
    if record.history:
        tables.insert(0, starts(record.history))
    if validated:
        tables.append(Table("evaluations", "Evaluations", ("step", "validation loss"), validated))
    parts = [
        html_table(Table("run", "", (), _facts(record))),
        html_table(progress([record])),
        _curves(record),
        _sample(untimed(text_of(rank_log(folder, 0)))),
        f"<h2>Mesh</h2>{draw_mesh(layout, max(1, layout.world // hosts))}",
        *map(html_table, tables),
        f"<h2>Environment</h2><pre>{escape(environment)}</pre>",
    ]
    description = tomllib.loads(config).get("job", {}).get("description")
    write_html(path, description or f"{record.name}: {layout}", "".join(parts))
    print(f"wrote {path}")
    return 0


def _curves(record: Run) -> str:
    """Return the curves as a part of the page, in the colors of its theme."""
    from titanlite.tools.plot import choose_metrics, draw

    keys = [*choose_metrics([record], None), "grad_norm", "lr", "tps"]
    file = io.StringIO()
    draw([record], keys, "steps").savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    for color, name in THEME.items():
        text = text.replace(color, name)
    return f'<div class="curves">{text[text.index("<svg") :]}</div>'


def _sample(log: str) -> str:
    """Return the last sample of the model in rank 0's log."""
    found = re.findall(r"(?m)^a sample, (at temperature .+):\n\n((?:    .*\n|\n)+)", log)
    if not found:
        return ""
    how, text = found[-1]
    return f"<h2>Sample, {escape(how)}</h2><pre>{escape(dedent(text).strip())}</pre>"


def _facts(record: Run) -> list[tuple[str, str]]:
    """Return facts about the run: lines that rank 0 logged, and times."""
    started = re.findall('"started": "(.+)"', text_of(record.folder / ENVIRONMENT))
    log = untimed(text_of(rank_log(record.folder, 0)))
    return [
        ("folder", record.name),
        ("state", state_of(record)[0]),
        *re.findall(f"(?m)^({'|'.join(FACTS)})  +(.+)", log),
        *(("started", day) for day in started),
        ("this page", time.strftime("%Y-%m-%dT%H:%M:%S%z")),
    ]
