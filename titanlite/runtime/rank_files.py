"""How a launcher and its workers talk: by variables, signals, and files in a folder of the launcher's. No torch."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCHED = "TITANLITE_LAUNCHED"
"""Environment variable with the process id of the launcher, which writes each rank's output to its log file."""
RESOLVED_CONFIG, DEVICE = "TITANLITE_CONFIG", "TITANLITE_DEVICE"
"""Environment variables with the path of the config that the launcher checked for its workers, and the device."""
ATTEMPT = "TITANLITE_ATTEMPT"
"""Environment variable with the number of the attempt, from 1: every attempt has keys of its own in the store."""
STARTED = "TITANLITE_STARTED"
"""Environment variable with the time at which the launcher started, in seconds since 1970."""

STOP = "stop"
"""Key of the launchers' store with the reason why the run should stop."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for it, to a launcher or to a rank."""
SAME_REQUEST_SECONDS = 1
"""Signals within this time are one request: schedulers signal a launcher and its ranks, and some do so twice."""

ERROR, PID, REASON, STACK, PLACE = "json", "pid", "reason", "stack", "place"
"""Kinds of files: the error that ended a rank, its process id, why it stopped early without one, where its threads
are, which SIGUSR2 asks for, and the place that it is in now: step, phase, sequence, since when, last step taken."""


def attempt_number(environ: Mapping[str, str]) -> str:
    """Return the number of this worker's attempt; torchrun counts its restarts from 0."""
    return environ.get(ATTEMPT) or environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def rank_file(private: Path, rank: int, kind: str) -> Path:
    return private / f"{rank}.{kind}"


def write_whole(file: Path, text: str) -> None:
    """Write a file that is whole or not there: a launcher may read it, and kill this rank, at any time."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def own_file(environ: Mapping[str, str], kind: str) -> Path | None:
    """Return a file of this worker; None if titanlite's launcher did not start it."""
    if environ.get(LAUNCHED) != str(os.getppid()):  # which torchrun inherits inside a launched run
        return None
    return rank_file(Path(environ[RESOLVED_CONFIG]).parent, int(environ["RANK"]), kind)


@dataclass(frozen=True)
class Left:
    """Why a rank left before the target step."""

    code: int
    """STOPPED, or CUT_SHORT if steps are lost."""
    step: int
    """The last that it took."""
    reason: str
    lost: int
    """Steps since the newest checkpoint."""

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self)))


def read_left(private: Path) -> list[Left]:
    """Return what the workers of this node that left early wrote."""
    return [Left(**json.loads(file.read_text())) for file in sorted(private.glob(f"*.{REASON}"))]


def processes(private: Path) -> dict[int, int]:
    """Return the process ids of this node's workers by rank, as far as they have started."""
    return {int(file.stem): int(text) for file in private.glob(f"*.{PID}") if (text := file.read_text())}
