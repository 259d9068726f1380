"""The runs of `titanlite train --sweep KEY=V,V`: one command line a value."""

import os
import shlex
from pathlib import Path

from titanlite.checkpoint import status
from titanlite.config.load import load, parse_command_line
from titanlite.errors import UserError, command_line


def sweep(argv: list[str], settings: list[str]) -> tuple[dict[str, list[str]], str]:
    """Return the arguments of each run, in a folder of its own, and the command that compares
    them.
    """
    *others, setting = settings
    key, _, values = setting.partition("=")
    if not key or not values:
        raise UserError(f"--sweep {setting}: give a key and values, as in optimizer.lr=1e-3,4e-3")
    if others:
        raise UserError(f"--sweep {' --sweep '.join(settings)}: a sweep has one key")
    if len({*values.split(",")}) < len(values.split(",")):
        raise UserError(f"--sweep {setting}: a value is there twice")
    if key == "job.dump_folder":
        raise UserError(f"--sweep {setting}: each run of a sweep has a folder of its own already")
    config = load(parse_command_line(argv, os.environ)).config
    folder, runs = Path(config.job.dump_folder), dict[str, list[str]]()
    for value in values.split(","):
        own = f"{key}={value}"
        name = own.replace("/", "_")
        words = runs[f"{key} = {value}"] = [*argv, f"--{own}", f"--job.dump_folder={folder / name}"]
        if config.debug.seed is None and key != "debug.seed":  # the runs differ in the key alone
            words.append("--debug.seed=0")
        if status.in_bucket(config):
            words.append(f"--checkpoint.folder={config.checkpoint.folder}/{name}")
    plot = command_line("titanlite", "plot")
    return runs, f"{plot} {shlex.quote(str(folder / key))}=*"
