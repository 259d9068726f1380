"""Launchers of several nodes on this machine, with a rank each."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.runs import finish, start, wait_for


def free_port() -> str:
    """Return a port below those that the system gives to connections: one of them could take it in
    the meantime.
    """
    while True:
        port = random.SystemRandom().randint(15_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return str(port)


def cluster(count: int = 2) -> dict[str, str]:
    """Return the variables that launchers of one run share."""
    return {
        "NNODES": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "NGPU": "1",
    }


def start_nodes(
    argv: list[str], folder: Path, count: int = 2, **environ: str
) -> list[subprocess.Popen]:
    variables = {**cluster(count), **environ}
    return [start(argv, folder, NODE_RANK=str(node), **variables) for node in range(count)]


def start_tasks(
    argv: list[str],
    folder: Path,
    names: tuple[str, str] = ("RANK", "LOCAL_RANK"),
    /,
    **variables: str,
) -> list[subprocess.Popen]:
    """Start two tasks without a launcher, as a scheduler does that names their ranks so."""
    module = "titanlite.train"
    return [start(argv, folder, module, **dict.fromkeys(names, rank), **variables) for rank in "01"]


def rendezvous() -> dict[str, str]:
    """Return the variables that tasks share."""
    return {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def trained(folder: Path, launcher: subprocess.Popen, steps: int) -> None:
    """Wait until this many steps are logged."""
    metrics = folder / "metrics.jsonl"
    wait_for(metrics, launcher, 300)
    while metrics.read_text().count("\n") < steps:
        assert launcher.poll() is None, finish(launcher)
        time.sleep(0.05)


def outputs(launchers: list[subprocess.Popen], code: int = 0, seconds: float = 200) -> list[str]:
    """Wait for launchers; require the exit code of each and return what each has printed."""
    results = [finish(launcher, seconds) for launcher in launchers]
    assert [found for found, _ in results] == [code] * len(launchers), results
    return [out for _, out in results]
