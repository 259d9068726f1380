"""checkpoint.after_save: a user's command after each save. The launcher of node 0 runs it alongside
the ranks, one at a time. Imports no torch.

The command cannot affect the run: its output goes to logs/after-save-STEP.log, its exit code to
metrics.jsonl and the launcher's log.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from titanlite.checkpoint import status
from titanlite.config.schema import JobConfig
from titanlite.launch.terminal import note, say
from titanlite.launch.workers import kill_group
from titanlite.observe.run_folder import METRICS

LOOK_SECONDS = 0.25
"""Between checks for a new save."""


class AfterSave:
    """Runs the command; does nothing without one, without checkpoints, or on other nodes."""

    def __init__(self, config: JobConfig, first_node: bool) -> None:
        saving = config.checkpoint
        self._config = config
        self._command = saving.after_save if saving.enable and first_node else ""
        self._folder = Path(config.job.dump_folder)
        self._seen = self._newest()
        self._due = self._skipped = self._step = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._looked = 0.0

    def _newest(self) -> int:
        if self._command:
            return status.last_named(self._config) or 0
        return 0

    def poll(self) -> None:
        """Check for a new save, and for the end of the command."""
        if not self._command or time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        newest = self._newest()
        if newest > self._seen:
            self._skipped += bool(self._due)
            self._due = newest
        self._seen = newest  # lower than before if the run rolled back
        if self._process:
            code = self._process.poll()
            if code is not None:
                self._end(f"exit code {code}", code)
        if self._due and not self._process:
            self._start()

    def finish(self, is_stop: bool) -> None:
        """Wait for the command after the last save; after a stop, no longer than the ranks had to
        save.
        """
        config = self._config
        seconds = config.comm.checkpoint_timeout_seconds
        if is_stop:
            seconds = config.fault.grace_seconds
        deadline = time.monotonic() + seconds
        while self._command:
            self._looked = 0
            self.poll()
            if not self._process:
                break
            if time.monotonic() > deadline:
                kill_group(self._process.pid)
                self._process.wait()
                self._end(f"killed {seconds:g} s after the run ended", -9)
                break
            time.sleep(0.05)

    def _start(self) -> None:
        self._step = self._due
        self._due = 0
        checkpoint = shlex.quote(status.name_of(self._config, self._step))
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command.replace("{checkpoint}", checkpoint),
                shell=True,
                env={**os.environ, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._began = time.monotonic()

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / f"after-save-{self._step}.log"

    def _end(self, how: str, code: int) -> None:
        """Report the command's end."""
        took = time.monotonic() - self._began
        self._process = None
        line = f"checkpoint.after_save of step {self._step}: {how}, {took:.1f} s"
        if code:
            line += f"; its output: {self._log}"
        if self._skipped:
            line += f"; {self._skipped} saves in the meantime were skipped"
        record = {
            "step": self._step,
            "after_save_exit_code": code,
            "after_save_seconds": round(took, 3),
            "after_save_skipped": self._skipped,
            "time": round(time.time(), 3),
        }
        self._skipped = 0
        say(f"titanlite: {line}")
        note(self._folder / "logs", line)
        with (self._folder / METRICS).open("ab", buffering=0) as file:  # rank 0 appends, too
            file.write(json.dumps(record).encode() + b"\n")
