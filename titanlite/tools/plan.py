"""`titanlite plan`: memory, communication and speed of a config on any mesh of any GPU, determined
on this machine.
"""

import json
import os
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

from titanlite.config.hardware_table import hardware_table, recognize
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.config.options import declare, positive_int
from titanlite.config.toml import values_to_toml
from titanlite.errors import UserError, print_notice
from titanlite.launch.nodes import gpu_bytes, gpu_name
from titanlite.observe.progress import waiting
from titanlite.planner.hardware import Hardware, load_hardware

DESCRIPTION = """Rehearse one training step of a config, without its processes and without a GPU, \
and print whether it
fits into the memory of a GPU, what it communicates, and how fast it can be. \
Nothing is trained, no data is read.
The exit code is 0 if it fits and 2 if not; --search then looks for what would."""
EPILOG = """examples:
  titanlite plan --config llama_8b.toml --world 8 --gpu h100-80g
  titanlite plan --config llama_405b.toml --world 512 --gpu h100-80g --tokens 15e12
  titanlite plan --config llama_70b.toml --world 256 --gpu h100-80g --search --out best.toml
  titanlite train --config llama_70b.toml best.toml

docs/planning.md separates exact numbers from assumptions."""


def _number(least: float, legal: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not least <= number < float("inf"):
        raise ArgumentTypeError(f"must be a number {legal}, not {text!r}")
    return number


_positive = partial(_number, 1e-300, "> 0 such as 15e12")
_times = partial(_number, 1, ">= 1 such as 1.5")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.set_defaults(takes_overrides=True)
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    options = {
        "--world N": ("number of GPUs (default: the fewest that the config allows)", positive_int),
        "--gpu NAME": "GPU to plan for, such as h100-80g (default: this machine's)",
        "--hardware FILE …": (
            "a TOML file with further GPUs, nodes or networks, or other numbers of known ones",
            Path,
        ),
        "--tokens N": ("also print the days that N tokens take", _positive, 0.0),
        "--imbalance F": (
            "experts: the fullest rank receives F times the mean of tokens (default: 1)",
            _times,
            1.0,
        ),
        "--json": "print all of it as JSON instead",
        "--html FILE": ("also write the tables as a page", Path),
        "--search": "look for the fastest mesh, batch and recomputation that fit",
        "--max-seconds S": ("time for --search in seconds (default: 60)", positive_int),
        "--out FILE": ("with --search: write the best as a config to lay over the given one", Path),
    }
    declare(parser, options)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print the plan of a job, or the ranking of a search; 2 if nothing fits."""
    if not arguments.search:
        for option in ("max_seconds", "out"):
            if getattr(arguments, option) is not None:
                raise UserError(f"--{option.replace('_', '-')} belongs to --search: add it")
    for option in ("html", "out"):  # before minutes of planning
        path = getattr(arguments, option)
        if path and not path.parent.is_dir():
            raise UserError(f"--{option} {path}: there is no folder {path.parent}")
    hardware = _hardware(arguments.gpu, arguments.hardware)
    job = job_from(
        parse_command_line(overrides, os.environ),
        world=arguments.world,
        training=True,
        device="cuda",
    )
    if arguments.search:
        return _search(arguments, overrides, job, hardware)
    from titanlite.planner.plan import make_plan
    from titanlite.planner.tables import report

    with waiting("planning"):
        plan = make_plan(job, hardware, arguments.tokens, arguments.imbalance)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print(report(plan))
    if arguments.html:
        from titanlite.planner.page import write_page

        write_page(plan, arguments.html)
        print_notice(f"wrote {arguments.html}")
    return 0 if plan.fits else 2


def _search(arguments: Namespace, overrides: list[str], job: Job, hardware: Hardware) -> int:
    """Print the best candidates of a search, and write the first to --out."""
    from titanlite.planner.search import search
    from titanlite.planner.tables import search_table

    if arguments.html or arguments.json or arguments.tokens or arguments.imbalance > 1:
        raise UserError(
            "--html, --json, --tokens and --imbalance show one plan: give them without --search, "
            "with what it found"
        )
    with waiting("searching"):
        found = search(job, hardware, arguments.max_seconds or 60)
    print(search_table(found, hardware, job.layout.world))
    if not found.best:
        return 2
    if arguments.out:
        title = (
            f"# the fastest of `titanlite {shlex.join(arguments.argv)}`, to lay over its config\n"
        )
        arguments.out.write_text(title + values_to_toml(found.best[0].settings), encoding="utf-8")
        print(f"wrote {arguments.out}")
    return 0


def _hardware(name: str | None, files: list[Path]) -> Hardware:
    """Return the hardware of the named GPU, by default this machine's."""
    if name is not None:
        return load_hardware(name, files)
    found = gpu_name()
    known = recognize(found, gpu_bytes(), files) if found else ""
    if known:
        return load_hardware(known, files)
    why = "this machine has no NVIDIA GPU"
    if found:
        why = f"this machine's GPU, {found}, is unknown"
    raise UserError(
        f"{why}; --gpu names one to plan for: {', '.join(hardware_table(files)['gpu'])}"
    )
