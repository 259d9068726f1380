"""When a run saves and what, and where it begins; commit.py knows how, load.py checks and reads.

A save copies this rank's part of the state, then training goes on while a thread writes and commits. One save is
in flight; the next waits for it and says so. All collectives of saving are on a gloo group of their own with
comm.checkpoint_timeout_seconds, so that slow storage never meets the training's timeout. What goes wrong on any
rank is known to all at the next logged step.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import commit, load
from titanlite.checkpoint.hf.export import HuggingFaceFolder, export_live
from titanlite.checkpoint.hf.names import Translation
from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    SEEN_BY_ALL,
    STATE,
    committed,
    export_folder,
    latest_complete,
    step_folder,
)
from titanlite.checkpoint.retention import steps_to_delete
from titanlite.checkpoint.state import Position, TrainingState
from titanlite.config.job import Job
from titanlite.config.toml import to_toml
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import RunFailed, UserError
from titanlite.observe.run_folder import describe_environment, new_archive_folder
from titanlite.runtime.cluster import RankInfo


@dataclass(frozen=True)
class SaveRecord:
    """What a save cost, in seconds."""

    step: int
    costs: dict[str, float]


class PendingSave:
    """A save on its way to the disk."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.staging = self.writing = self.blocked = 0.0
        self.error: BaseException | None = None
        self.warning = ""
        self.thread: threading.Thread | None = None

    @property
    def flying(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        if self.thread:
            self.thread.join()


class Checkpoints:
    """The checkpoints of a run on this rank; every method is called by all ranks together."""

    def __init__(self, job: Job, place: RankInfo, device: torch.device, log: logging.Logger) -> None:
        self._job, self._place, self._device, self._log = job, place, device, log
        self.settings = job.config.checkpoint
        self.enabled = self.settings.enable
        self.root = Path(job.config.job.dump_folder) / self.settings.folder
        self.records: list[SaveRecord] = []
        """Of saves that ended; whoever logs them takes them out."""
        self.group: dist.ProcessGroup | None = None
        self._flight: PendingSave | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._last = time.monotonic()
        if self.enabled or self.settings.initial_load_path:
            self.group = self._new_group()
        if self.enabled:
            self._open_folder()

    def _new_group(self) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self._job.config.comm.checkpoint_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _open_folder(self) -> None:
        """Make the folder, refuse one that not all ranks share, and clear what a killed run left."""
        token = [f"{SEEN_BY_ALL}{uuid.uuid4().hex}"]
        dist.broadcast_object_list(token, src=0, group=self.group)
        path, rank_0 = self.root / token[0], self._place.rank == 0
        if rank_0:
            self.root.mkdir(parents=True, exist_ok=True)
            path.touch()
        dist.barrier(self.group)
        deadline = time.monotonic() + 5  # a network folder may take a while to show it
        while not (seen := path.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        everyone: list[Any] = [None] * self._place.world
        mine = self._place.host, seen and os.access(self.root, os.W_OK)
        dist.all_gather_object(everyone, mine, group=self.group)
        if rank_0:
            path.unlink()
        if blind := [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(everyone) if not sees]:
            others = " and others" if len(blind) > 4 else ""
            raise UserError(
                f"checkpoint.folder: {self.root} as rank 0 on {everyone[0][0]} sees it can't be written to by "
                f"{', '.join(blind[:4])}{others}: a checkpoint is one folder that all ranks share, so "
                "job.dump_folder must lie on storage that all nodes see"
            )
        if rank_0:
            if cleared := commit.clear_leftovers(self.root):
                self._log.info(f"removed what a stopped save left: {', '.join(cleared)}")
            if (newest := latest_complete(self.root)) is not None:
                commit.point_latest(self.root, newest)
        dist.barrier(self.group)

    # ---------------------------------------------------------------- loading

    def find(self) -> load.Source | HuggingFaceFolder | None:
        """What the run begins from, verified; None for a fresh start."""
        settings = self.settings
        if self.group is None:
            return None
        full = settings.verify_on_load == "full"
        if self.enabled and settings.load_step != -1:
            return load.at_step(self.root, settings.load_step, full, self.group)
        if self.enabled and (newest := load.latest_verified(self.root, full, self.group, self._log)):
            return newest
        if (path := settings.initial_load_path) and settings.initial_load_in_hf:
            job, exclude = self._job, settings.exclude_from_loading
            return commit.run_on_all_ranks(
                self.group,
                "checkpoint.initial_load_path",
                lambda: HuggingFaceFolder(Path(path), job.spec, job.model, exclude),
            )
        if path:
            return load.at_path(Path(path), full, self.group, settings.initial_load_model_only)
        return None

    def restore(self, source: load.Source | HuggingFaceFolder | None, state: TrainingState) -> None:
        """Load it, and say what the run begins from."""
        if source is None:
            if self.enabled:
                self._log.info(f"fresh: no checkpoint in {self.root}")
            return
        assert self.group is not None
        if isinstance(source, HuggingFaceFolder):
            source.fill(state.weights())
            dist.barrier(self.group)
            self._log.info(f"loaded Hugging Face weights from {source.folder}")
            return
        load.restore(source, state, self.settings.exclude_from_loading, self.group)
        if not source.resume:
            self._log.info(f"loaded weights from {source.folder}")
            return
        if source.folder.parent == self.root and self._place.rank == 0:
            self._move_newer_aside(source.position.step)
        dist.barrier(self.group)
        self._log.info(f"resumed step {source.position.step} from {source.folder}")

    def _move_newer_aside(self, step: int) -> None:
        """Later checkpoints, damaged or of another course, would be in the way of this run's own."""
        newer = [later for later in committed(self.root) if later > step]
        if not newer:
            return
        aside = new_archive_folder(Path(self._job.config.job.dump_folder)) / self.settings.folder
        aside.mkdir(parents=True)
        for later in newer:
            step_folder(self.root, later).rename(step_folder(aside, later))
        commit.point_latest(self.root, step)
        self._log.info(f"later checkpoints ({', '.join(map(str, newer))}) are now in {aside}")

    # ---------------------------------------------------------------- saving

    def due(self, step: int, logged: bool) -> bool:
        """Whether to save after this step. At logged steps the ranks agree on the clock, and on saves that failed."""
        if not self.enabled:
            return False
        settings, last = self.settings, self._job.config.training.steps
        by_time = self._agree() if logged else False
        first = settings.enable_first_step_checkpoint and step == 1
        return by_time or first or step % settings.interval == 0 or step == last

    def _agree(self) -> bool:
        """Whether rank 0's clock asks for a save; a flight that failed anywhere ends here everywhere."""
        flight, minutes = self._flight, self.settings.interval_minutes
        failed = flight is not None and flight.error is not None
        late = self._place.rank == 0 and 0 < minutes * 60 <= time.monotonic() - self._last
        flying = flight is not None and flight.flying
        flags = torch.tensor([failed, flying, late], dtype=torch.int64, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        anywhere_failed, anywhere_flying, asked = flags.tolist()
        if anywhere_failed or not anywhere_flying:
            self._land()
        return bool(asked)

    def save(self, position: Position, state: TrainingState, stream: dict[str, Any] | None) -> None:
        """Save the state as it is now. Returns when it is copied, or without async_mode when it is committed."""
        began = time.monotonic()
        if self._flight and self._flight.flying:
            self._log.info(f"step {position.step} waits to be saved: step {self._flight.step} is still being written")
        self._land()
        flight, self._last = PendingSave(position.step), began
        only = self.settings.last_save_model_only and position.step == self._job.config.training.steps
        live = state.weights() if only else state.tensors()
        text = {"position": asdict(position), "numbers": {} if only else state.numbers()}
        held = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in live.items()}
        asynchronous = self.settings.async_mode != "disabled"
        if asynchronous:
            copying = time.monotonic()
            held = self._copy(held)
            flight.staging = time.monotonic() - copying
        self._flight = flight
        flight.thread = threading.Thread(
            target=self._write, args=(flight, live, held, text, stream, only), name="checkpoint", daemon=True
        )
        flight.thread.start()
        if not asynchronous:
            flight.wait()
        flight.blocked = time.monotonic() - began
        if not asynchronous:
            self._land()

    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in host memory, in buffers that are kept for the next save."""
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        if pinned and self._device.type != "cuda":
            raise UserError('checkpoint.async_mode = "async_with_pinned_mem" is for copies from a GPU; use "async"')
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=pinned)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in tensors}

    def _write(
        self,
        flight: PendingSave,
        live: dict[str, torch.Tensor],
        held: dict[str, torch.Tensor],
        text: dict[str, Any],
        stream: dict[str, Any] | None,
        weights_only: bool,
    ) -> None:
        """The thread's work: commit, then let go what need not be kept."""
        began = time.monotonic()
        assert self.group is not None
        mine = str(self._job.layout.batch_coordinate(self._place.rank)), stream

        def documents(everyone: list[Any]) -> dict[str, bytes]:
            streams = {coordinate: theirs for coordinate, theirs in everyone if theirs is not None}
            seed, device = text["position"]["seed"], self._device.type
            return {
                STATE: commit.to_json({**text, "streams": streams}),
                CONFIG: to_toml(self._job.given).encode(),
                ENVIRONMENT: commit.to_json(describe_environment(self._job, seed, device)),
            }

        try:
            commit.commit(self.root, flight.step, live, held, mine, documents, weights_only, self.group)
            flight.writing = time.monotonic() - began
            if self._place.rank == 0:
                flight.warning = self._let_go()
            dist.barrier(self.group)  # or ranks would wait for a slow deletion in the training's group
        except BaseException as error:
            flight.error = error

    def _let_go(self) -> str:
        """Delete what need not be kept; what went wrong with that costs no checkpoint."""
        try:
            for step in steps_to_delete(self.root, self.settings.keep_latest_k, self.settings.keep_every):
                commit.delete(self.root, step)
        except OSError as error:
            return f"an old checkpoint could not be deleted: {error}"
        return ""

    def _land(self) -> None:
        """Wait for the save in flight, if any, and judge it together."""
        flight = self._flight
        if flight is None:
            return
        flight.wait()
        gc.collect(0)  # what torch's writer leaves in cycles would stay for training.gc_freq steps
        failed = torch.tensor(int(flight.error is not None), dtype=torch.int64, device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed.item():
            self._note(flight)
            return
        self._flight = None
        newest = [latest_complete(self.root) if self._place.rank == 0 else None]
        dist.broadcast_object_list(newest, src=0)
        stands = "there is no older one" if newest[0] is None else f"the newest checkpoint is step-{newest[0]}"
        cause = flight.error or f"the save of step {flight.step} failed on another rank"
        words = str(cause) if isinstance(cause, UserError | str) else f"{type(cause).__name__}: {cause}"
        if self.settings.on_failure == "stop":
            raise RunFailed(f'{words}; {stands} (checkpoint.on_failure = "warn" would go on)')
        self._log.warning(f"{words}; {stands}; training goes on")
        assert self.group is not None
        dist.destroy_process_group(self.group)  # who knows what a rank left in it
        self.group = self._new_group()

    def _note(self, flight: PendingSave) -> None:
        """A save that was committed."""
        self._flight = None
        costs = {"blocked": flight.blocked, "staging": flight.staging, "write": flight.writing}
        self.records.append(SaveRecord(flight.step, costs))
        if flight.warning:
            self._log.warning(flight.warning)
        self._log.info(
            f"saved {step_folder(self.root, flight.step)} in {flight.writing:.2f} s; training waited "
            f"{flight.blocked:.3f} s"
        )

    def finish(self) -> None:
        """Wait for the save in flight: a run that reached its target has its last checkpoint."""
        self._land()

    def export(self, step: int, state: TrainingState, tokenizer: Tokenizer | None) -> None:
        """Write the weights as they are in Hugging Face's format, beside the checkpoints."""
        target, group = export_folder(self.root, step), self.group
        assert group is not None
        dtype = getattr(torch, self.settings.export_dtype)
        translation = Translation(self._job.spec, self._job.model)
        export_live(target, translation, state.weights(), dtype, tokenizer, group)
        self._log.info(f"exported step {step} for Hugging Face: {target}")

    def wait_ignoring_errors(self) -> None:
        """Wait for the save in flight where an error ends the run, which is then told instead of the save's."""
        if self._flight:
            self._flight.wait()
            if self._flight.error is None:
                self._note(self._flight)
