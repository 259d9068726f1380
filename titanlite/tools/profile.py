"""`titanlite profile`: train a few steps, show where the time goes, and keep the traces."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from titanlite.checkpoint.manifest import CONFIG
from titanlite.config.load import load_config, parse_command_line
from titanlite.config.options import declare
from titanlite.errors import format_table
from titanlite.launch import launcher
from titanlite.launch.nodes import find_nodes
from titanlite.tools.breakdown import COMMUNICATION, WORK_KINDS, Breakdown, read

WARM_UP = 5
TRACED = 3
"""Numbers of steps; compilation and first allocations happen before the traced ones."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the run whose config is profiled."""
    parser.set_defaults(takes_overrides=True)
    about = "dump folder of a run, for its config.toml (default: the config of --config)"
    declare(parser, {"[DUMP]": (about, Path)})
    parser.epilog = "example: NGPU=2 titanlite profile --config debug.toml --compile.enable"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run the job's first steps as `titanlite train` would, then print the table."""
    if arguments.dump:
        overrides = ["--config", f"{arguments.dump / CONFIG}", *overrides]
    config = load_config(parse_command_line(overrides, os.environ)).config
    folder = Path(config.job.dump_folder) / "profile"
    steps = WARM_UP + TRACED
    total = max(steps, config.lr_scheduler.total_steps or config.training.steps)
    profiled = [
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--profiling.enable_profiling",
        f"--profiling.profile_freq={steps}",
        f"--profiling.profiler_warmup={WARM_UP - 1}",
        f"--profiling.profiler_active={TRACED}",
        f"--lr_scheduler.total_steps={total}",
        "--validation.no_enable",
        "--checkpoint.no_enable",
        "--generate.no_at_end",
    ]
    print(
        f"titanlite: a profile takes {steps} steps, the last {TRACED} of them traced; "
        "without validation, checkpoints and a sample"
    )
    code = launcher.run(arguments, [*overrides, *profiled])
    if code:
        return code
    if find_nodes(os.environ).rank > 0:
        return 0
    traces = folder / config.profiling.save_traces_folder / f"step-{steps}"
    ranks = []
    for rank in range(len(list(traces.iterdir()))):
        ranks.append(read(traces / f"rank-{rank}.json"))
    print(f"\n{step_table(ranks)}\n\ntraces       {traces}, for https://ui.perfetto.dev")
    return 0


def step_table(ranks: Sequence[Breakdown]) -> str:
    """Return each kind's mean over the ranks, and the rank that spent the most on it."""
    step = mean(rank.step for rank in ranks)
    rows = []
    for kind in WORK_KINDS:
        seconds = [rank.kinds[kind] for rank in ranks]
        row = [kind, f"{1000 * mean(seconds):.1f}", f"{100 * mean(seconds) / step:.1f}%"]
        rows.append([*row, f"{1000 * max(seconds):.1f}", str(seconds.index(max(seconds)))])
    rows.append(["the step", f"{1000 * step:.1f}", "100.0%", "", ""])
    columns = 5 if len(ranks) > 1 else 3
    header = ["where a step goes", "ms", "share", "most", "rank"]
    shown = [row[:columns] for row in rows]
    lines = [format_table(shown, header[:columns], align="<>>>>", indent=2)]
    hidden = mean(rank.hidden for rank in ranks)
    if hidden:
        exposed = mean(rank.kinds[COMMUNICATION] for rank in ranks)
        lines.append(
            f"{100 * hidden / (hidden + exposed):.0f}% of the communication "
            "is hidden behind computation"
        )
    lines.append(
        f"Means of {TRACED} traced steps; tracing makes small operations look slower than they are."
    )
    return "\n".join(lines)
