"""What a start does with the folder of an earlier run, before there is a worker. No torch."""

from __future__ import annotations

from pathlib import Path

from titanlite.checkpoint.manifest import committed, export_folder, latest_complete, step_folder
from titanlite.config.schema import JobConfig
from titanlite.observe.run_folder import archive_previous_files, archive_previous_logs


def checkpoint_root(config: JobConfig) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def finished_message(config: JobConfig) -> str:
    """What to say where the target was reached before; nothing where there is something to do."""
    settings, steps = config.checkpoint, config.training.steps
    if not settings.enable or settings.load_step != -1:
        return ""
    newest = latest_complete(checkpoint_root(config))
    if newest is None or newest < steps:
        return ""
    root, missing = checkpoint_root(config), ""
    if settings.last_save_in_hf and not (target := export_folder(root, newest)).exists():
        missing = f"; its export is missing: titanlite checkpoint export {step_folder(root, newest)} {target}"
    return f"already at step {newest} of {steps}: raise --training.steps, or give --job.dump_folder{missing}"


def make_way(config: JobConfig) -> str:
    """Move aside what the run would write over, and say how it begins. A run with checkpoints goes on from them, with
    its metrics; any other begins anew."""
    if config.checkpoint.enable and (steps := committed(checkpoint_root(config))):
        aside = archive_previous_logs(Path(config.job.dump_folder))
        asked = config.checkpoint.load_step
        which = f"step {asked}, as asked," if asked != -1 else f"the newest of steps {', '.join(map(str, steps))}"
        return f"resuming from {which} in {checkpoint_root(config)}" + (
            f"; earlier logs are in {aside}" if aside else ""
        )
    aside = archive_previous_files(config)
    return f"an earlier run's files are now in {aside}" if aside else ""


def last_saved_message(config: JobConfig) -> str:
    """For the last word of a run that was stopped."""
    if not config.checkpoint.enable:
        return "no checkpoint was asked for"
    newest = latest_complete(checkpoint_root(config))
    return "no checkpoint was due yet" if newest is None else f"saved: {step_folder(checkpoint_root(config), newest)}"
