"""`titanlite.load`, and loading of saved models for commands, in one process without process
groups.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    FOREIGN,
    STATE,
    CorruptCheckpoint,
    File,
    Manifest,
    committed,
    faults,
    is_complete,
    is_foreign,
    read_manifest,
)
from titanlite.checkpoint.resume import Resume, saved_model
from titanlite.checkpoint.root import checkpoint_root, checkpoints_of, saved_root
from titanlite.checkpoint.rules import check_model
from titanlite.checkpoint.transfer import fetched, forget, mismatches
from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, load_config, parse_command_line
from titanlite.config.options import declare
from titanlite.errors import UserError, command_line, some_of
from titanlite.observe.progress import track
from titanlite.runtime.bucket import Place, place
from titanlite.runtime.store import LocalPath

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    import torch

    from titanlite.data.tokenizer import Tokenizer

DOCUMENTS = (STATE, CONFIG, ENVIRONMENT)
_WAITING = "OMP_WAIT_POLICY"


def add_checkpoint(parser: ArgumentParser) -> None:
    """Declare the words that name a saved model."""
    parser.set_defaults(takes_overrides=True)
    about = """a run's dump folder, a checkpoint, or a folder of them \
(default: the latest complete one of ./outputs, or of --config's job.dump_folder). \
It is read with its own config, unless there is --config"""
    options = {"[DUMP]": (about, place), "--checkpoint PATH": ("the same as DUMP", place)}
    declare(parser, options)


def named_model(arguments: Namespace) -> Place | None:
    """Return the place that a command line names."""
    dump, checkpoint = arguments.dump, arguments.checkpoint
    if dump and checkpoint:
        raise UserError(f"{dump} and --checkpoint {checkpoint} name two places; give one")
    return dump or checkpoint


def load(
    checkpoint: str | os.PathLike[str], *overrides: str, package: str = ""
) -> tuple[torch.nn.Module, Tokenizer | None]:
    """Return the model and the tokenizer of `titanlite.load`."""
    from titanlite.data.tokenizer import open_tokenizer

    given = [*overrides]
    if package:
        given.append(f"--model.package={package}")
    job, folder = saved_job(place(os.fspath(checkpoint)), given)
    import torch

    return load_model(job, folder, torch.device("cpu")).eval(), open_tokenizer(job)


def saved_job(checkpoint: Place | None, overrides: Sequence[str]) -> tuple[Job, Place]:
    """Return the job of a saved model and its checkpoint: with the checkpoint's own config, unless
    one is named.
    """
    with _threads_that_wait():
        job, folder = _find_saved(checkpoint, overrides)
        import torch  # noqa: F401  (which reads it)
    return job, folder


@contextmanager
def _threads_that_wait() -> Iterator[None]:
    """Let OpenMP's threads wait without spinning, which would take cores from other processes, if
    torch is imported here and the user has not configured it.
    """
    is_ours = _WAITING not in os.environ
    os.environ.setdefault(_WAITING, "passive")
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_WAITING]


def _find_saved(checkpoint: Place | None, overrides: Sequence[str]) -> tuple[Job, Place]:
    given = parse_command_line([*overrides], os.environ)
    if given.faults:
        raise ConfigError(given.faults)
    names_config = given.names_files or (checkpoint is None and os.environ.get("CONFIG_FILE"))
    job = job_from(given, world=None, training=False) if names_config else None
    if checkpoint is None:
        config = job.config if job else load_config(given).config
        checkpoint = checkpoint_root(config)
        if not job and not committed(checkpoint):  # the run there may have set checkpoint.folder
            checkpoint = place(saved_root(LocalPath(config.job.dump_folder)))
        if not committed(checkpoint):
            raise UserError(
                f"there is no checkpoint in {checkpoint} yet; name the run's dump folder"
            )
    folder = find_checkpoint(checkpoint)
    manifest = whole_manifest(folder)
    if job:
        return job, folder
    with fetched(folder, manifest, [CONFIG]) as files:
        # This machine may lack that one's device.
        own = ["--config", str(files / CONFIG), "--job.device=auto"]
        loaded = load_config(parse_command_line([*own, *overrides], {}))
    package = loaded.config.model.package
    if package and "model.package" not in given.overrides:
        raise UserError(
            f'{folder}: the model is in the package "{package}", which is imported only if '
            f'you name it: --model.package {package}, in Python package="{package}"'
        )
    return job_from(loaded, world=None, training=False), folder


def load_model(job: Job, folder: Place, device: torch.device) -> torch.nn.Module:
    """Return the job's model on one device with a checkpoint's weights, checked by
    checkpoint.verify_on_load.
    """
    from titanlite.checkpoint.base import BaseWeights
    from titanlite.checkpoint.load import restore
    from titanlite.checkpoint.state import TrainingState
    from titanlite.parallel.build import build_model
    from titanlite.parallel.init import allocate

    manifest = whole_manifest(folder, job.config.checkpoint.verify_on_load == "full")
    exclude = job.config.checkpoint.exclude_from_loading
    check_model(folder, saved_model(folder), job.spec, job.model_config, exclude)
    model, _ = build_model(job)
    allocate(model, device)
    state = TrainingState([model], None, table={})
    restore(Resume(folder, manifest), state, None)
    if manifest.base:
        given = job.config.checkpoint.initial_load_path
        BaseWeights(manifest.base, given, job.spec, job.model_config).read(state.frozen())
    return model


def find_checkpoints(path: Place) -> list[Place]:
    """Return a checkpoint, or those of a folder or a run, oldest first."""
    if path.is_file():
        raise UserError(f"{path} is a file; name the checkpoint's folder")
    folders = checkpoints_of(path)
    newest = folders[-1] if folders else path
    if is_foreign(newest):
        raise UserError(f"{newest}: {FOREIGN.format(newest)}")
    if not folders:
        raise UserError(_why_none(path))
    return folders


def _why_none(path: Place) -> str:
    """Return why a place has no checkpoint, and what the user may have meant."""
    if not path.exists():
        steps = committed(path.parent)
        beside = f"; steps there: {', '.join(map(str, steps))}" if steps else ""
        return f"{path} does not exist{beside}"
    if (path / "config.json").is_file():
        command = command_line("titanlite", "checkpoint", "import", f"{path}", "OUT")
        return f"{path} is a Hugging Face folder; to make a checkpoint of it: {command}"
    return f"no checkpoint in {path}"


def find_checkpoint(path: Place) -> Place:
    """Return a checkpoint, or the latest complete one of a folder or a run."""
    folders = find_checkpoints(path)
    return next(filter(is_complete, reversed(folders)), folders[-1])


def whole_manifest(folder: Place, full: bool = False, then: str = "") -> Manifest:
    """Return the manifest of a checkpoint; raise CorruptCheckpoint unless all files exist at their
    sizes, and the documents (with `full`, all files) match byte for byte.
    """
    manifest = read_manifest(folder)
    damage = faults(folder, manifest, DOCUMENTS)
    if full and not damage:
        damage = mismatches(folder, manifest, manifest.files)
    if damage:
        raise CorruptCheckpoint(f"{folder} is damaged{then}:{some_of(damage)}")
    return manifest


@contextmanager
def brought(step: Place) -> Iterator[LocalPath]:
    """Yield a local folder with all files of a checkpoint; downloads are deleted at the end."""
    manifest = read_manifest(step)
    names = (name for name, _ in track_files(manifest.files.items()))
    try:
        with fetched(step, manifest, names) as folder:
            yield folder
    finally:
        forget(step, manifest)


def track_files(files: Collection[tuple[str, File]]) -> Iterator[tuple[str, File]]:
    """Yield files of a checkpoint, and show the progress in bytes."""
    total = sum(file.size for _, file in files)
    return track(files, total, "bytes", lambda item: item[1].size)
