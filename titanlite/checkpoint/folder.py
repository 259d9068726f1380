"""The folder of a run's checkpoints: its checks, and the group of ranks that works on it.

The group is a separate gloo group with comm.checkpoint_timeout_seconds, so that slow storage never
exceeds the training's timeout.
"""

import logging

import torch.distributed as dist

from titanlite.checkpoint import commit, status, transfer
from titanlite.checkpoint.manifest import Base, committed, point_latest, step_folder
from titanlite.checkpoint.owner import Owner
from titanlite.checkpoint.root import checkpoint_root
from titanlite.checkpoint.shared import clear_leftovers, require_shared
from titanlite.checkpoint.state import TrainingState
from titanlite.config.job import Job
from titanlite.errors import UserError, format_bytes
from titanlite.observe.run_folder import new_archive_folder
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import collective_timeout, gather_objects
from titanlite.runtime.store import LocalPath, rename

REWIND = "rewind"
"""File with the step that a run goes back to, while it moves the later ones away."""


class CheckpointFolder:
    """The folder on this rank; all ranks call every method together."""

    def __init__(self, job: Job, rank_info: RankInfo, log: logging.Logger) -> None:
        self.job = job
        self.rank_info = rank_info
        self.log = log
        self.settings = job.config.checkpoint
        self.root = checkpoint_root(job.config)
        self._outer = LocalPath(job.config.job.dump_folder)
        self.group: dist.ProcessGroup | None = None
        if self.settings.enable or self.settings.initial_load_path:
            self.renew_group()
        self.base: Base | None = None
        """The weights that saves leave out; known once the start is loaded."""
        self.complete = set[int]()
        """Steps that were found complete, and are not checked again."""
        self._has_locks = False
        self.owner: Owner | None = None
        """Set on rank 0 of a run that saves to a bucket."""
        if self.settings.enable:
            if self.root.renames:
                self._has_locks = require_shared(self.root.local(), rank_info, self.group)
            else:
                commit.run_on_all_ranks(
                    self.group, "checkpoint.folder", self._use_bucket, UserError
                )
            commit.run_on_all_ranks(self.group, "checkpoint.folder", self._tidy, UserError)

    def _use_bucket(self) -> None:
        """Make sure that this node can reach the bucket."""
        self.root.is_dir()
        if self.rank_info.rank == 0:
            self.owner = Owner(self.root, self.rank_info.host)
            transfer.fetch_metrics(self.root, self._outer)

    @property
    def run_name(self) -> str:
        """The name of this run in manifests; empty outside of a bucket."""
        return self.owner.name if self.owner else ""

    def confirm(self) -> None:
        """Raise if another run has started to save here."""
        if self.owner:
            self.owner.require_alone()

    def note(self, step: int) -> None:
        """On rank 0, record what the bucket has."""
        if self.owner:
            self.owner.known.add(step)
            status.record(self.job.config, self.root, step)

    def renew_group(self) -> None:
        """Create the group, or a new one: after a failed save, the old one may have unmatched
        collectives.
        """
        if self.group:
            dist.destroy_process_group(self.group)
        timeout = collective_timeout(self.job.config.comm.checkpoint_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    def _tidy(self) -> None:
        """On rank 0, delete what a killed run left behind, and finish its rewind."""
        # Without locks, leftovers may belong to a run in progress.
        cleared = list[str]()
        if self.owner:
            cleared = self.owner.remove_leftovers()
        elif self._has_locks:
            cleared = clear_leftovers(self.root.local())
        if cleared:
            self.log.info(f"deleted what an interrupted save left: {', '.join(cleared)}")
        if self.rank_info.rank == 0 and (self.root / REWIND).exists():
            self.archive_steps_after(int((self.root / REWIND).read_bytes()))

    def archive_steps_after(self, step: int) -> None:
        """On rank 0, make `latest` name this step, and move later checkpoints, which are damaged or
        from before a rewind, out of the folder.
        """
        point_latest(self.root, step)  # a killed run may not have updated it
        if self.owner:
            later_steps = sorted(later for later in self.owner.known if later > step)
        else:
            later_steps = [later for later in committed(self.root) if later > step]
        if not later_steps:
            return
        (self.root / REWIND).put(f"{step}\n".encode())
        if self.owner:
            self.owner.set_aside(later_steps)
            steps = ", ".join(map(str, later_steps))
            self.log.info(f"{self.root}: later checkpoints ({steps}) are now set aside")
            status.note(self.job.config, step)
        else:
            self._archive(later_steps)
        (self.root / REWIND).remove()
        self.complete -= {*later_steps}

    def _archive(self, later_steps: list[int]) -> None:
        root = self.root.local()
        outer = self._outer
        if outer.stat().st_dev != root.stat().st_dev:  # a rename cannot leave its file system
            outer = root
        archive = LocalPath(new_archive_folder(outer), self.settings.folder)
        archive.make()
        for later in later_steps:
            rename(step_folder(root, later).local(), step_folder(archive, later).local())
        steps = ", ".join(map(str, later_steps))
        self.log.info(f"later checkpoints ({steps}) are now in {archive}")

    def check_space(self, state: TrainingState) -> None:
        """Warn if the disk has no room for the checkpoints that are kept and one being written."""
        if not self.settings.enable:
            return
        tensors = state.chosen(False, self.base is None).values()
        size = sum(each.numel() * each.element_size() for each in tensors)
        size = sum(gather_objects(size, state.stages))
        if self.rank_info.rank > 0:
            return
        free = self.root.free_bytes()
        kept = self.settings.keep_latest_k
        if free < size * max(1, kept + 1 - len(committed(self.root))):
            self.log.warning(
                f"{self.root} has {format_bytes(free)} free, room for {free // size} more "
                f"checkpoints of {format_bytes(size)}; checkpoint.keep_latest_k = {kept} keeps "
                f"{kept or 'all'}, and one more while it saves"
            )
