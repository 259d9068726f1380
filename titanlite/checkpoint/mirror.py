"""checkpoint.mirror: a copy of a run's checkpoints on an object store.

After a commit each rank's thread uploads its share of the files, and rank 0 puts the manifest
last. Training never waits for it, and no fault of the store ends a run. Of the steps that were
saved while one was uploaded, only the newest follows.
"""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint import transfer
from titanlite.checkpoint.cleanup import delete
from titanlite.checkpoint.commit import (
    point_latest,
    run_on_all_ranks,
    run_on_rank_0,
    staging_folder,
)
from titanlite.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    File,
    committed,
    is_complete,
    read_manifest,
    step_folder,
    steps_to_delete,
)
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.root import checkpoint_root, store_of
from titanlite.checkpoint.status import MIRRORED
from titanlite.config.schema import JobConfig
from titanlite.errors import UserError
from titanlite.runtime import store
from titanlite.runtime.distributed import gather_objects, rank_in
from titanlite.runtime.page import phase

_LONGEST = timedelta(days=1)
"""Uploads have bounds of their own, by their size."""


class Mirror:
    """The mirror on this rank; all ranks call every method together, but for `set_aside`."""

    @classmethod
    def of(cls, config: JobConfig, log: logging.Logger) -> "Mirror | None":
        """Return the mirror of a run, if it has one."""
        settings = config.checkpoint
        return cls(config, log) if settings.enable and settings.mirror else None

    def __init__(self, config: JobConfig, log: logging.Logger) -> None:
        self._settings = config.checkpoint
        self._timeout = config.comm.checkpoint_timeout_seconds
        self._outer = Path(config.job.dump_folder)
        self._local = checkpoint_root(config)
        self._log = log
        self.root = store_of(config, self._settings.mirror)
        group = dist.new_group(backend="gloo", timeout=_LONGEST)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self._rank = rank_in(group)
        self._current = 0
        self._changing = threading.Lock()
        self._complete = set[int]()  # steps in the mirror
        self.newest = 0
        """The last step that was handed over."""
        self.step = 0
        """The last step that is in the mirror; on rank 0 another thread may take it back."""
        self._rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> int:
        """Steps that the mirror lacks."""
        return max(0, self.newest - self.step)

    # ---------------------------------------------------------------- from the mirror

    def newest_of_both(self, find: Callable[[], Resume | None]) -> Resume | None:
        """Return the newest whole checkpoint of the mirror and the folder, which `find` reads."""
        resume = None
        try:
            resume = find()
            first = resume.position.step + 1 if resume else 0
            if self.fetch(range(first, sys.maxsize)):
                resume = find()
        except UserError as error:
            if resume:
                self._log.warning(f"{error}; going on from the folder")
            elif not self.fetch(range(sys.maxsize)):  # the folder has nothing that is whole
                raise
            else:
                resume = find()
        if resume:
            self.submit(resume.position.step)  # a killed run may not have brought it there
        return resume

    def fetch_missing(self, step: int) -> None:
        """Copy a step that the folder lacks, if it is there."""
        if step not in gather_objects(committed(self._local), self.group)[0]:
            self.fetch(range(step, step + 1))
        self.submit(step)

    def fetch(self, wanted: range) -> bool:
        """Copy the newest whole step of these into the folder; return whether there is one.

        A damaged one is named, and the step before is taken."""
        what = f"checkpoint.mirror {self.root}"
        own = partial(self._whole_steps, wanted) if self._rank == 0 else list[int]
        steps = gather_objects(run_on_all_ranks(self.group, what, own), self.group)[0]
        for step in reversed(steps):
            if problems := self._download(step, what):
                self._log.warning(f"skipping checkpoint: {problems}")
                continue
            self._log.info(f"fetched step {step} from {self.root}")
            return True
        return False

    def _whole_steps(self, wanted: range) -> list[int]:
        """Return the steps that can be resumed."""
        return [
            step
            for step in transfer.steps(self.root)
            if step in wanted and is_complete(step_folder(self.root, step), resumable=True)
        ]

    def _download(self, step: int, what: str) -> str:
        """Copy a step into the folder; return its damage, in which case it is not there."""
        source, target = step_folder(self.root, step), step_folder(self._local, step)

        def copy() -> str:
            try:
                home = source / read_manifest(source, outline=True).attempt
                transfer.copy_files(home, staging, self._share(source).items())
            except (CorruptCheckpoint, FileNotFoundError) as error:
                return str(error)
            return ""

        def publish() -> None:
            store.write(staging / MANIFEST, transfer.flat_manifest(source))
            if store.exists(target):  # damaged
                delete(target)
            store.publish(staging, target)
            point_latest(self._local, step)
            self._note(step)
            transfer.fetch_metrics(self.root, self._outer)

        with staging_folder(target, self.group, what) as staging:
            found = gather_objects(run_on_all_ranks(self.group, what, copy), self.group)
            problems = "; ".join(filter(None, found))
            run_on_rank_0(
                self.group, what, (lambda: store.delete(staging)) if problems else publish
            )
        return problems

    def _share(self, folder: Path) -> Mapping[str, File]:
        """Return the files that this rank copies, about as many bytes as any."""
        files = read_manifest(folder, outline=True).files
        names = sorted(files, key=lambda name: files[name].size)
        return {name: files[name] for name in names[self._rank :: dist.get_world_size(self.group)]}

    # ---------------------------------------------------------------- to the mirror

    def submit(self, step: int) -> int:
        """Hand over a committed step; return how many steps the mirror lacked before."""
        behind = self.behind
        self.newest = step
        self._rounds.put(step)
        return behind

    def reads(self, step: int) -> bool:
        """Return whether the thread may be reading a step, which is not deleted then."""
        return self.behind > 0 and step in (self._current, self.newest)

    def _run(self) -> None:
        while self._rounds.get() is not None:
            began = time.monotonic()
            self._current = self.newest
            try:
                due = self._current if self._current != self.step else 0
                if step := gather_objects(due, self.group)[0]:
                    if self._mirror(step):
                        took = time.monotonic() - began
                        self._log.info(f"mirrored step {step} in {took:.2f} s")
                    if self._rank:
                        self.step = step
            except UserError as error:
                lag = f"the mirror is {self.behind} steps behind"
                self._log.warning(f"{error}; {lag}; training continues")
            except Exception as error:  # another rank has ended
                self._log.warning(f"checkpoint.mirror: {error}")
                return

    def _mirror(self, step: int) -> bool:
        """Copy a step, on all ranks together; return whether it was not there yet."""
        what = f"checkpoint.mirror {self.root}: step {step}"
        source, target = step_folder(self._local, step), step_folder(self.root, step)

        def begin() -> bool:
            if self._rank:
                return False
            if names := transfer.remove_leftovers(self.root):
                self._log.info(f"{self.root}: removed unfinished uploads: {', '.join(names)}")
            is_there = transfer.begin(source, target)
            if is_there:
                self._note(step)
            return is_there

        def end() -> None:
            # First: where a step is found, its metrics are.
            transfer.copy_records(self._outer, self.root)
            with self._changing:
                transfer.end(source, target)
                self._note(step)
            store.copy(self._local / transfer.LATEST, self.root / transfer.LATEST)
            keep = self._settings.mirror_keep_latest_k, self._settings.keep_every
            for old in steps_to_delete(self.root, *keep, self._complete):
                transfer.remove(step_folder(self.root, old))

        if any(gather_objects(run_on_all_ranks(self.group, what, begin), self.group)):
            return False
        copy = partial(transfer.copy_files, source, target)
        run_on_all_ranks(self.group, what, lambda: copy(self._share(source).items()))
        run_on_rank_0(self.group, what, end)
        return True

    def _note(self, step: int) -> None:
        """Write down, for the launcher too, which step the mirror has."""
        self.step = step
        with store.whole_file(self._local / MIRRORED) as file:
            file.write(f"{step}\n".encode())

    def set_aside(self, after: int) -> None:
        """On rank 0, hide later steps, damaged or from before a rewind; warn where it fails."""
        try:
            with self._changing:
                self.step = min(self.step, after)
                transfer.set_aside(self.root, after, self._log)
        except (UserError, OSError) as error:
            self._log.warning(f"checkpoint.mirror: later checkpoints are still there: {error}")

    @phase("save")
    def finish(self, seconds: float) -> None:
        """At the end of a run, wait at most so long until the mirror has all; a step that failed is
        tried again.
        """
        self.submit(self.newest)
        self._rounds.put(None)
        self._thread.join(max(0, min(seconds - 2, self._timeout)))
        if self._rank == 0 and not self.behind:
            with suppress(UserError, OSError):  # the checkpoint is there
                transfer.copy_records(self._outer, self.root)
