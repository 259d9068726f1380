"""Start the real command, as a person would."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import Forked, Server, at_start, start_server
from tests.jobs import OUTSIDE
from titanlite.runtime.page import read_page
from titanlite.runtime.rank_files import PAGE

ROOT = Path(__file__).parents[1]
STARTED: list[subprocess.Popen] = []
HELPERS: set[int] = set()
"""Processes that live as long as this one."""
CLEARED = (
    "NGPU",
    "LOG_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CONFIG_FILE",
)


def environment(**extra: str) -> dict[str, str]:
    """Return the variables of a command that is started: without GPUs, which tests that want some
    give it.
    """
    variables = {
        k: v
        for k, v in os.environ.items()
        if k not in CLEARED and not k.startswith(("SLURM_", "PET_"))
    }
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), OUTSIDE])
    return {**variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def start(
    argv: list[str],
    folder: Path,
    module: str = "titanlite train",
    out: Any = subprocess.PIPE,
    real: str = "",
    **environ: str,
) -> subprocess.Popen:
    """Start a run; `real` is why it needs an interpreter of its own."""
    words = [*module.split(), *argv, f"--job.dump_folder={folder}"]
    return popen(words, real, stdout=out, env=environment(**environ))


def popen(words: list[str], real: str = "", **options: Any) -> subprocess.Popen:
    """Start `python -m WORDS`, forked unless `real` says why not."""
    options = {"stderr": subprocess.STDOUT, "text": True, "cwd": ROOT, **options}
    if real or sys.platform != "linux":
        process = subprocess.Popen([sys.executable, "-m", *words], **options)
    else:
        differing = at_start(options["env"]).items() ^ server().environ.items()
        assert not differing, f"a fork cannot have {differing}: say real='why'"
        process = Forked(words, **options)
    STARTED.append(process)
    return process


def server() -> Server:
    """Return the process that runs are forked from."""
    if not hasattr(Forked, "server"):
        Forked.server = start_server(environment(), ROOT)
        HELPERS.add(Forked.server.pid)
    return Forked.server


def kill_started(since: int) -> None:
    """Kill what a test has started and not awaited: a failed one would leave a run that slows all
    that follow.
    """
    for process in STARTED[since:]:
        signal_all(process)
        process.wait()
    if STARTED[since:]:
        for pid in {*children(os.getpid())} - {process.pid for process in STARTED}:
            if _is_of_a_run(pid):  # its parent has ended
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _is_of_a_run(pid: int) -> bool:
    """Return whether a child of this process was adopted: started by a run, by its command."""
    if pid in HELPERS:
        return False
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[2:3] in ([b"tests.forked"], [b"titanlite"], [b"titanlite.train"])
    return False


def signal_all(process: subprocess.Popen, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process and all below it, unless it has ended."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def finish(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str]:
    """Return the exit code and everything that was printed."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        signal_all(process)
        out, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}") from None
    return process.returncode, out


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: Path
    code: int
    out: str
    """Everything that it printed."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return records(self.folder)

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.folder)


def run(argv: list[str], folder: Path, ranks: int = 1, code: int | None = 0, **environ: str) -> Run:
    """Train to the end with this many ranks, as a person does; require the exit code unless it is
    None.
    """
    found, out = finish(start(argv, folder, NGPU=str(ranks), **environ))
    assert code in (None, found), out
    return Run(folder, found, out)


def command(*words: object, real: str = "", **environ: str) -> tuple[int, str]:
    """Run `titanlite WORDS` in a process of its own; return its exit code and what it printed."""
    argv = ["titanlite", *map(str, words)]
    return finish(popen(argv, real, stdout=subprocess.PIPE, env=environment(**environ)))


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in a folder; return how it ended and what it printed."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, check=False
    )


def put_driver(folder: Path, script: str, monkeypatch: Any) -> None:
    """Put a stand-in for nvidia-smi in a folder, which comes first on the path."""
    driver = folder / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\n{script}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def write_example(package: str, folder: Path) -> None:
    """Write the files of a package that docs/extending.md shows."""
    page = (ROOT / "docs/extending.md").read_text()
    (folder / package).mkdir()
    for name, code in re.findall(rf"```python\n# ({package}/\S+)\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(code)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Return the logged losses by step."""
    return {each["step"]: each["loss"] for each in records(folder) if "loss" in each}


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 60) -> None:
    """Wait until a run has made a file; fail with its output if it ends before."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, finish(process)
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    family = [pid]
    for member in family:
        family += children(member)
    return family[1:]


def children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    )
    return [int(child) for child in listing.stdout.split()]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left_over(family: Iterable[int], until: float | None = None) -> list[int]:
    """Return the processes that are still alive after 15 seconds, which a busy machine may need."""
    until = until or time.monotonic() + 15
    while any(map(alive, family)) and time.monotonic() < until:
        time.sleep(0.1)
    return [pid for pid in family if alive(pid)]


def rank_pids(launcher: subprocess.Popen) -> dict[int, int]:
    """Return the processes of a launcher's ranks, as far as they have started, by the pages that
    they keep in its folder: a forked rank's /proc/PID/environ would be the launcher's.
    """
    family, found = descendants(launcher.pid), {}
    # glob.glob passes by the folders of other runs that end just now; Path.glob raises there
    for file in glob.glob(f"{tempfile.gettempdir()}/titanlite-*/*.{PAGE}"):
        page = read_page(Path(file))
        # A killed run leaves its pages, and another process may get its number.
        if page and page.pid in family and file in _mapped(page.pid):
            found[int(Path(file).stem)] = page.pid
    return found


def _mapped(pid: int) -> str:
    """Return the files that a process has mapped; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def rank_pid(launcher: subprocess.Popen, rank: int, seconds: float = 60) -> int:
    """Return the process of a rank once it has a page."""
    deadline = time.monotonic() + seconds
    while rank not in (found := rank_pids(launcher)):
        assert time.monotonic() < deadline and launcher.poll() is None, finish(launcher)
        time.sleep(0.02)
    return found[rank]
