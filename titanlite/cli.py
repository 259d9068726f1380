"""The `titanlite` command: its verbs, and their help."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from titanlite import __version__

USAGE = """titanlite {version}: pretraining that you can read in an afternoon and prove on your laptop

  titanlite train  [--config FILE.toml …] [--section.key VALUE …]   train; the same as ./run_train.sh
  titanlite config [--config FILE.toml …] [--section.key VALUE …]   print the resolved config
                   [--world N]                                        judged for N ranks, not the fewest
                   [--schedule]                                       which FSDP group gathers which ahead
                   [--placements]                                     the mesh, its nodes, where parameters lie
                   [--schema | --markdown]                            JSON schema of configs; docs/config.md

  titanlite data prepare SRC… --out FOLDER [--tokenizer FOLDER]     text into token shards, on all cores
  titanlite data show FOLDER                                        what a prepared folder holds
  titanlite download REPO [--only tokenizer|weights] [--to FOLDER]  from the Hugging Face hub, into assets/hf
  titanlite checkpoint ls|verify|show|diff|export|import|rm …       looks at checkpoints; Hugging Face, out and in
  titanlite generate [--config FILE.toml …] [--prompt TEXT]         text from the newest checkpoint
  titanlite tour                                                    train, kill, resume elsewhere, export: 3 minutes
  titanlite verify [--model NAME] [--full] [--fault NAME|list]      is training on every mesh equal to one process?
  titanlite profile [--config FILE.toml …]                          where the time of a step goes; traces
  titanlite plot DUMP… [--out curves.html]                          curves of one or several runs

Without --config, train_configs/debug.toml is used; CONFIG_FILE names another. Several files overlay left to right;
the command line wins over files. Environment: NGPU (processes on this node), LOG_RANK (whose output is shown),
NNODES NODE_RANK MASTER_ADDR MASTER_PORT (several nodes; SLURM_* and PET_* are understood as well).

`titanlite train --help` lists every key.
"""


def run() -> NoReturn:
    """The command as a process."""
    words = sys.argv[1:]
    trains = words[:1] == ["train"] and not {"--help", "-h"} & set(words)
    if not trains:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `titanlite … | head` ends without a traceback
    code = main(words)
    if trains:  # the workers are gone, and the interpreter's own end, with torch in it, takes most of a second
        with suppress(OSError):  # the console may be gone too
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(words: list[str]) -> int:
    """Run a verb; the exit code."""
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in ("--version", "version"):
        print(f"titanlite {__version__}")
        return 0
    if verb in ("--help", "-h", "help"):
        print(USAGE.format(version=__version__), end="")
        return 0
    if verb == "train":
        if {"--help", "-h"} & set(rest):
            return _help()
        from titanlite.launch.launcher import launch

        return launch(rest)
    if verb == "config":
        return _config(rest)
    if verb == "data":
        from titanlite.tools.data import data

        return data(rest)
    if verb == "download":
        from titanlite.tools.download import download

        return download(rest)
    if verb == "verify":
        from titanlite.verify.command import verify

        return verify(rest)
    if verb == "profile":
        from titanlite.tools.profile import profile

        return profile(rest)
    if verb == "plot":
        from titanlite.tools.plot import plot

        return plot(rest)
    if verb == "checkpoint":
        from titanlite.tools.checkpoint import checkpoint

        return checkpoint(rest)
    if verb == "generate":
        from titanlite.tools.generate import sample

        return sample(rest)
    if verb == "tour":
        from titanlite.tools.tour import tour

        return tour(rest)
    from titanlite.errors import nearest

    verbs = (
        "train",
        "config",
        "data",
        "download",
        "checkpoint",
        "generate",
        "tour",
        "verify",
        "profile",
        "plot",
        "help",
    )
    close = nearest(verb, verbs)
    hint = f"; did you mean {close}?" if close else ""
    print(
        f"titanlite: there is no verb {verb}{hint}\n\n{USAGE.format(version=__version__)}",
        end="",
        file=sys.stderr,
    )
    return 2


def _help() -> int:
    from titanlite.config.docs import help_text

    print(USAGE.format(version=__version__))
    print(help_text(), end="")
    return 0


def _config(words: list[str]) -> int:
    """Print the resolved config, or what describes all configs."""
    from titanlite.config.docs import json_schema, markdown
    from titanlite.config.job import job_from
    from titanlite.config.load import ConfigError, parse_command_line, to_toml

    if "--schema" in words:
        print(json_schema(), end="")
        return 0
    if "--markdown" in words:
        print(markdown(), end="")
        return 0
    if {"--help", "-h"} & set(words):
        return _help()
    schedule, placements = "--schedule" in words, "--placements" in words
    words = [word for word in words if word not in ("--schedule", "--placements")]
    world: int | None = None
    if "--world" in words:
        at = words.index("--world")
        number = words[at + 1] if at + 1 < len(words) else ""
        if not number.isdigit() or int(number) < 1:
            print(f"titanlite: --world needs a number of ranks, not {number or 'nothing'}", file=sys.stderr)
            return 2
        world, words = int(number), words[:at] + words[at + 2 :]
    try:
        job = job_from(parse_command_line(words, os.environ), world=world, training=False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if schedule:
        from titanlite.parallel import fsdp_schedule

        print(fsdp_schedule.schedule(job, tied=any(rule.tied for rule in job.spec.rules(job.model))))
        return 0
    if placements:
        from titanlite.errors import UserError
        from titanlite.planner.placements import describe

        per_node = os.environ.get("NGPU", "")
        try:
            print(describe(job, int(per_node) if per_node.isdigit() and int(per_node) else min(8, job.layout.world)))
        except UserError as error:
            print(f"titanlite: {error}", file=sys.stderr)
            return 2
        return 0
    ranks = f"{job.layout.world} rank{'s' * (job.layout.world > 1)}"
    print(f"# {job.config.model.name} {job.config.model.flavor} on {ranks}: {job.layout}")
    if job.no_effect:
        print(f"# {job.no_effect}")
    print(to_toml(job.given), end="")
    return 0
