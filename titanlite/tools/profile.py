"""`titanlite profile`: train a few steps, say where their time went, and leave the traces."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import mean

from titanlite.config.load import ConfigError, load, parse_command_line
from titanlite.errors import UserError
from titanlite.launch.launcher import FAILED, OK, REFUSED, launch
from titanlite.runtime.cluster import nodes
from titanlite.tools.breakdown import COMMUNICATION, KINDS, Breakdown, read

WARM_UP, TRACED = 5, 3
"""Steps; compiling and the first allocations are over before the traced ones."""


def profile(words: list[str]) -> int:
    """Run the job's first steps as `titanlite train` would; the exit code."""
    try:
        config = load(parse_command_line(words, os.environ)).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    folder, steps = Path(config.job.dump_folder) / "profile", WARM_UP + TRACED
    ours = [
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--profiling.enable_profiling",
        f"--profiling.profile_freq={steps}",
        f"--profiling.profiler_warmup={WARM_UP - 1}",
        f"--profiling.profiler_active={TRACED}",
        f"--lr_scheduler.total_steps={max(steps, config.lr_scheduler.total_steps or config.training.steps)}",
        "--validation.no_enable",
        "--checkpoint.no_enable",
        "--generate.no_at_end",
    ]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says when it starts and stops
    if code := launch([*words, *ours]):
        return code
    if nodes(os.environ).rank > 0:
        return OK
    traces = folder / config.profiling.save_traces_folder / f"step-{steps}"
    try:
        ranks = [read(traces / f"rank-{rank}.json") for rank in range(len(list(traces.iterdir())))]
    except UserError as error:
        print(f"titanlite: {error}", file=sys.stderr)
        return FAILED
    print(f"\n{table(ranks)}\n\ntraces       {traces}, for https://ui.perfetto.dev")
    return OK


def table(ranks: list[Breakdown]) -> str:
    """Mean over the ranks, and of each kind the rank that spent most on it."""
    several = len(ranks) > 1
    step = mean(rank.step for rank in ranks)
    head = f"{'where a step goes':<24}{'ms':>9}{'share':>8}" + (f"{'most':>10}  rank" if several else "")
    lines = [head]
    for kind in KINDS:
        taken = [rank.kinds[kind] for rank in ranks]
        line = f"  {kind:<22}{1000 * mean(taken):>9.1f}{100 * mean(taken) / step:>7.1f}%"
        lines.append(line + (f"{1000 * max(taken):>10.1f}{taken.index(max(taken)):>6}" if several else ""))
    lines.append(f"  {'the step':<22}{1000 * step:>9.1f}{100:>7.1f}%")
    if hidden := mean(rank.hidden for rank in ranks):
        exposed = mean(rank.kinds[COMMUNICATION] for rank in ranks)
        lines.append(f"{100 * hidden / (hidden + exposed):.0f}% of the communication is hidden behind computation")
    lines.append(f"Means of {TRACED} traced steps; being traced makes small operations look slower than they are.")
    return "\n".join(lines)
