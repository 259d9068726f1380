"""Chrome traces and memory snapshots of a rank, at the steps that [profiling] selects.

If disabled, nothing is started or written. The code of a step names its phases with torch's
record_function, which costs 6 microseconds without a profiler; other profilers show the names
too."""

import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile, schedule

from titanlite.config.schema import Profiling
from titanlite.runtime.torch_private import dump_memory_snapshot, record_memory_history


class Profiler:
    """A context around the steps after step `done`, the last in the checkpoint.

    Call `step` after each."""

    def __init__(self, settings: Profiling, folder: Path, rank: int, done: int) -> None:
        self._settings = settings
        self._rank = rank
        self._first = self._done = done
        self._records_memory = settings.enable_memory_snapshot
        self._traces = folder / settings.save_traces_folder
        self._snapshots = folder / settings.save_memory_snapshot_folder
        self._profile: profile | None = None
        if settings.enable_profiling:
            self._profile = profile(
                schedule=self._schedule,
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )
            # As intended, each trace contains only its own steps.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")

    def _schedule(self, step: int) -> ProfilerAction:
        """Return the action in a step, which torch counts from this start on; 0 is before the
        first.
        """
        if not step:
            return ProfilerAction.NONE
        return action(self._settings, self._first + step)

    def __enter__(self) -> "Profiler":
        if self._profile:
            self._profile.start()
            self._profile.step()  # enters the first step
        if self._records_memory:
            record_memory_history(True)
        return self

    def step(self, number: int) -> None:
        """Note that step `number` of the job is done."""
        self._done = number
        if self._profile:
            self._profile.step()
        if self._records_memory and number % self._settings.profile_freq == 0:
            self._write_snapshot(f"step-{number}")

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._records_memory:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"step-{self._done + 1}-out-of-memory")
            record_memory_history(False)
        if self._profile:
            self._profile.stop()

    def _write_trace(self, traced: profile) -> None:
        traced.export_chrome_trace(
            str(_file(self._traces, f"step-{self._done}", f"rank-{self._rank}.json"))
        )

    def _write_snapshot(self, step: str) -> None:
        dump_memory_snapshot(_file(self._snapshots, step, f"rank-{self._rank}.pickle"))


def action(settings: Profiling, step: int) -> ProfilerAction:
    """Return the profiler's action in a step of the job; a trace ends at every profile_freq-th
    step.
    """
    active = settings.profiler_active
    warmup = settings.profiler_warmup
    return schedule(wait=settings.profile_freq - warmup - active, warmup=warmup, active=active)(
        step - 1
    )


def _file(folder: Path, step: str, name: str) -> Path:
    (folder / step).mkdir(parents=True, exist_ok=True)
    return folder / step / name
