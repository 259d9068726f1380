"""When a run saves and what, and where it starts; commit.py writes, load.py checks and reads.

A save copies this rank's part of the state; then training continues while a thread writes and commits. One save is
pending at a time, in a gloo group of its own with comm.checkpoint_timeout_seconds: slow storage never runs into the
training's timeout. A failure on any rank is known to all at the next logged step.
"""

import gc
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import commit, load
from titanlite.checkpoint.hf.export import export_live
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.hf.names import Translation
from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    STATE,
    Position,
    committed,
    export_folder,
    latest_complete,
    step_folder,
    steps_to_delete,
)
from titanlite.checkpoint.resume import Resume, checkpoint_root, saved_model
from titanlite.checkpoint.state import Tensors, TrainingState
from titanlite.config.job import Job
from titanlite.config.rules.weights import check_model
from titanlite.config.toml import to_toml
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import RunFailed, UserError, format_bytes
from titanlite.observe.run_folder import (
    begin_of_metrics,
    describe_environment,
    new_archive_folder,
    restore_metrics,
)
from titanlite.parallel.dtensor import local_part
from titanlite.runtime import lock, store
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import collective_timeout, gather_objects
from titanlite.runtime.page import OWN_PAGE, phase


class PendingSave(threading.Thread):
    """The thread of a save, which runs `write(this thread, *args)`; `error` is what ended it."""

    error: BaseException | None = None
    warning = ""

    def __init__(self, step: int, write: Callable[..., None], *args: Any) -> None:
        super().__init__(name="checkpoint", daemon=True, target=write, args=(self, *args))
        self.step = step
        self.costs = {"blocked": 0.0, "staging": 0.0, "write": 0.0}
        """Seconds that training waited, that the copy took, and that the write took."""

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self.error = error


class Checkpoints:
    """The checkpoints of a run on this rank; all ranks call every method together."""

    def __init__(self, job: Job, rank_info: RankInfo, device: torch.device, log: logging.Logger) -> None:
        self._job, self._rank_info, self._device, self._log = job, rank_info, device, log
        self.settings = job.config.checkpoint
        self.enabled = self.settings.enable
        self.root = checkpoint_root(job.config)
        self.records: list[PendingSave] = []
        """Saves that were committed and not yet logged; the trainer takes them out."""
        self.group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None
        self._host_memory: Tensors = {}
        self._copied: Any = None  # with page-locked memory, the event of the end of the last copy
        self._last_save = time.monotonic()
        if self.enabled or self.settings.initial_load_path:
            self.group = self._new_group()
        if self.enabled:
            self._open_folder()

    def _new_group(self) -> dist.ProcessGroup:
        timeout = collective_timeout(self._job.config.comm.checkpoint_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _open_folder(self) -> None:
        """Make the folder, refuse one that the ranks do not share, and clear what a killed run left."""
        on_rank_0 = self._rank_info.rank == 0
        probe = self.root / gather_objects(f"{commit.SEEN_BY_ALL}{uuid.uuid4().hex}", self.group)[0]
        if on_rank_0:
            store.make_folder(self.root)
            store.write(probe, b"")
        dist.barrier(self.group)
        deadline = time.monotonic() + 5  # a network folder may show a new file late on another node
        while not (visible := store.exists(probe)) and time.monotonic() < deadline:
            time.sleep(0.1)
        usable = visible and store.is_writable(self.root)
        ranks = gather_objects((self._rank_info.host, usable), self.group)
        has_locks = on_rank_0 and lock.works_on(probe)
        if on_rank_0:
            store.delete(probe)
        if unusable := [f"rank {rank} on {host}" for rank, (host, usable) in enumerate(ranks) if not usable]:
            more = " and others" if len(unusable) > 4 else ""
            raise UserError(
                f"checkpoint.folder {self.root} (on rank 0's host {ranks[0][0]}) is not writable from "
                f"{', '.join(unusable[:4])}{more}: all ranks write into one folder, so job.dump_folder must be on "
                "shared storage"
            )
        if on_rank_0:
            if has_locks and (cleared := commit.clear_leftovers(self.root)):  # else of a run in progress, perhaps
                self._log.info(f"deleted what an interrupted save left: {', '.join(cleared)}")
            if (newest := latest_complete(self.root)) is not None:
                commit.point_latest(self.root, newest)
        dist.barrier(self.group)

    # ---------------------------------------------------------------- loading

    def find(self) -> Resume:
        """Choose and verify what the run starts from."""
        settings, job, group = self.settings, self._job, self.group
        if group is None:
            return Resume()
        full, exclude = settings.verify_on_load == "full", settings.exclude_from_loading
        resume, path = None, Path(settings.initial_load_path)
        if self.enabled and settings.load_step != -1:
            resume = load.at_step(self.root, settings.load_step, full, group)
        elif self.enabled:
            resume = load.latest_verified(self.root, full, group, self._log)
        if resume is None and settings.initial_load_in_hf:
            read = partial(HuggingFaceFolder, path, job.spec, job.model, exclude)
            hf = commit.run_on_all_ranks(group, "checkpoint.initial_load_path", read, UserError)
            resume = Resume(path, hf=hf)
        elif resume is None and settings.initial_load_path:
            resume = load.at_path(path, full, group, settings.initial_load_model_only)
        if resume and resume.manifest and resume.folder:
            exclude = check_model(resume.folder, saved_model(resume.folder, job.spec), job.spec, job.model, exclude)
        return replace(resume or Resume(), exclude=exclude)

    def find_before(self, step: int) -> Resume:
        """Choose and verify the newest checkpoint of this run from before a step."""
        self.finish_save()
        assert self.group is not None
        resume = load.latest_verified(self.root, self.settings.verify_on_load == "full", self.group, self._log, step)
        if resume is None:
            raise RunFailed(f"{self.root} has no checkpoint from before step {step} to go back to")
        return resume

    def restore(self, resume: Resume, state: TrainingState) -> None:
        """Load it, and log what the run starts from and what it does differently."""
        if resume.folder is None:
            if self.enabled:
                no_effect = "; no effect: checkpoint.exclude_from_loading" * bool(resume.exclude)
                self._log.info(f"starting from scratch: no checkpoint in {self.root}{no_effect}")
            return
        if resume.hf:
            resume.hf.fill(state.weights())
            dist.barrier(self.group)
            self._log.info(f"loaded Hugging Face weights from {resume.folder}")
            return
        load.restore(resume, state, self.group)
        if not resume.continues:
            self._log.info(f"loaded weights from {resume.folder}")
            return
        if resume.folder.parent == self.root and self._rank_info.rank == 0:
            self._archive_later_steps(resume.position.step)
            if resume.metrics and (notice := restore_metrics(self._job.config, resume.metrics)):
                self._log.info(notice)
        dist.barrier(self.group)
        self._log.info(f"resumed step {resume.position.step} from {resume.folder}")
        modules = (module for part in state.parts for module in part.modules())
        has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)
        if state.stages:
            has_dropout = any(gather_objects(has_dropout, state.stages))
        for line in resume.changes(self._job, has_dropout):
            self._log.info(line)

    def _archive_later_steps(self, step: int) -> None:
        """Move later checkpoints, damaged or from before a rewind, out of this run's folder."""
        later_steps = [later for later in committed(self.root) if later > step]
        if not later_steps:
            return
        dump_folder = Path(self._job.config.job.dump_folder)
        apart = not store.same_file_system(dump_folder, self.root)  # a rename cannot leave it
        archive = new_archive_folder(self.root if apart else dump_folder) / self.settings.folder
        store.make_folder(archive)
        for later in later_steps:
            store.rename(step_folder(self.root, later), step_folder(archive, later))
        commit.point_latest(self.root, step)
        self._log.info(f"later checkpoints ({', '.join(map(str, later_steps))}) are now in {archive}")

    def check_space(self, state: TrainingState) -> None:
        """Warn if the disk has no room for the checkpoints that are kept and one that is being written."""
        if not self.enabled:
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
        if state.stages:
            size = sum(gather_objects(size, state.stages))
        if self._rank_info.rank > 0:
            return
        free, kept = store.free_bytes(self.root), self.settings.keep_latest_k
        if free < size * max(1, kept + 1 - len(committed(self.root))):
            room = f"room for {free // size} more checkpoints of {format_bytes(size)}"
            wanted = f"checkpoint.keep_latest_k = {kept} keeps {kept or 'all'}, and one more while it saves"
            self._log.warning(f"{self.root} has {format_bytes(free)} free, {room}; {wanted}")

    # ---------------------------------------------------------------- saving

    def due(self, step: int, logged: bool) -> bool:
        """Whether to save after this step. At logged steps the ranks agree on the clock, and on failed saves."""
        if not self.enabled:
            return False
        settings, last_step = self.settings, self._job.config.training.steps
        by_time = logged and self._agree()
        first = settings.enable_first_step_checkpoint and step == 1
        return by_time or first or step % settings.interval == 0 or step == last_step

    def _agree(self) -> bool:
        """Return whether rank 0's clock asks for a save; settle on all ranks a save that ended or failed on any."""
        pending, seconds = self._pending, self.settings.interval_minutes * 60
        flags = [
            pending is not None and pending.error is not None,
            pending is not None and pending.is_alive(),
            self._rank_info.rank == 0 and 0 < seconds <= time.monotonic() - self._last_save,
        ]
        anywhere = torch.tensor(flags, dtype=torch.int64, device=self._device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        failed, in_progress, due = anywhere.tolist()
        if failed or not in_progress:
            self.finish_save()
        return bool(due)

    def save(
        self, position: Position, state: TrainingState, stream: dict[str, Any] | None, guard: dict[str, Any]
    ) -> None:
        """Save the state as it is now. Return when it is committed, with async_mode when it is copied, or with pinned
        memory at once: call `before_update` before the state changes."""
        self._last_save = began = time.monotonic()
        if self._pending and self._pending.is_alive():
            self._log.info(f"save of step {position.step} is waiting for step {self._pending.step} to finish writing")
        self.finish_save()
        weights_only = self.settings.last_save_model_only and position.step == self._job.config.training.steps
        tensors = state.weights() if weights_only else state.tensors()
        numbers = {} if weights_only else state.numbers()
        document = {"position": asdict(position), "numbers": numbers, "guard": guard}
        if self._rank_info.rank == 0:
            document["metrics"] = begin_of_metrics(Path(self._job.config.job.dump_folder), -1)
        host_copies = {name: local_part(tensor) for name, tensor in tensors.items()}
        asynchronous, copying = self.settings.async_mode != "disabled", time.monotonic()
        if asynchronous:
            buffers = {f"model.{name}" for part in state.parts for name, _ in part.named_buffers()}
            host_copies = self._copy(host_copies, buffers)
        pending = PendingSave(position.step, self._write, tensors, host_copies, document, stream, weights_only)
        self._pending = pending
        pending.costs["staging"] = (time.monotonic() - copying) * asynchronous
        pending.start()
        pending.join(timeout=0 if asynchronous else None)
        pending.costs["blocked"] = time.monotonic() - began
        if not asynchronous:
            self.finish_save()

    def _copy(self, tensors: Tensors, buffers: set[str]) -> Tensors:
        """Return copies in host memory that the next save uses again; page-locked ones are made beside training."""
        pinned, later = self.settings.async_mode == "async_with_pinned_mem", []
        for name, tensor in tensors.items():
            copy = self._host_memory.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                self._host_memory[name] = copy
            if pinned and name not in buffers:  # which alone a forward pass may change
                later.append((copy, tensor.detach()))
            else:
                copy.copy_(tensor.detach(), non_blocking=pinned)
        if pinned:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for copy, tensor in later:
                    copy.copy_(tensor, non_blocking=True)
            self._copied = stream.record_event()
        return {name: self._host_memory[name] for name in tensors}

    def before_update(self) -> None:
        """Let the optimizer's step, which changes what is saved, wait for a copy beside it."""
        if self._copied:
            self._copied.wait()

    def _write(
        self, pending: PendingSave, tensors: Tensors, copies: Tensors, document: Any, stream: Any, weights_only: bool
    ) -> None:
        """In the thread: commit, then delete old checkpoints; a failure to delete costs no checkpoint."""
        rank_payload = str(self._job.layout.batch_coordinate(self._rank_info.rank)), stream

        def make_documents(payloads: list[Any]) -> dict[str, bytes]:
            streams = {coordinate: position for coordinate, position in payloads if position is not None}
            environment = describe_environment(self._job, document["position"]["seed"], self._device.type)
            return {
                STATE: commit.to_json({**document, "streams": streams}),
                CONFIG: to_toml(self._job.given).encode(),
                ENVIRONMENT: commit.to_json(environment),
            }

        began, step, group = time.monotonic(), pending.step, self.group
        if self._copied:
            with torch.cuda.device(self._device):  # or this thread would open a context on the first GPU
                self._copied.synchronize()
        lookup = copies.__getitem__
        commit.commit(self.root, step, tensors, lookup, rank_payload, make_documents, weights_only, group)
        OWN_PAGE.saved = step
        pending.costs["write"] = time.monotonic() - began
        if self._rank_info.rank == 0:
            try:
                for old_step in steps_to_delete(self.root, self.settings.keep_latest_k, self.settings.keep_every):
                    commit.delete(step_folder(self.root, old_step))
            except OSError as error:
                pending.warning = f"an old checkpoint could not be deleted: {error}"
        dist.barrier(group)  # or ranks would wait for a slow deletion in the training's group

    @phase("save")
    def finish_save(self) -> None:
        """Wait for the pending save, if any; all ranks record its success, or all handle its failure."""
        pending = self._pending
        if pending is None:
            return
        pending.join()
        gc.collect(0)  # cycles that torch's writer leaves would stay for training.gc_freq steps
        failed = torch.tensor(int(pending.error is not None), dtype=torch.int64, device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed.item():
            self._record_success(pending)
            return
        self._pending = None
        newest = [latest_complete(self.root) if self._rank_info.rank == 0 else None]
        dist.broadcast_object_list(newest, src=0)
        remaining = "there is no older one" if newest[0] is None else f"the newest checkpoint is step-{newest[0]}"
        cause = pending.error or f"the save of step {pending.step} failed on another rank"
        message = str(cause) if isinstance(cause, UserError | str) else f"{type(cause).__name__}: {cause}"
        if pending.step == self._job.config.training.steps:  # no other save makes up for it
            raise RunFailed(f"{message}; {remaining}")
        if self.settings.on_failure == "stop":
            raise RunFailed(f'{message}; {remaining} (checkpoint.on_failure = "warn" would continue)')
        self._log.warning(f"{message}; {remaining}; training continues")
        assert self.group is not None
        dist.destroy_process_group(self.group)  # the failed group may hold unmatched collectives
        self.group = self._new_group()

    def _record_success(self, pending: PendingSave) -> None:
        self._pending = None
        self.records.append(pending)
        if pending.warning:
            self._log.warning(pending.warning)
        waited = pending.costs["blocked"]
        took = max(waited, pending.costs["staging"] + pending.costs["write"])  # the thread's start is waited for too
        self._log.info(
            f"saved {step_folder(self.root, pending.step)} in {took:.2f} s; training waited {waited:.2f} s"
        )

    def wait_ignoring_errors(self) -> None:
        """Wait for the pending save when an error ends the run, which is then reported instead of the save's."""
        if self._pending:
            self._pending.join()
            if self._pending.error is None:
                self._record_success(self._pending)

    @phase("save")
    def export(self, step: int, state: TrainingState, tokenizer: Tokenizer | None) -> None:
        """Write the weights as they are now in Hugging Face's format, beside the checkpoints."""
        target, group = export_folder(self.root, step), self.group
        assert group is not None
        translation, dtype = Translation(self._job.spec, self._job.model), getattr(torch, self.settings.export_dtype)
        translation.refuse([*translation.buffers])  # whatever their values: ranks would have to agree on them
        export_live(target, translation, state, dtype, tokenizer, group)
        self._log.info(f"exported step {step} for Hugging Face: {target}")
