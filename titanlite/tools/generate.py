"""`titanlite generate`: text from a checkpoint of any mesh, in one process without process groups."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint.manifest import CorruptCheckpoint, faults, read_manifest, read_state
from titanlite.checkpoint.resume import checkpoint_root, saved_model
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.config.rules.weights import check_model
from titanlite.errors import some_of
from titanlite.tools.checkpoint import find_checkpoint

if TYPE_CHECKING:
    import torch


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.set_defaults(takes_overrides=True)
    parser.epilog = 'example: titanlite generate --config outputs/config.toml --prompt "def " --tokens 100'
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument("--tokens", metavar="N", help="tokens to generate")
    parser.add_argument("--temperature", metavar="T", help="sampling temperature; 0 = greedy")
    about = "a checkpoint, or a folder of them (default: the latest complete one in the config's job.dump_folder)"
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help=about)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Load the model and print what it generates."""
    from titanlite.data.tokenizer import open_tokenizer
    from titanlite.runtime.distributed import pick_device
    from titanlite.train.generate import generate

    options = {name: getattr(arguments, name) for name in ("prompt", "tokens", "temperature")}
    overrides += [f"--generate.{name}={value}" for name, value in options.items() if value is not None]
    job = job_from(parse_command_line(overrides, os.environ), world=None, training=False)
    folder = find_checkpoint(arguments.checkpoint or checkpoint_root(job.config))
    device, tokenizer = pick_device(job.config.job.device, 0), open_tokenizer(job)
    model = load_model(job, folder, device)  # verifies the folder
    settings, seed = job.config.generate, read_state(folder)["position"]["seed"]
    text = generate([model], tokenizer, settings, job.positions, seed, device)
    print(f"titanlite: {folder}, temperature {settings.temperature:g}", file=sys.stderr)
    print(text)
    return 0


def load_model(job: Job, folder: Path, device: torch.device) -> torch.nn.Module:
    """Return the job's model on one device with a checkpoint's weights, checked as checkpoint.verify_on_load says."""
    from titanlite.checkpoint.load import load_weights
    from titanlite.parallel.build import build_model
    from titanlite.parallel.init import allocate

    manifest = read_manifest(folder)
    full = job.config.checkpoint.verify_on_load == "full"
    if damage := faults(folder, manifest, manifest.files if full else ()):
        raise CorruptCheckpoint(f"{folder} is damaged:{some_of(damage)}")
    check_model(
        folder, saved_model(folder, job.spec), job.spec, job.model, job.config.checkpoint.exclude_from_loading
    )
    model, _ = build_model(job)
    allocate(model, device)
    load_weights(folder, model)
    return model
