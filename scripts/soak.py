"""Train under random faults for a while; the final weights must equal those of a run without
faults.

    python scripts/soak.py --minutes 30 [--seed 0]
    python scripts/soak.py --matrix    every fault of a rank in every phase, a run each, as a table

Four ranks on the CPU, dp 2 x tp 2. Every start of the launcher meets up to three faults of a rank
in random phases, from each of which it must restart by itself. Then it is ended by a signal to the
launcher or to a rank (which must save the last step), by SIGKILL of the launcher, or by a full disk
(if this user may mount one). Before some starts a byte of the newest checkpoint is flipped.
Gradients that are not finite or too large occur in the undisturbed run, too, which skips the same
steps. The last line is the result; the exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from tests.jobs import TINY  # noqa: E402
from tests.runs import descendants, left_over, records, start  # noqa: E402
from titanlite.checkpoint.load import load_tensors  # noqa: E402
from titanlite.checkpoint.manifest import committed, step_folder  # noqa: E402
from titanlite.errors import FAILED, OK, STOPPED  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402

RANKS, INTERVAL, STALL = 4, 10, 5
PHASES = ("start", "load", "data", "forward", "backward", "optimizer", "validation", "save")
OF_A_RANK = ("raise", "kill", "stop", "sleep")
ENDS = (
    "SIGTERM to the launcher",
    "SIGUSR1 to the launcher",
    "SIGTERM to a rank",
    "SIGKILL of the launcher",
    "full disk",
)
ARGV = [
    *TINY,
    *(
        "--model.package=injured",
        "--parallelism.tensor_parallel_degree=2",
        "--model.overrides.n_kv_heads=2",
    ),
    *(
        "--metrics.log_freq=1",
        "--validation.enable",
        f"--validation.freq={INTERVAL}",
        "--validation.steps=2",
    ),
    *("--checkpoint.enable", f"--checkpoint.interval={INTERVAL}", "--checkpoint.keep_latest_k=3"),
    *(
        "--lr_scheduler.total_steps=1000000",
        "--fault.grace_seconds=30",
        f"--fault.stall_seconds={STALL}",
    ),
    *(
        "--comm.init_timeout_seconds=60",
        "--comm.checkpoint_timeout_seconds=20",
        "--comm.train_timeout_seconds=20",
    ),
    *(
        "--fault.on_nonfinite=skip",
        "--fault.spike_sigma=8",
        "--fault.spike_window=32",
        "--fault.on_spike=skip",
    ),
    "--fault.skip_budget=1000",
]
COURSE = ",".join(
    f"{'nan' if step % 300 else 'spike'}:gradient norm:1:{step}:*"
    for step in range(150, 20_000, 150)
)
"""The bad steps that every run meets, and skips."""


@dataclass
class Fault:
    """A fault that a rank meets in one attempt."""

    kind: str
    phase: str
    rank: int
    step: int

    def injury(self, attempt: int) -> str:
        return f"{self.kind}:{self.phase}:{self.rank}:{self.step}:{attempt}"


def fault_after(step: int, kind: str, phase: str, rank: int, chance: random.Random) -> Fault:
    """Return a fault soon after a step at which its phase occurs; the start has no step."""
    if phase in ("start", "load"):
        return Fault(kind, phase, rank, 0)
    step += chance.randint(2, INTERVAL)
    return Fault(
        kind,
        phase,
        rank,
        -(-step // INTERVAL) * INTERVAL if phase in ("validation", "save") else step,
    )


class Soak:
    """A run with many starts in one folder."""

    def __init__(self, folder: LocalPath, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.met, self.lost = Counter[str](), list[str]()
        self.root = folder / "checkpoint"
        self.root.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "titanlite-soak", str(self.root)]
        self.mounted = subprocess.run(mount, capture_output=True).returncode == 0
        self.ends = ENDS if self.mounted else ENDS[:-1]

    def newest(self) -> int:
        return max(committed(self.root), default=0)

    def round(self) -> None:
        """Start, meet faults, end, and note the losses."""
        if self.newest() > INTERVAL and self.chance.random() < 0.25:
            self.flip_a_byte()
        before = step = self.newest()
        faults = []
        places = [
            (kind, phase) for kind in OF_A_RANK for phase in PHASES
        ]  # the same error twice is not restarted
        for kind, phase in self.chance.sample(places, self.chance.randint(1, 3)):
            faults.append(fault_after(step, kind, phase, self.chance.randrange(RANKS), self.chance))
            step = max(step, faults[-1].step)
        end, last = self.chance.choice(self.ends), step + self.chance.randint(3, INTERVAL)
        if end == "SIGTERM to a rank":
            faults.append(Fault("term", "forward", self.chance.randrange(RANKS), last))
        injuries = [fault.injury(number) for number, fault in enumerate(faults, 1)]
        began = time.monotonic()
        code, out = self.run(injuries, 1_000_000, end, last)
        self.met.update(
            [*(f"{fault.kind} in {fault.phase}" for fault in faults if fault.kind != "term"), end]
        )
        wrong = self.judge(end, code, out, before, last, len(faults) - (end == "SIGTERM to a rank"))
        verdict, seconds = "LOST" if wrong else "kept", time.monotonic() - began
        print(f"{verdict} {seconds:5.0f} s  step {self.newest():>6}  {end}  {injuries}", flush=True)
        if wrong:
            self.lost.append(f"{injuries}, then {end}: {wrong}")
            print(f"{self.lost[-1]}\n{out[-6000:]}", flush=True)

    def run(
        self, injuries: Iterable[str], steps: int, end: str = "", last: int = 0
    ) -> tuple[int, str]:
        """Start the launcher, end it after step `last` unless it ends by itself; return its exit
        code and output.
        """
        course = {"INJURY": ",".join([*injuries, COURSE]), "NGPU": str(RANKS)}
        with tempfile.NamedTemporaryFile("w+") as out:
            process = start([*ARGV, f"--training.steps={steps}"], self.folder, out=out, **course)
            deadline, ballast = time.monotonic() + 400, self.root / "ballast"
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.2)
                    if end.endswith("launcher") and _reached(last, Path(out.name)):
                        family = descendants(process.pid)
                        process.send_signal(getattr(signal, end.split()[0]))
                        process.wait(60)
                        if remain := left_over(family):
                            self.lost.append(f"{end}: processes {remain} remained")
                    elif (
                        end == "full disk"
                        and not ballast.exists()
                        and _reached(last, Path(out.name))
                    ):
                        with ballast.open("wb", buffering=0) as file:
                            try:
                                while True:
                                    file.write(bytes(4096))
                            except OSError:
                                pass
                if process.poll() is None:
                    self.lost.append(f"{end or 'no end'}: still running after 400 s")
            finally:
                process.kill()  # its ranks end with it
            ballast.unlink(missing_ok=True)
            out.seek(0)
            return process.wait(), out.read()

    def judge(self, end: str, code: int, out: str, before: int, last: int, restarts: int) -> str:
        """Return the faults in the state after a start, or nothing."""
        expected = {"full disk": FAILED, "SIGKILL of the launcher": -signal.SIGKILL}.get(
            end, STOPPED
        )
        if code != expected:
            return f"exit code {code}, not {expected}"
        if (restarted := len(re.findall(r"^titanlite: restart", out, re.MULTILINE))) != restarts:
            return f"{restarted} restarts, not {restarts}"
        least = last if expected == STOPPED else last - INTERVAL
        return (
            ""
            if self.newest() >= max(before, least)
            else f"the newest checkpoint is {self.newest()}, not {least}"
        )

    def flip_a_byte(self) -> None:
        newest = step_folder(self.root, self.newest()).local()
        path = self.chance.choice(sorted(newest.glob("rank-*")))
        with path.open("r+b") as file:
            file.seek(self.chance.randrange(path.stat().st_size))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        self.met["flipped byte"] += 1

    def finish(self) -> None:
        """Continue to a last step without faults, and compare with a run that met none."""
        last = self.newest() + 2 * INTERVAL
        straight = Soak(self.folder.parent / "straight", 0)
        try:
            for run in (self, straight):
                code, out = run.run([], last)
                if code != OK:
                    self.lost.append(
                        f"the last run without faults: exit code {code}\n{out[-6000:]}"
                    )
                    return
            self.compare(straight, last)
        finally:
            straight.close()

    def compare(self, straight: Soak, last: int) -> None:
        """Note the differences from the undisturbed run after its last step."""
        found, expected = (load_tensors(step_folder(run.root, last)) for run in (self, straight))
        if wrong := [name for name in expected if not torch.equal(found[name], expected[name])]:
            self.lost.append(
                f"after {last} steps {len(wrong)} tensors differ: {', '.join(wrong[:4])}"
            )
        losses, expected_losses = (
            [(r["step"], r["loss"]) for r in records(run.folder) if "loss" in r]
            for run in (self, straight)
        )
        if losses != expected_losses:
            self.lost.append("metrics.jsonl has not the steps and losses of the undisturbed run")

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.root)], check=True)


def _reached(step: int, out: Path) -> bool:
    """Whether this start, rather than an earlier one, has taken a step, judging by rank 0's log in
    its output.
    """
    return any(
        int(number) >= step
        for number in re.findall(r"^step: *(\d+)", out.read_text(), re.MULTILINE)
    )


def matrix(folder: LocalPath, kinds: Iterable[str], phases: Iterable[str]) -> int:
    """Meet every fault in every phase once, with a restart after each, and print a table."""
    straight, failures = Soak(folder / "straight", 0), 0
    straight.run([], 4 * INTERVAL)
    expected = load_tensors(step_folder(straight.root, 4 * INTERVAL))
    straight.close()
    print("| fault | phase | seconds to the end | named | same weights |\n|---|---|---|---|---|")
    for kind in kinds:
        for number, phase in enumerate(phases):
            soak = Soak(folder / f"{kind}-{phase}", number)
            fault = fault_after(INTERVAL, kind, phase, number % RANKS, soak.chance)
            began = time.monotonic()
            code, out = soak.run([fault.injury(1)], 4 * INTERVAL)
            seconds, named = time.monotonic() - began, is_named(fault, out)
            same = code == OK and all(
                torch.equal(tensor, expected[name])
                for name, tensor in load_tensors(step_folder(soak.root, 4 * INTERVAL)).items()
            )
            print(
                f"| {kind} | {phase} | {seconds:.0f} | {'yes' if named else 'NO'} | "
                f"{'yes' if same else 'NO'} |",
                flush=True,
            )
            if not (named and same):
                failures += 1
                print(out[-6000:], file=sys.stderr)
            soak.close()
    return failures


def is_named(fault: Fault, out: str) -> bool:
    """Whether the output names the rank, and for a hang also the phase."""
    if fault.kind in ("raise", "kill"):
        return f"rank {fault.rank} on" in out and "failed first" in out
    where = fault.phase
    if where == "start":
        where = "start|before its first heartbeat"
    return bool(re.search(rf"rank {fault.rank}\b.*({where})", out))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=OF_A_RANK, choices=OF_A_RANK)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    arguments = parser.parse_args()
    # Through the code that stops the run and unmounts the disk.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if arguments.matrix:
            failures = matrix(LocalPath(folder), arguments.kinds, arguments.phases)
            print(f"{len(arguments.kinds) * len(arguments.phases)} faults, {failures} lost")
            return int(failures > 0)
        soak, until = (
            Soak(LocalPath(folder, "run"), arguments.seed),
            time.monotonic() + 60 * arguments.minutes,
        )
        try:
            while time.monotonic() < until:
                soak.round()
            soak.finish()
        finally:
            soak.close()
    if not soak.mounted:
        print("no full disks: this user may not mount a file system")
    equal = "weights equal" if not soak.lost else "; ".join(soak.lost)
    print(f"{soak.met.total()} faults of {len(soak.met)} kinds, {len(soak.lost)} lost, {equal}")
    return int(bool(soak.lost))


if __name__ == "__main__":
    sys.exit(main())
