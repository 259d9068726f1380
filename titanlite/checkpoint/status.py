"""What a launcher reports about a run's checkpoints: at the start whether the run is finished, at
the end what was saved. Imports no torch.

A launcher forks, so it must not open a bucket: at the start another process looks there, and
afterwards rank 0 records each save.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import (
    committed,
    export_folder,
    is_complete,
    latest_complete,
    named_latest,
    step_folder,
)
from titanlite.checkpoint.root import checkpoint_root, root_name
from titanlite.config.schema import JobConfig
from titanlite.config.urls import is_url
from titanlite.errors import command_line
from titanlite.observe.run_folder import METRICS, archive_previous_files
from titanlite.runtime import bucket, lock
from titanlite.runtime.bucket import Place
from titanlite.runtime.store import LocalPath

_SAVED = ".saved"
"""File in the dump folder with the newest step in checkpoint.folder, if that is a URL, and when it
was saved (0 if it was found there)."""


def in_bucket(config: JobConfig) -> bool:
    return is_url(config.checkpoint.folder)


def look(config: JobConfig) -> None:
    """Raise if checkpoint.folder is an unusable bucket; record the newest complete step in it."""
    if not (config.checkpoint.enable and in_bucket(config)):
        return
    step = bucket.in_own_process("titanlite.checkpoint.status", config.checkpoint.folder)
    newest_step = int(step) if step else None
    note(config, newest_step)


def note(config: JobConfig, step: int | None, at: int = 0) -> None:
    """Record the newest complete step in the bucket, if there is one."""
    file = LocalPath(config.job.dump_folder, _SAVED)
    if step is None:
        file.remove()
        return
    file.parent.make()
    file.put(f"{step} {at}\n".encode())


def record(config: JobConfig, root: Place, step: int) -> None:
    """Copy the run's metrics and config next to a save, and record the save."""
    try:
        transfer.copy_records(LocalPath(config.job.dump_folder), root)
    finally:
        note(config, step, time.time_ns())


def _newest_there(url: str) -> str:
    """Check a bucket, and return its newest complete step."""
    bucket.check(url)
    root = bucket.place(url)
    for step in reversed(transfer.steps(root)):
        if is_complete(step_folder(root, step)):
            return f"{step}"
    return ""


def times(config: JobConfig) -> dict[int, int]:
    """Return when each step was saved, in nanoseconds; for a bucket, only the newest step."""
    if in_bucket(config):
        with suppress(FileNotFoundError):
            step, at = Path(config.job.dump_folder, _SAVED).read_bytes().split()
            return {int(step): int(at)}
        return {}
    root = checkpoint_root(config)
    return {step: step_folder(root, step).stat().st_mtime_ns for step in committed(root)}


def newest_step(config: JobConfig) -> int | None:
    """Return the newest complete step."""
    if in_bucket(config):
        return max(times(config), default=None)
    return latest_complete(checkpoint_root(config))


def last_named(config: JobConfig) -> int | None:
    """Return the step that was saved last, without checking its files."""
    if in_bucket(config):
        return max(times(config), default=None)
    return named_latest(checkpoint_root(config))


def name_of(config: JobConfig, step: int | None = None) -> str:
    """Return the place of the checkpoints, or of one of them."""
    root = root_name(config)
    return root if step is None else f"{root}/step-{step}"


def finished_message(config: JobConfig) -> str:
    """Return a line if an earlier run has reached the target step; otherwise an empty string."""
    settings = config.checkpoint
    steps = config.training.steps
    if not settings.enable or settings.load_step != -1:
        return ""
    step = newest_step(config)
    if step is None or step < steps:
        return ""
    missing = ""
    if settings.last_save_in_hf:
        target = export_folder(checkpoint_root(config), step)
        if not target.exists():
            saved = name_of(config, step)
            command = command_line("titanlite", "checkpoint", "export", saved, str(target))
            missing = f"; its export is missing: {command}"
    if config.validation.enable and step == steps and not _was_validated(config):
        missing += f"; its validation is missing: {command_for(config, 'evaluate')}"
    other = "--job.dump_folder"
    if in_bucket(config):
        other = "--checkpoint.folder"
    remedy = f"raise --training.steps, or give {other}{missing}"
    return f"already at step {step} of {steps}: {remedy}"


def _was_validated(config: JobConfig) -> bool:
    """Whether the metrics include a validation at the last step."""
    file = Path(config.job.dump_folder, METRICS)
    lines = []
    if file.exists():
        lines = file.read_text("utf-8", "replace").splitlines()
    step = f'"step": {config.training.steps},'
    return any(step in line and '"validation_loss"' in line for line in lines)


def command_for(config: JobConfig, command: str, *words: str) -> str:
    """Return a command for the run's newest checkpoint."""
    package = config.model.package
    named = ["--model.package", package] if package else []
    return command_line("titanlite", command, f"{Path(config.job.dump_folder)}", *words, *named)


def take_folder(config: JobConfig) -> str:
    """Lock the dump folder, move files that this run would overwrite, and return where it starts.

    A run that finds checkpoints appends to its metrics; any other starts over, and all files are
    moved.
    """
    lock.take(
        Path(config.job.dump_folder, lock.RUN_LOCK), f'job.dump_folder = "{config.job.dump_folder}"'
    )
    load_step = config.checkpoint.load_step
    steps = sorted(times(config)) if config.checkpoint.enable else []
    if steps:
        archive = archive_previous_files(config, resumed=True)
        chosen = f"the newest of steps {', '.join(map(str, steps))}"
        if len(steps) == 1:
            chosen = f"step {steps[0]}, the only one,"
        if load_step != -1:
            chosen = f"step {load_step} (checkpoint.load_step)"
        line = f"resuming from {chosen} in {name_of(config)}"
        if archive:
            line += f"; earlier logs go to {archive}"
        return line
    archive = archive_previous_files(config, resumed=False)
    if archive:
        return f"an earlier run's files are now in {archive}"
    return ""


def last_saved_message(config: JobConfig) -> str:
    """Return a phrase about the newest save of a stopped run."""
    if not config.checkpoint.enable:
        return "nothing was saved: checkpoint.enable is off"
    step = newest_step(config)
    if step is None:
        return "no checkpoint was due yet"
    return f"saved: {name_of(config, step)}"


if __name__ == "__main__":
    sys.exit(bucket.main(_newest_there, sys.argv[1]))
