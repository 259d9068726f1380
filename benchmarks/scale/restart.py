"""From a killed rank to the next step: python benchmarks/scale/restart.py [--ranks 2,4,8]
[--before CHECKOUT] [--rounds 3]

Each round trains the debug model on CPUs with a save every ten steps, kills the last rank at step
25, and takes the seconds until the next line of a step. Open files are counted just before the
kill. `--before` names the checkout of another version, whose rounds alternate with those of this
one."""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KILL_AT = 25
OPTIONS = """
    --training.steps 60 --training.local_batch_size 2 --validation.no_enable --generate.no_at_end
    --metrics.no_enable_tensorboard --metrics.log_freq 1 --job.device cpu
    --checkpoint.enable --checkpoint.interval 10 --checkpoint.async_mode async
    --model.flavor debugmodel
    """.split()
STEP = re.compile(r"^step: +(\d+)")


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks, in their order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = [entry[5:] for entry in environment if entry.startswith(b"RANK=")]
        if rank:
            found[int(rank[0])] = int(child)
    return [found[rank] for rank in sorted(found)]


def open_files(process: int) -> tuple[int, int]:
    """Return how many files a process has open, and how many of them are sockets."""
    targets = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    return len(targets), sum(target.startswith("socket:") for target in targets)


def kill_and_wait(checkout: Path, ranks: int) -> tuple[float, str]:
    """Return the seconds from the kill to the next step done, and what was open before."""
    environment = {**os.environ, "NGPU": str(ranks), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(checkout)
    counted, killed, again = "", 0.0, 0.0
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-u", "-m", "titanlite", "train", "--job.dump_folder", dump]
        process = subprocess.Popen(
            [*command, *OPTIONS],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout
        for line in process.stdout:
            step = STEP.match(line)
            if step and int(step[1]) == KILL_AT and not killed:
                workers = ranks_of(process.pid)
                rows = [open_files(each) for each in (process.pid, workers[0], workers[-1])]
                counted = ", ".join(f"{files} ({sockets})" for files, sockets in rows)
                killed = time.monotonic()
                os.kill(workers[-1], signal.SIGKILL)
            elif step and killed and int(step[1]) <= KILL_AT:
                again = time.monotonic()
                break
        process.send_signal(signal.SIGTERM)
        process.communicate()
    if not again:
        raise SystemExit("the run ended before a step was done again")
    return again - killed, counted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    versions = {"this version": ROOT}
    if arguments.before:
        versions["before"] = arguments.before.resolve()
    for ranks in map(int, arguments.ranks.split(",")):
        seconds: dict[str, list[float]] = {name: [] for name in versions}
        opened = {}
        for _ in range(arguments.rounds):
            for name, checkout in versions.items():
                taken, opened[name] = kill_and_wait(checkout, ranks)
                seconds[name].append(taken)
        for name, taken in seconds.items():
            middle = statistics.median(taken)
            print(
                f"{ranks} ranks, {name}: {middle:.1f} s ({min(taken):.1f} to {max(taken):.1f}); "
                f"files (sockets) of launcher, first and last rank: {opened[name]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
