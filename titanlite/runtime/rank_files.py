"""What a launcher and its workers share: variables, signals, and files in the launcher's folder.
Imports no torch.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

LAUNCHED = "TITANLITE_LAUNCHED"
"""Environment variable with the process id of the launcher that writes each rank's output to its
log file.
"""
RESOLVED_CONFIG = "TITANLITE_CONFIG"
DEVICE = "TITANLITE_DEVICE"
CHOSEN_RESHARD = "TITANLITE_RESHARD"
"""Environment variables with the path of the checked config for the workers, and what "auto" stands
for in job.device and in parallelism.fsdp_reshard_after_forward.
"""
ATTEMPT = "TITANLITE_ATTEMPT"
"""Environment variable with the number of the attempt, from 1; each has its own keys in the store.
"""
STARTED = "TITANLITE_STARTED"
"""Environment variable with the start time of the launcher, in seconds since 1970."""

STOP = "stop"
"""Name of the launcher's file with the reason why its ranks should stop."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop from a launcher or a rank."""
SAME_REQUEST_SECONDS = 1
"""Signals within this time are one request: schedulers signal both a launcher and its ranks, some
of them twice.
"""

FAILED_MARK = "titanlite: this rank failed"
"""Line in a rank's log before its error; a launcher shows the error of the first failed rank."""
RANKS = "ranks.json"
"""File next to the logs with the last beats of all ranks, for `titanlite top`."""
ERROR = "json"
STACK = "stack"
PAGE = "page"
"""Kinds of files: the error that ended a rank, its stack (after SIGUSR2), and its page
(runtime/page.py).
"""


def attempt_number(environ: Mapping[str, str]) -> str:
    """Return the number of this worker's attempt; torchrun counts its restarts from 0."""
    return environ.get(ATTEMPT) or environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def attempt_prefix(environ: Mapping[str, str]) -> str:
    """Return the prefix of this attempt's keys in the store; empty if the store ends with the
    attempt.

    Each agent of torchrun counts only the restarts caused by its own ranks.
    """
    if not environ.get(ATTEMPT) and not outlives_attempts(environ):
        return ""
    return f"attempt-{attempt_number(environ)}/"


def outlives_attempts(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks use the store of their launchers or agents."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rank_file(private: Path, rank: int, kind: str) -> Path:
    return private / f"{rank}.{kind}"


def launcher_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this worker's launcher; None if titanlite's launcher did not start
    it.
    """
    if environ.get(LAUNCHED) != str(os.getppid()):  # torchrun in a launched run inherits it
        return None
    return Path(environ[RESOLVED_CONFIG]).parent


def own_file(environ: Mapping[str, str], kind: str) -> Path | None:
    """Return a file of this worker; None without titanlite's launcher."""
    folder = launcher_folder(environ)
    if folder:
        return rank_file(folder, int(environ["RANK"]), kind)
    return None
