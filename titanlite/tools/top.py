"""`titanlite top`: a run in the terminal, read from its files, during training and afterwards."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size

import numpy as np

from titanlite.checkpoint.manifest import CONFIG
from titanlite.config.options import A_RUN, declare
from titanlite.config.toml import tomllib
from titanlite.errors import columns
from titanlite.observe.events import starts
from titanlite.observe.page import Table
from titanlite.observe.sinks import format_duration
from titanlite.runtime.rank_files import RANKS
from titanlite.tools.record import Run, chart, read_run, text_of

CURVES = "loss validation_loss grad_norm lr tps memory_gib".split()
SILENT_SECONDS = 15
"""Time without new places of the ranks, which the launcher writes every second or two."""
LAST_STARTS = 6
"""Number of starts that are shown; a report has all."""
PLACE = "phase step seconds host".split()
ABOUT = """Show a run: its curves, the place of each rank, memory, saves, restarts, hangs and bad \
steps. It only reads files, so it works on any machine that sees them, and for a run that has \
ended."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the run."""
    declare(parser, A_RUN)
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
            text, is_over = view(arguments.dump, get_terminal_size().lines - 1)
            live.update(Text(text))
    return 0


def view(dump: Path, height: int = 1000) -> tuple[str, bool]:
    """Return a run as text that fits the terminal's width, and whether it has reached its last
    step.

    Starts and curves that do not fit the height are left out.
    """
    record = read_run(dump)
    ranks = record.folder / "logs" / RANKS
    state, is_over = state_of(record)
    rows = []
    for key in CURVES:
        values = record.values(key)
        if not np.isnan(values).all():
            rows.append((key, f"{values[-1]:,.4g}", chart(values, columns(80) - 30)))
    events = f"{Table('events', 'Events', (), record.events())}"
    story = f"{starts(record.history, LAST_STARTS)}"
    ranks_now = f"{rank_table(ranks)}"
    below = "\n\n".join([events, story, ranks_now])
    if not record.history or below.count("\n") > height - 4:
        below = f"{events}\n\n{ranks_now}"
    rows = rows[: max(1, height - 3 - below.count("\n"))]
    return f"{Table('curves', f'{dump}: {state}', (), rows)}\n\n{below}", is_over


def state_of(record: Run) -> tuple[str, bool]:
    """Return the state of a run in words, and whether it is done, with its last step saved."""
    config = tomllib.loads(text_of(record.folder / CONFIG))
    steps = config.get("training", {}).get("steps", 0)
    ranks = record.folder / "logs" / RANKS
    beats = json.loads(text_of(ranks) or "{}").values()
    has_stopped = beats and all(beat["phase"] == "ended" for beat in beats)
    silent = time.time() - ranks.stat().st_mtime if beats else 0
    end = ""
    if record.stop and not record.is_done:
        end = record.stop["how"]
    elif has_stopped:
        end = "stopped"
    elif silent > SILENT_SECONDS:
        end = f"no sign of life for {format_duration(silent)}"
    if not record.steps or not steps:
        state = "starting, no step logged yet"
        if record.steps:
            state = "starting"
        return f"{state}, {end}" if end else state, False
    step = record.steps[-1]
    eta = record.last("eta_seconds")
    if np.isnan(eta):
        eta = (steps - step) * record.last("step_seconds")
    if has_stopped:  # the last step may not have been logged
        step = max(beat["step"] for beat in beats)
    if step >= steps and (record.is_done or has_stopped or not beats):
        return f"step {step} of {steps}, done", True
    doing = ""
    if step >= steps:
        doing = next((beat["phase"] for beat in beats), "")
    left = end or doing or f"eta {format_duration(eta)}"
    return f"step {step} of {steps}, {left}", False


def rank_table(file: Path, *, live: bool = True) -> Table:
    """Return the places of the ranks, with their age or, if not `live`, their time."""
    rows = []
    for rank, beat in json.loads(text_of(file) or "{}").items():
        rows.append((rank, *(f"{beat[key]}" for key in PLACE)))
    title = "Ranks: not known yet; titanlite's launcher writes their places"
    if rows:
        seen = file.stat().st_mtime
        title = f"Ranks, {time.strftime('%F %T %z', time.localtime(seen))}"
        if live:
            title = f"Ranks, {format_duration(time.time() - seen)} ago"
    return Table("ranks", title, ("rank", *PLACE), rows)
