"""Chrome traces and memory snapshots of a rank, at the steps that [profiling] asks for.

Off, nothing is started and nothing is written. The phases of a step are named where they happen, with torch's
record_function: it costs 6 microseconds when nobody records, and other profilers see the names as well.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, profile, schedule

from titanlite.config.schema import Profiling
from titanlite.errors import UserError


class Profiler:
    """A context around the steps that follow step `done`; call `step` after each."""

    def __init__(self, settings: Profiling, folder: Path, rank: int, device: torch.device, done: int) -> None:
        if settings.enable_memory_snapshot:
            require_gpu(device.type)
        self._settings, self._rank, self._done = settings, rank, done
        self._traces = folder / settings.save_traces_folder
        self._snapshots = folder / settings.save_memory_snapshot_folder
        self._profile: profile | None = None
        if settings.enable_profiling:
            self._profile = profile(
                schedule=lambda step: action(settings, step) if step > done else ProfilerAction.NONE,
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )
            self._profile.step_num = done  # so that its step numbers are the job's
            # A trace holds its own steps and no earlier ones, as it should.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")

    def __enter__(self) -> Profiler:
        if self._profile:
            self._profile.start()
            self._profile.step()  # from the last step done into the next
        if self._settings.enable_memory_snapshot:
            _record_allocations(True)
        return self

    def step(self, number: int) -> None:
        """Step `number` is done."""
        self._done = number
        if self._profile:
            self._profile.step()
        if self._settings.enable_memory_snapshot and number % self._settings.profile_freq == 0:
            self._write_snapshot(f"step-{number}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settings.enable_memory_snapshot:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"step-{self._done + 1}-out-of-memory")
            _record_allocations(False)
        if self._profile:
            self._profile.stop()

    def _write_trace(self, traced: profile) -> None:
        traced.export_chrome_trace(str(_file(self._traces, f"step-{self._done}", f"rank-{self._rank}.json")))

    def _write_snapshot(self, step: str) -> None:
        _dump_allocations(_file(self._snapshots, step, f"rank-{self._rank}.pickle"))


def action(settings: Profiling, step: int) -> ProfilerAction:
    """What the profiler does during a step: a trace ends with every profile_freq-th."""
    active, warmup = settings.profiler_active, settings.profiler_warmup
    return schedule(wait=settings.profile_freq - warmup - active, warmup=warmup, active=active)(step - 1)


def require_gpu(device: str) -> None:
    """Refuse memory snapshots where there is no allocator to look into."""
    if device != "cuda":
        raise UserError(
            "profiling.enable_memory_snapshot = true: the snapshot is of a GPU's allocator, and this run is on the "
            "CPU; leave it out. profiling.enable_profiling works on a CPU"
        )


def _file(folder: Path, step: str, name: str) -> Path:
    (folder / step).mkdir(parents=True, exist_ok=True)
    return folder / step / name


def _record_allocations(on: bool) -> None:
    """Keep the allocator's last 100,000 events. (Private by name, but documented; torch 2.11 and 2.13 have it. Not
    yet run on a GPU.)"""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=100_000)


def _dump_allocations(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))
