"""Hosts made of network namespaces, and launchers on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs import FLOAT64, TINY
from tests.runs import ROOT, environment

SCRIPT = str(ROOT / "scripts" / "multinode" / "namespaces.sh")
REFUSED = 2

ARGV = [
    *TINY,
    *FLOAT64,
    "--model.overrides.n_kv_heads=2",
    "--metrics.log_freq=1",
    "--training.global_batch_size=8",
]
"""In float64 a loss does not depend on the mesh but for the last digits."""
SAVING = [
    *ARGV,
    "--checkpoint.enable",
    "--checkpoint.interval=5",
    "--checkpoint.async_mode=disabled",
    "--training.steps=60",
    "--debug.seed=5",
]


class NoHosts(Exception):
    """This machine cannot have namespaces, for the reason that the script gives."""


class Hosts:
    """node0 to node(count-1), which share this machine's files."""

    def __init__(self, count: int) -> None:
        self._environ = {"PREFIX": f"test{os.getpid()}"}  # pytest's workers have their own
        self._count = count
        made = self._script("up", str(count))
        if made.returncode == REFUSED:
            raise NoHosts(made.stderr.strip())
        assert made.returncode == 0, made.stderr

    def _script(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *words], env=environment(**self._environ), capture_output=True, text=True
        )

    def do(self, *words: str) -> None:
        done = self._script(*words)
        assert done.returncode == 0, done.stderr

    def start_all(
        self, argv: list[str], folder: Path, processes: int = 1, verb: str = "train"
    ) -> list[subprocess.Popen]:
        """Start the launcher of each host, as a person would start it there."""
        words = [sys.executable, "-m", "titanlite", verb, *argv, f"--job.dump_folder={folder}"]
        shared = {
            "NNODES": str(self._count),
            "MASTER_ADDR": "node0",
            "NGPU": str(processes),
        }
        return [
            self.run(node, words, {**shared, "NODE_RANK": str(node)}) for node in range(self._count)
        ]

    def run(
        self,
        node: int,
        command: list[str],
        environ: dict[str, str],
        cwd: Path = ROOT,
        stdout: Any = subprocess.PIPE,
    ) -> subprocess.Popen:
        """Start a command that has what it prints in a pipe, or in `stdout`."""
        return subprocess.Popen(
            [SCRIPT, "run", f"node{node}", *command],
            env=environment(**self._environ, **environ),
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
