"""checkpoint.after_save: a user's command after each save, run by the launcher of node 0 beside the
ranks, one at a time. No torch.

Nothing that it does touches the run: its output is in logs/after-save-STEP.log, its exit code in
metrics.jsonl and in the launcher's log.
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
"""Between two looks at the newest save."""


class AfterSave:
    """The command of a run; without one, without checkpoints or on other nodes, nothing happens."""

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
        return (status.last_named(self._config) or 0) if self._command else 0

    def poll(self) -> None:
        """Look for a new save, and for the end of the command."""
        if not self._command or time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        newest = self._newest()
        if newest > self._seen:
            self._skipped += bool(self._due)
            self._due = newest
        self._seen = newest  # a lower one: the run went back to it
        if self._process and (code := self._process.poll()) is not None:
            self._end(f"exit code {code}", code)
        if self._due and not self._process:
            self._start()

    def finish(self, is_stop: bool) -> None:
        """At the end of the run, wait for the command of the last save; after a stop, not longer
        than the ranks had for their own.
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
                self._end(f"ended after {seconds:g} s, since the run had ended", -9)
                break
            time.sleep(0.05)

    def _start(self) -> None:
        self._step, self._due = self._due, 0
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
            line += f"; {self._skipped} saves meanwhile were skipped"
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
