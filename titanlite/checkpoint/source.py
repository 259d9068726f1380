"""Where a run starts: choose a checkpoint or Hugging Face weights, and restore the state from it.

All ranks call every function together.
"""

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import base, load
from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.manifest import Position
from titanlite.checkpoint.resume import Resume, check_alpha, saved_model
from titanlite.checkpoint.rules import check_model
from titanlite.checkpoint.state import TrainingState
from titanlite.checkpoint.torchtitan.read import TorchTitanCheckpoint
from titanlite.errors import RunFailed, UserError
from titanlite.runtime.bucket import place
from titanlite.runtime.distributed import gather_objects
from titanlite.runtime.store import LocalPath


def find(folder: CheckpointFolder) -> Resume:
    """Choose and verify what a run starts from."""
    job = folder.job
    settings = job.config.checkpoint
    full = settings.verify_on_load == "full"
    exclude = settings.exclude_from_loading
    path = place(settings.initial_load_path)
    group = folder.group
    if group is None:
        return Resume()
    resume = None
    if settings.enable and settings.load_step != -1:
        resume = load.at_step(folder.root, settings.load_step, full, group)
    elif settings.enable:
        resume = load.latest_verified(folder.root, full, group, folder.log)
    if resume is None and settings.initial_load_in_hf:
        read = partial(HuggingFaceFolder, path.local(), job.spec, job.model_config, exclude)
        hf = run_on_all_ranks(group, "checkpoint.initial_load_path", read, UserError)
        resume = Resume(path, hf=hf)
    elif resume is None and settings.initial_load_path:
        path, is_others = load.newest(path, group)
        if is_others:
            resume = _from_torchtitan(folder, path.local())
        else:
            resume = load.at_path(path, full, group, settings.initial_load_model_only)
    if resume and resume.manifest and resume.folder:
        saved = saved_model(resume.folder)
        exclude = check_model(resume.folder, saved, job.spec, job.model_config, exclude)
        exclude = check_alpha(resume.folder, job.config.lora, exclude)
    return replace(resume or Resume(), exclude=exclude)


def _from_torchtitan(folder: CheckpointFolder, path: LocalPath) -> Resume:
    """Open a checkpoint of TorchTitan, whose samples are taken for those of this run's batches."""
    job = folder.job
    read = partial(TorchTitanCheckpoint, path, job.spec, job.model_config)
    foreign = run_on_all_ranks(folder.group, "checkpoint.initial_load_path", read, UserError)
    if job.config.checkpoint.initial_load_model_only:
        return Resume(path, foreign=foreign)

    def progress() -> tuple[int, int, dict[str, float]]:
        return *foreign.progress, foreign.numbers

    key = "checkpoint.initial_load_path"
    step, tokens, numbers = run_on_all_ranks(folder.group, key, progress, UserError)
    position = Position(step, tokens, step * job.batch.total)
    return Resume(path, foreign=foreign, continues=True, position=position, numbers=numbers)


def find_before(folder: CheckpointFolder, step: int) -> Resume:
    """Choose and verify the newest checkpoint of the run from before a step."""
    assert folder.group is not None
    full = folder.settings.verify_on_load == "full"
    resume = load.latest_verified(folder.root, full, folder.group, folder.log, step)
    if resume is None:
        raise RunFailed(f"{folder.root} has no checkpoint from before step {step} to go back to")
    return resume


def restore(folder: CheckpointFolder, resume: Resume, state: TrainingState) -> None:
    """Load the state, and log the starting point and differences from the saved run."""
    log = folder.log
    if resume.folder is None:
        if folder.settings.enable:
            start = f"starting from scratch: no checkpoint in {folder.root}"
            if resume.exclude:
                start += "; no effect: checkpoint.exclude_from_loading"
            log.info(start)
        return
    if resume.hf:
        resume.hf.fill(state.weights())
        dist.barrier(folder.group)
        folder.base = base.settle(folder, resume, state)
        log.info(f"loaded Hugging Face weights from {resume.folder}")
        return
    load.restore(resume, state, folder.group)
    folder.base = base.settle(folder, resume, state)
    without = ", ".join(resume.exclude)
    left_out = f" without {without} (checkpoint.exclude_from_loading)" if without else ""
    if not resume.continues:
        log.info(f"loaded weights from {resume.folder}{left_out}")
        if folder.base:
            log.info(
                f"each resume reads the base from {folder.base.folder}: keep it, or copy it first "
                "(titanlite checkpoint cp) where its run may delete it (checkpoint.keep_latest_k)"
            )
        return
    step = resume.position.step
    if resume.folder.parent == folder.root and folder.rank_info.rank == 0:
        folder.archive_steps_after(step)
    dist.barrier(folder.group)
    log.info(f"resumed step {step} from {resume.folder}{left_out}")
    for line in resume.changes(folder.job, _has_dropout(state)):
        log.info(line)


def _has_dropout(state: TrainingState) -> bool:
    """Return whether any stage of the model has dropout."""
    own = False
    for part in state.parts:
        own |= any(isinstance(each, nn.Dropout) and each.p > 0 for each in part.modules())
    return any(gather_objects(own, state.stages))
