"""`titanlite generate`: text from a checkpoint of any mesh, in one process without process groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from titanlite.checkpoint.load import load_weights
from titanlite.checkpoint.manifest import (
    CorruptCheckpoint,
    committed,
    faults,
    latest_complete,
    read_manifest,
    read_state,
    step_folder,
)
from titanlite.checkpoint.resume import checkpoint_root
from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, parse_command_line
from titanlite.data.tokenizer import open_tokenizer
from titanlite.errors import UserError, some_of
from titanlite.parallel.build import build_model
from titanlite.parallel.init import allocate
from titanlite.runtime.distributed import pick_device
from titanlite.tools.arguments import run_verb
from titanlite.train.generate import generate

USAGE = """  titanlite generate --config FILE.toml [--prompt TEXT] [--tokens N] [--temperature T] [--checkpoint PATH]
      Text from the newest whole checkpoint in the config's job.dump_folder, or from PATH, a checkpoint or a folder
      of them, of any mesh. Other options are overrides: --section.key VALUE.
"""
SHORT = {f"--{name}": f"--generate.{name}" for name in ("prompt", "tokens", "temperature")}


def sample(words: list[str]) -> int:
    """Run the verb; the exit code."""
    if {"--help", "-h"} & set(words):
        print(USAGE, end="")
        return 0
    try:
        return run_verb(lambda: _sample(words))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _sample(words: list[str]) -> int:
    path, words = _take(words, "--checkpoint")
    words = [
        word.replace(name, SHORT[name], 1) if (name := word.partition("=")[0]) in SHORT else word for word in words
    ]
    job = job_from(parse_command_line(words, os.environ), world=None, training=False)
    folder = chosen(Path(path) if path else checkpoint_root(job.config))
    tokenizer = open_tokenizer(job)
    text = generate(
        [load_model(job, folder, device := pick_device(job.config.job.device, 0))],
        tokenizer,
        job.config.generate,
        job.positions,
        read_state(folder)["position"]["seed"],
        device,
    )
    print(f"titanlite: {folder}, temperature {job.config.generate.temperature:g}", file=sys.stderr)
    print(text)
    return 0


def _split(word: str) -> tuple[str, str]:
    """An option, and its value with the sign between them."""
    name, equals, value = word.partition("=")
    return name, equals + value


def _take(words: list[str], option: str) -> tuple[str, list[str]]:
    """The value of an option, and the other words."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option and equals:
            return value, words[:at] + words[at + 1 :]
        if name == option:
            if at + 1 == len(words):
                raise UserError(f"{option} needs a path")
            return words[at + 1], words[:at] + words[at + 2 :]
    return "", words


def chosen(path: Path) -> Path:
    """A checkpoint, or the newest whole one of a folder of them."""
    if not committed(path):
        read_manifest(path)  # or an error that names it
        return path
    newest = latest_complete(path)
    if newest is None:
        raise CorruptCheckpoint(f"no checkpoint in {path} is whole")
    return step_folder(path, newest)


def load_model(job: Job, folder: Path, device: torch.device) -> torch.nn.Module:
    """The job's model on one device, with a checkpoint's weights, verified as checkpoint.verify_on_load says."""
    manifest = read_manifest(folder)
    full = job.config.checkpoint.verify_on_load == "full"
    if found := faults(folder, manifest, manifest.files if full else ()):
        raise CorruptCheckpoint(f"{folder} is damaged:{some_of(found)}")
    model, _ = build_model(job)
    allocate(model, device)
    load_weights(folder, model)
    return model
