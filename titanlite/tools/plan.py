"""`titanlite plan`: memory, communication and speed of a config on any mesh of any GPU, found out
on this machine.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from titanlite.config.hardware_table import hardware_table, recognize
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.config.options import declare, positive_int
from titanlite.config.toml import toml_value, values_to_toml
from titanlite.errors import RunFailed, UserError, print_notice
from titanlite.launch.nodes import gpu_bytes, gpu_name
from titanlite.observe.progress import waiting
from titanlite.planner.hardware import Hardware, load_hardware

MEASURED = 5
"""Steps that --measure times, after as many that warm up."""
DESCRIPTION = """Rehearse one training step of a config, without its processes and without a GPU, \
and print whether it
fits into the memory of a GPU, what it communicates, and how fast it can be. \
Nothing is trained, no data is read.
The exit code is 0 if it fits and 2 if not; then changes that would fit are listed."""
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
    parser.description, parser.epilog = DESCRIPTION, EPILOG
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
        "--html FILE": ("also write a page with pictures of the step", Path),
        "--search": "look for the fastest mesh, batch and recomputation that fit",
        "--max-seconds S": ("time for --search in seconds (default: 60)", positive_int),
        "--out FILE": ("with --search: write the best as a config to lay over the given one", Path),
        "--measure K": (
            "with --search: train the best K for a few steps on this machine, and rank by that",
            positive_int,
        ),
    }
    declare(parser, options)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print the plan of a job, or the ranking of a search; 2 if nothing fits."""
    if not arguments.search:
        for option in ("max_seconds", "out", "measure"):
            if getattr(arguments, option) is not None:
                raise UserError(f"--{option.replace('_', '-')} belongs to --search: add it")
    for option in ("html", "out"):  # before minutes of planning
        if (path := getattr(arguments, option)) and not path.parent.is_dir():
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
    print(json.dumps(plan.to_json(), indent=1) if arguments.json else report(plan))
    if arguments.html:
        from titanlite.planner.page import write_page

        write_page(plan, arguments.html)
        print_notice(f"wrote {arguments.html}")
    return 0 if plan.fits else 2


def _search(arguments: Namespace, overrides: list[str], job: Job, hardware: Hardware) -> int:
    """Print the best of a search, and write the first of them."""
    from titanlite.planner.search import measured, search
    from titanlite.planner.tables import search_table

    if arguments.html or arguments.json or arguments.tokens or arguments.imbalance > 1:
        raise UserError(
            "--html, --json, --tokens and --imbalance show one plan: give them without --search, "
            "with what it found"
        )
    with waiting("searching"):
        found = search(job, hardware, arguments.max_seconds or 60)
    if arguments.measure:
        found = measured(found, arguments.measure, partial(_measure, overrides, job.layout.world))
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


def _measure(overrides: list[str], world: int, settings: dict[str, Any]) -> float:
    """Train a few steps on this machine; return the seconds of a step."""
    with tempfile.TemporaryDirectory(prefix="titanlite-plan-") as folder:
        own = [f"--{key}={toml_value(value)}" for key, value in settings.items()]
        own.append(f"--job.dump_folder={folder}")
        own += f"""
            --training.steps={2 * MEASURED} --metrics.log_freq=1 --validation.no_enable
            --checkpoint.no_enable --generate.no_at_end
            """.split()
        command = [sys.executable, "-m", "titanlite", "train", *overrides, *own]
        environ = {**os.environ, "NGPU": f"{world}"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise RunFailed(
                f"--measure: {' '.join(own[: len(settings)])} could not train: {''.join(last)}"
            )
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return median(json.loads(line)["step_seconds"] for line in lines[-MEASURED:])


def _hardware(name: str | None, files: list[Path]) -> Hardware:
    """Return the named GPU's hardware, by default that of this machine's GPU."""
    if name is not None:
        return load_hardware(name, files)
    found = gpu_name()
    if known := recognize(found, gpu_bytes(), files) if found else "":
        return load_hardware(known, files)
    why = f"this machine's GPU, {found}, is unknown" if found else "this machine has no NVIDIA GPU"
    raise UserError(
        f"{why}; --gpu names one to plan for: {', '.join(hardware_table(files)['gpu'])}"
    )
