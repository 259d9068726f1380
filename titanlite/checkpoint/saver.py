"""When a run saves, and how training continues meanwhile; commit.py does the writing.

A save copies this rank's part of the state; then training continues while a thread writes and
commits. One save is pending at a time. All ranks learn of a failure on any of them at the next
logged step.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titanlite.checkpoint import commit
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    STATE,
    Position,
    latest_complete,
    step_folder,
    steps_to_delete,
)
from titanlite.checkpoint.plan import Planner, nested
from titanlite.checkpoint.stager import Stager
from titanlite.checkpoint.state import TrainingState
from titanlite.config.toml import to_toml
from titanlite.errors import RunFailed, UserError
from titanlite.observe.run_folder import describe_environment
from titanlite.runtime.distributed import on_any_rank
from titanlite.runtime.page import OWN_PAGE, phase

FIRST_SECONDS = 60
"""With interval "auto": time until the first save, whose cost sets the interval, and the minimum of
that.
"""


class PendingSave(commit.Writer):
    """A save in progress, or one that has ended."""

    warning = ""

    def __init__(
        self, folder: CheckpointFolder, content: commit.Content, write: Callable[..., Any]
    ) -> None:
        super().__init__(folder.root, content, folder.group)
        self.step = content.step
        self.costs = {"blocked": 0.0, "staging": 0.0, "write": 0.0}
        """Seconds that training waited, and that the copy and the write took."""
        self.begun = time.monotonic()
        self.ended = Future[Any]()
        self._write = write

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Any:
        return self._write(self, partial(super().write_data, plan, planner))

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""
        error = self.ended.exception() if self.ended.done() else None
        return error and commit.cause(error)

    def is_alive(self) -> bool:
        return not self.ended.done()

    def join(self) -> None:
        wait([self.ended])


class Saver:
    """The saves of a run on this rank; all ranks call every method together."""

    def __init__(self, folder: CheckpointFolder, device: torch.device) -> None:
        self._folder = folder
        self._job = folder.job
        self._rank = folder.rank_info.rank
        self._log = folder.log
        self._device = device
        self._last_step = folder.job.config.training.steps
        self.settings = folder.job.config.checkpoint
        self.records: list[PendingSave] = []
        """Committed saves that are not yet logged; the trainer removes them."""
        self._pending: PendingSave | None = None
        self._stager: Stager | None = None
        self._planners: dict[bool, Planner] = {}
        self._last_save = time.monotonic()
        self._auto_seconds = math.inf
        if self.settings.interval == "auto":
            self._auto_seconds = FIRST_SECONDS
            self._log.info(
                f'checkpoint.interval "auto": the first save, after {FIRST_SECONDS} s, sets it'
            )

    def due(self, step: int, logged: bool) -> bool:
        """Return whether to save after this step.

        At logged steps the ranks agree on the clock, and on failed saves.
        """
        settings = self.settings
        if not settings.enable:
            return False
        by_time = logged and self._agree()
        is_first = settings.enable_first_step_checkpoint and step == 1
        by_step = settings.interval != "auto" and step % settings.interval == 0
        return by_time or is_first or by_step or step == self._last_step

    def _agree(self) -> bool:
        """Return whether a save is due by rank 0's clock.

        If the pending save has ended or failed on any rank, finish it on all ranks.
        """
        pending = self._pending
        seconds = min(self.settings.interval_minutes * 60 or math.inf, self._auto_seconds)
        failed, in_progress, due = on_any_rank(
            self._device,
            pending is not None and pending.error is not None,
            pending is not None and pending.is_alive(),
            self._rank == 0 and seconds <= time.monotonic() - self._last_save,
        )
        if failed or not in_progress:
            self.finish_save()
        return due

    def save(
        self,
        position: Position,
        state: TrainingState,
        stream: dict[str, Any] | None,
        guard: dict[str, Any],
    ) -> None:
        """Save the current state.

        Return when it is committed or, with async_mode, copied. With pinned memory, return at once:
        then `before_update` must be called before the state changes.
        """
        began = time.monotonic()
        self._last_save = began
        step = position.step
        if self._pending and self._pending.is_alive():
            before = self._pending.step
            self._log.info(f"save of step {step} is waiting for step {before} to finish writing")
        self.finish_save()
        base = self._folder.base
        weights_only = self.settings.last_save_model_only and step == self._last_step
        tensors = state.chosen(weights_only, base is None)
        numbers = {} if weights_only else state.numbers()
        document = {"position": asdict(position), "numbers": numbers, "guard": guard}
        payload = (str(self._job.layout.batch_coordinate(self._rank)), stream)
        make_documents = partial(self._documents, document)
        place = self._folder.confirm, self._folder.run_name, base
        content = commit.Content(step, payload, make_documents, weights_only, *place)
        pending = self._pending = PendingSave(self._folder, content, self._write)
        layout = self._job.layout
        replicas = layout.dp_replicate, layout.fsdp * layout.tp
        planner = self._planners.setdefault(weights_only, Planner(self._folder.group, replicas))
        asynchronous = self.settings.async_mode != "disabled"
        given: Any = nested(tensors), {"storage_writer": pending, "planner": planner}
        try:
            self._start(pending, state, *given)
        except BaseException as error:
            pending.ended.set_exception(error)
            if asynchronous:  # the copy failed; other ranks are not waiting for it
                raise
        pending.costs["blocked"] = time.monotonic() - began
        if not asynchronous:
            self.finish_save()

    def _start(
        self, pending: PendingSave, state: TrainingState, tensors: Any, given: dict[str, Any]
    ) -> None:
        """Start a save or, without async_mode, complete it."""
        if self.settings.async_mode == "disabled":
            commit.alone(dcp.save, tensors, **given)
            pending.ended.set_result(None)
            return
        stager = self._stager = self._stager or self._new_stager(state)
        pending.ended = commit.alone(dcp.async_save, tensors, async_stager=stager, **given)  # type: ignore[assignment]
        pending.costs["staging"] = stager.seconds

    def _new_stager(self, state: TrainingState) -> Stager:
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        # Only these may be changed by a forward pass.
        buffers = {f"model.{name}" for part in state.parts for name, _ in part.named_buffers()}
        gpu = self._device if pinned else None
        return Stager(gpu, buffers)

    def before_update(self) -> None:
        """Make the optimizer's step wait for a copy in progress."""
        if self._stager:
            self._stager.wait()

    def _documents(self, document: dict[str, Any], payloads: list[Any]) -> dict[str, bytes]:
        """Return the files next to the tensors."""
        streams = {coordinate: stream for coordinate, stream in payloads if stream is not None}
        seed = document["position"]["seed"]
        environment = describe_environment(self._job, seed, self._device.type)
        return {
            STATE: commit.to_json({**document, "streams": streams}),
            CONFIG: to_toml(self._job.given).encode(),
            ENVIRONMENT: commit.to_json(environment),
        }

    def _write(self, pending: PendingSave, commit_step: Callable[[], Any]) -> Any:
        """In the thread: commit, then delete old checkpoints."""
        group = self._folder.group
        staging = 0.0
        if self._stager:
            self._stager.synchronize()
            staging = self._stager.seconds
        done = commit_step()
        OWN_PAGE.saved = pending.step
        pending.costs["write"] = time.monotonic() - pending.begun - staging
        if self._rank == 0:
            try:
                self._folder.note(pending.step)
                root = self._folder.root
                keep = self.settings.keep_latest_k, self.settings.keep_every
                for old_step in steps_to_delete(root, *keep, self._folder.complete):
                    step_folder(root, old_step).withdraw(MANIFEST)
            except (OSError, UserError) as error:  # costs no checkpoint
                pending.warning = f"an old checkpoint could not be deleted: {error}"
        dist.barrier(group)  # waits for a slow deletion here instead of in the training's group
        return done

    @phase("save")
    def finish_save(self) -> None:
        """Wait for the pending save, if any.

        All ranks record its success, or all handle its failure.
        """
        pending = self._pending
        if pending is None:
            return
        pending.join()
        if any(on_any_rank(self._device, pending.error is not None)):
            self._handle_failure(pending)
        else:
            self._record_success(pending)

    def _handle_failure(self, pending: PendingSave) -> None:
        """Raise RunFailed, or warn if training continues."""
        self._pending = None
        newest = [latest_complete(self._folder.root) if self._rank == 0 else None]
        dist.broadcast_object_list(newest, src=0)
        remaining = f"the newest checkpoint is step-{newest[0]}"
        if newest[0] is None:
            remaining = "there is no older one"
        message = f"the save of step {pending.step} failed on another rank"
        if pending.error:
            message = commit.describe(pending.error)
        message += f"; {remaining}"
        if pending.step == self._last_step:  # no later save makes up for it
            raise RunFailed(message)
        if self.settings.on_failure == "stop":
            raise RunFailed(f'{message} (checkpoint.on_failure = "warn" would continue)')
        self._log.warning(f"{message}; training continues")
        self._folder.renew_group()
        self._planners = {}

    def _record_success(self, pending: PendingSave) -> None:
        self._pending = None
        self.records.append(pending)
        if pending.warning:
            self._log.warning(pending.warning)
        waited = pending.costs["blocked"]  # includes the thread's start
        took = max(waited, pending.costs["staging"] + pending.costs["write"])
        folder = step_folder(self._folder.root, pending.step)
        self._log.info(f"saved {folder} in {took:.2f} s; training waited {waited:.2f} s")
        if self.settings.interval == "auto" and self._rank == 0:
            self._set_interval(waited, took)

    def _set_interval(self, waited: float, took: float) -> None:
        """Set the seconds between saves by Young's formula: a failure loses half of them."""
        hours = self._job.config.fault.mtbf_hours
        seconds = max((2 * waited * hours * 3600) ** 0.5, 2 * took, FIRST_SECONDS)
        if 0.9 < seconds / self._auto_seconds < 1.1:
            return
        self._auto_seconds = seconds
        self._log.info(
            f"saving every {seconds / 60:.1f} minutes from now on, since a save costs "
            f"{waited:.2f} s, and a failure is expected every {hours:g} hours (fault.mtbf_hours)"
        )

    def wait_ignoring_errors(self) -> None:
        """Wait for the pending save after an error that ends the run and is reported instead."""
        if self._pending:
            self._pending.join()
            if self._pending.error is None:
                self._record_success(self._pending)
