"""Check what a run starts from, before its workers start."""

from titanlite.checkpoint.manifest import (
    CorruptCheckpoint,
    committed,
    faults,
    is_complete,
    is_foreign,
    read_manifest,
    step_folder,
)
from titanlite.checkpoint.root import checkpoint_root, newest_of, saved_root
from titanlite.checkpoint.rules import require_step
from titanlite.checkpoint.status import in_bucket, times
from titanlite.config.job import Job
from titanlite.config.schema import JobConfig
from titanlite.config.urls import is_url
from titanlite.errors import UserError
from titanlite.runtime.bucket import Place
from titanlite.runtime.store import LocalPath


def check_start(config: JobConfig, job: Job | None = None) -> None:
    """Raise if the checkpoint to start from is missing or damaged, judging by its manifest and file
    sizes, or lies where no run looks. Without a job, a folder of another format is only checked for
    existence.
    """
    settings = config.checkpoint
    path = LocalPath(settings.initial_load_path)
    steps = times(config) if settings.enable else {}
    if settings.enable and settings.load_step != -1:
        if in_bucket(config):
            return  # the workers look for it there
        root = checkpoint_root(config)
        require_step(root, settings.load_step, sorted(steps))
        _require_complete(
            "checkpoint.load_step", step_folder(root, settings.load_step), resumable=True
        )
    elif is_url(settings.initial_load_path) or is_url(saved_root(path)):
        return  # buckets are not opened here
    elif settings.initial_load_path and not steps:
        newest = path
        if not settings.initial_load_in_hf:
            newest = newest_of(path)
        if not settings.initial_load_in_hf and not is_foreign(newest):
            resumable = not settings.initial_load_model_only
            _require_complete("checkpoint.initial_load_path", newest, resumable)
            return
        try:
            if job:
                _open_foreign(job, newest.local())
            elif not newest.exists():
                raise UserError(f"{path} does not exist")
        except UserError as error:
            raise UserError(f"{error}", "checkpoint.initial_load_path") from None
    elif settings.enable and not steps and not in_bucket(config):
        _refuse_misplaced(LocalPath(config.job.dump_folder), checkpoint_root(config))


def _refuse_misplaced(folder: Place, root: Place) -> None:
    """Raise if steps were copied next to the folder that a run looks in: it would start over."""
    whole = [step for step in committed(folder) if is_complete(step_folder(folder, step))]
    if whole:
        found = step_folder(folder, whole[-1])
        why = f"{found} is a checkpoint, and a run looks for its own in {root}: move it there, or "
        raise UserError(f"{why}give another folder", "job.dump_folder")


def _open_foreign(job: Job, path: LocalPath) -> None:
    """Raise if weights of another program do not fit."""
    from titanlite.checkpoint.hf.load import HuggingFaceFolder
    from titanlite.checkpoint.torchtitan.read import TorchTitanCheckpoint

    settings = job.config.checkpoint
    if settings.initial_load_in_hf:
        HuggingFaceFolder(path, job.spec, job.model_config, settings.exclude_from_loading)
    else:
        found = TorchTitanCheckpoint(path, job.spec, job.model_config)
        if not settings.initial_load_model_only:
            _ = found.progress  # raises if it is missing


def _require_complete(key: str, folder: Place, resumable: bool) -> None:
    try:
        problems = faults(folder, read_manifest(folder, outline=True), resumable=resumable)
    except (CorruptCheckpoint, OSError) as error:
        problems = [str(error)]
    if problems:
        raise UserError("; ".join(problems[:8]), key)
