"""`titanlite top`: a run in the terminal as its files show it, while it trains and later."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

import numpy as np

from titanlite.checkpoint.manifest import CONFIG
from titanlite.config.options import declare
from titanlite.config.toml import tomllib
from titanlite.errors import columns
from titanlite.launch.terminal import NOTICES
from titanlite.observe.metrics import format_duration
from titanlite.observe.page import Table
from titanlite.runtime.rank_files import RANKS
from titanlite.tools.record import chart, read_run, text_of

CURVES = "loss validation_loss grad_norm lr tps memory_gib".split()
PLACE = "phase step seconds host".split()
ABOUT = """Show a run: its curves, the place of each rank, memory, saves, restarts, hangs and bad \
steps. Only files are read, so that another machine of the cluster will do, and a run that is \
over has a view too."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the run."""
    declare(parser, {"DUMP": ("dump folder of a run (job.dump_folder)", Path)})
    parser.description = f"""{ABOUT} In a terminal the view is live until the last step or \
Ctrl-C; elsewhere it is printed once. The curves have the names of metrics.jsonl."""
    parser.epilog = "example: titanlite top outputs"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Show the run of a dump folder."""
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
    ranks = json.loads(text_of(record.folder / "logs" / RANKS) or "{}").values()
    state = "starting" if len(record.logged) else "starting, no step logged yet"
    if len(record.logged) and steps:
        step, seconds = record.logged[["step", "step_seconds"]][-1]
        is_over = step >= steps
        has_ended = ranks and all(beat["phase"] == "ended" for beat in ranks)
        left = "stopped" if has_ended else f"eta {format_duration((steps - step) * seconds)}"
        state = f"step {step:.0f} of {steps}, {'done' if is_over else left}"
    rows = []
    for key in CURVES:
        values = record.values(key)
        if not np.isnan(values).all():
            rows.append((key, f"{values[-1]:,.4g}", chart(values, columns(80) - 30)))
    tables = [
        Table("curves", f"{dump}: {state}", (), rows or _last_notice(record.folder)),
        Table("events", "events", (), record.events()),
        places(record.folder / "logs" / RANKS),
    ]
    return "\n\n".join(map(str, tables)), is_over


def _last_notice(folder: Path) -> list[tuple[str, str]]:
    """Return the last line of the launcher's log."""
    lines = text_of(folder / "logs" / NOTICES).splitlines()
    return [("launcher", line.removeprefix("titanlite: ")) for line in lines[-1:]]


def places(file: Path) -> Table:
    """Return the places of the ranks."""
    rows = [
        (rank, *(f"{beat[key]}" for key in PLACE))
        for rank, beat in json.loads(text_of(file) or "{}").items()
    ]
    title = "ranks: not known yet; titanlite's launcher writes their places"
    if rows:
        title = f"ranks, {format_duration(time.time() - file.stat().st_mtime)} ago"
    return Table("ranks", title, ("rank", *PLACE), rows)
