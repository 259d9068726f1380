"""Where a run starts: choose a checkpoint or Hugging Face weights, and restore the state from it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import load
from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.resume import Resume, saved_model
from titanlite.checkpoint.state import TrainingState
from titanlite.config.rules.weights import check_model
from titanlite.errors import RunFailed, UserError
from titanlite.observe.run_folder import restore_metrics
from titanlite.runtime.distributed import gather_objects


class Source:
    """What a run on this rank starts from; all ranks call every method together."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._job = folder.job
        self._log = folder.log
        self._full = folder.settings.verify_on_load == "full"

    def find(self) -> Resume:
        """Choose and verify what the run starts from."""
        exclude = self._folder.settings.exclude_from_loading
        resume = self._find_own() or self._find_initial() or Resume()
        if resume.manifest and resume.folder:
            saved = saved_model(resume.folder, self._job.spec)
            exclude = check_model(resume.folder, saved, self._job.spec, self._job.model, exclude)
        return replace(resume, exclude=exclude)

    def _find_own(self) -> Resume | None:
        """Choose a checkpoint of this run."""
        folder = self._folder
        if not folder.enabled:
            return None
        assert folder.group is not None
        step = folder.settings.load_step
        if step != -1:
            return load.at_step(folder.root, step, self._full, folder.group)
        return load.latest_verified(folder.root, self._full, folder.group, self._log)

    def _find_initial(self) -> Resume | None:
        """Open checkpoint.initial_load_path."""
        settings = self._folder.settings
        if not settings.initial_load_path:
            return None
        group = self._folder.group
        assert group is not None
        path = Path(settings.initial_load_path)
        if not settings.initial_load_in_hf:
            return load.at_path(path, self._full, group, settings.initial_load_model_only)
        spec = self._job.spec
        read = partial(HuggingFaceFolder, path, spec, self._job.model, settings.exclude_from_loading)
        hf = run_on_all_ranks(group, "checkpoint.initial_load_path", read, UserError)
        return Resume(path, hf=hf)

    def find_before(self, step: int) -> Resume:
        """Choose and verify the newest checkpoint of this run from before a step."""
        folder = self._folder
        assert folder.group is not None
        resume = load.latest_verified(folder.root, self._full, folder.group, self._log, step)
        if resume is None:
            raise RunFailed(f"{folder.root} has no checkpoint from before step {step} to go back to")
        return resume

    def restore(self, resume: Resume, state: TrainingState) -> None:
        """Load it, and log what the run starts from and what it does differently."""
        folder = self._folder
        if resume.folder is None:
            if folder.enabled:
                start = f"starting from scratch: no checkpoint in {folder.root}"
                if resume.exclude:
                    start += "; no effect: checkpoint.exclude_from_loading"
                self._log.info(start)
            return
        if resume.hf:
            resume.hf.fill(state.weights())
            dist.barrier(folder.group)
            self._log.info(f"loaded Hugging Face weights from {resume.folder}")
            return
        load.restore(resume, state, folder.group)
        if not resume.continues:
            self._log.info(f"loaded weights from {resume.folder}")
            return
        if resume.folder.parent == folder.root and folder.rank_info.rank == 0:
            folder.archive_steps_after(resume.position.step)
            if resume.metrics:
                notice = restore_metrics(self._job.config, resume.metrics)
                if notice:
                    self._log.info(notice)
        dist.barrier(folder.group)
        self._log.info(f"resumed step {resume.position.step} from {resume.folder}")
        for line in resume.changes(self._job, _has_dropout(state)):
            self._log.info(line)


def _has_dropout(state: TrainingState) -> bool:
    """Return whether any stage of the model has dropout."""
    own = False
    for part in state.parts:
        for module in part.modules():
            own |= isinstance(module, nn.Dropout) and module.p > 0
    if state.stages:
        return any(gather_objects(own, state.stages))
    return own
