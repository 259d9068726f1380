"""`titanlite top` and `titanlite report`: a run as its files show it, while it trains and later, in
the terminal or as one page.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from html import escape
from pathlib import Path

import numpy as np

from titanlite.checkpoint.manifest import CONFIG, ENVIRONMENT
from titanlite.config.options import declare
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml, toml_differences, tomllib
from titanlite.errors import columns
from titanlite.launch.terminal import NOTICES
from titanlite.layout import Layout
from titanlite.observe.metrics import format_duration
from titanlite.observe.page import Table, html_table, write_html
from titanlite.runtime.rank_files import RANKS
from titanlite.tools.record import chart, read_run, text_of

CURVES = "loss validation_loss grad_norm lr tps memory_gib".split()
PLACE = "phase step seconds host".split()


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the run and the page."""
    options = {
        "DUMP": ("dump folder of a run (job.dump_folder)", Path),
        "--html FILE": ("write a page instead, which needs no network and no script", Path),
    }
    declare(parser, options)
    parser.description = """Show a run: its curves, the place of each rank, memory, saves, \
restarts, hangs and bad steps. Only files are read, so that another machine of the cluster will \
do, and a run that is over has a view too. In a terminal the view is live until the last step or \
Ctrl-C; elsewhere it is printed once. The curves have the names of metrics.jsonl."""
    parser.epilog = "example: titanlite top outputs; titanlite report outputs --html report.html"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Show the run of a dump folder."""
    if arguments.html:
        _write_page(arguments.dump, arguments.html)
        return 0
    text, is_over = view(arguments.dump)
    if not sys.stdout.isatty():
        print(text)
        return 0
    from rich.live import Live
    from rich.text import Text

    # rich's own stdout has no encoding.
    with Live(Text(text), redirect_stdout=False) as live, suppress(KeyboardInterrupt):
        while not is_over:
            time.sleep(1)
            text, is_over = view(arguments.dump)
            live.update(Text(text))
    return 0


def view(dump: Path) -> tuple[str, bool]:
    """Return a run as text as wide as the terminal, and whether it has reached its last step."""
    record = read_run(dump)
    config = tomllib.loads(text_of(record.folder / CONFIG))
    steps, is_over = config.get("training", {}).get("steps", 0), False
    state = "starting, no step logged yet"
    if len(record.logged):
        step, seconds = record.logged[["step", "step_seconds"]][-1]
        is_over = step >= steps > 0
        left = "done" if is_over else f"eta {format_duration((steps - step) * seconds)}"
        state = f"step {step:.0f} of {steps}, {left}"
    rows = []
    for key in CURVES:
        values = record.values(key)
        if not np.isnan(values).all():
            rows.append((key, f"{values[-1]:,.4g}", chart(values, columns(80) - 30)))
    tables = [
        Table("curves", f"{dump}: {state}", (), rows or _last_notice(record.folder)),
        Table("events", "events", (), record.events()),
        _ranks(record.folder / "logs" / RANKS),
    ]
    return "\n\n".join(map(str, tables)), is_over


def _last_notice(folder: Path) -> list[tuple[str, str]]:
    """Return the last line of the launcher's log."""
    lines = text_of(folder / "logs" / NOTICES).splitlines()
    return [("launcher", line.removeprefix("titanlite: ")) for line in lines[-1:]]


def _ranks(file: Path) -> Table:
    """Return the places of the ranks."""
    rows = [
        (rank, *(f"{beat[key]}" for key in PLACE))
        for rank, beat in json.loads(text_of(file) or "{}").items()
    ]
    title = "ranks: not known, titanlite's launcher writes their places"
    if rows:
        title = f"ranks, {format_duration(time.time() - file.stat().st_mtime)} ago"
    return Table("ranks", title, ("rank", *PLACE), rows)


def _write_page(dump: Path, path: Path) -> None:
    """Write the page of a run."""
    from titanlite.planner.page import draw_mesh
    from titanlite.tools.plot import draw, picture, read_runs, summarize

    (record,) = read_runs([dump])
    folder = record.folder
    environment = text_of(folder / ENVIRONMENT)
    layout = Layout(**json.loads(environment or "{}").get("mesh", {}))
    ranks = _ranks(folder / "logs" / RANKS)
    hosts = len({row[-1] for row in ranks.rows}) or 1
    changed = toml_differences(to_toml(JobConfig()), text_of(folder / CONFIG))
    validated = [(f"{step:.0f}", f"{loss:.5f}") for step, loss in record.validated]
    tables = [
        ranks,
        Table("events", "Events", (), record.events()),
        Table("config", "Config", ("key", "default -> here"), [*changed.items()]),
        Table("evaluations", "Evaluations", ("step", "validation loss"), validated),
    ]
    parts = [
        f"<pre>{escape(summarize([record]))}</pre>",
        picture(draw([record], "steps")),
        draw_mesh(layout, layout.world // hosts),
        *map(html_table, tables),
        f"<h2>Environment</h2><pre>{escape(environment)}</pre>",
    ]
    write_html(path, f"{dump}: {layout}", "".join(parts))
    print(f"wrote {path}")
