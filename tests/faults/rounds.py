"""Rounds of training and dying: a run that is killed in every round, and must resume by itself in
the next.

All rounds share one run folder, so that each one starts from what the last kill left. A round
trains on real ranks, which patch a SIGKILL into themselves, at a failpoint of a save or at a random
moment. Which steps the kill may cost is known before, and at the end the state is compared bit for
bit with that of a run that was never killed."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

from tests.checkpoint.saved import rank
from tests.failpoints import FAILPOINTS, ON_EVERY_RANK, calling
from tests.jobs import TINY, trainer
from tests.runs import records
from tests.stores.server import credentials
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import (
    CONFIG,
    CorruptCheckpoint,
    committed,
    faults,
    read_manifest,
    step_folder,
)
from titanlite.observe.run_folder import METRICS
from titanlite.runtime import distributed
from titanlite.runtime.bucket import Place, place
from titanlite.runtime.store import LocalPath
from titanlite.verify.pool import Pool, RankFailed

RANKS, INTERVAL, KEPT = 2, 2, 2
AFTER_THE_RENAME = FAILPOINTS[FAILPOINTS.index("after the rename") :]
_BESIDE = {METRICS, CONFIG}
"""What there is beside the checkpoints."""
LONGEST_SECONDS = 3.0
"""A random kill comes within this time: while resuming, while training or in a save."""

ARGV = [
    *TINY,
    "--checkpoint.enable",
    f"--checkpoint.interval={INTERVAL}",
    f"--checkpoint.keep_latest_k={KEPT}",
    "--metrics.log_freq=1",
    "--training.steps=100000",
    "--lr_scheduler.total_steps=100000",
]


@dataclass(frozen=True)
class Plan:
    """How a round ends."""

    mode: str
    """checkpoint.async_mode"""
    rank: int
    """The rank that dies first; the others are killed when that is seen."""
    point: str
    """A failpoint, or nothing for a random moment."""
    save: int
    """Which save of the round, from 1, is killed at the failpoint."""
    seconds: float
    """The random moment, from the start of the round."""


def planned(seed: int, number: int) -> Plan:
    """Return round `number` of a soak: three of four at a failpoint, each in turn; one of four
    without async_mode.
    """
    chance = random.Random(f"{seed}/{number}")
    mode = "disabled" if chance.random() < 0.25 else "async"
    named, at_random = divmod(number, 4)
    if at_random == 3:
        return Plan(mode, chance.randrange(RANKS), "", 0, chance.uniform(0, LONGEST_SECONDS))
    point = FAILPOINTS[(3 * named + at_random) % len(FAILPOINTS)]
    return Plan(
        mode,
        chance.randrange(RANKS) if point in ON_EVERY_RANK else 0,
        point,
        chance.randint(1, 2),
        0,
    )


@dataclass(frozen=True)
class Death:
    """What a rank writes down when it kills itself."""

    point: str
    step: int
    """Of the pending save, or of the last one, or where the round started; -1 before that."""
    in_progress: bool


@dataclass(frozen=True)
class Bucket:
    """Where the checkpoints of a soak are, if not in its folder."""

    url: str = ""
    port: int = 0

    def argv(self, folder: str) -> list[str]:
        """Let s3:// lead there in this process; return the options of a run."""
        if not self.url:
            return ARGV
        os.environ |= {"XDG_CACHE_HOME": folder} | (credentials(self.port) if self.port else {})
        return [*ARGV, f"--checkpoint.folder={self.url}"]


def train_and_die(plan: Plan, folder: str, bucket: Bucket) -> None:
    """Run one round on a rank."""
    runs: list[Any] = []
    saves: set[int] = set()

    def die(point: str) -> None:
        pending = runs[0].saver._pending if runs else None
        step = pending.step if pending else max(saves, default=-1)
        in_progress = bool(pending and pending.is_alive())
        death = Death(point, step, in_progress)
        (LocalPath(folder) / "death.json").write_text(json.dumps(asdict(death)))
        os.kill(os.getpid(), signal.SIGKILL)

    def failpoint(name: str) -> None:
        pending = runs[0].saver._pending if runs else None
        if name != plan.point or pending is None:
            return
        saves.add(pending.step)
        if len(saves) == plan.save:
            die(name)

    if rank() == plan.rank and not plan.point:
        moment = threading.Timer(plan.seconds, die, ("",))
        moment.daemon = True
        moment.start()
    with calling(failpoint if rank() == plan.rank else lambda name: None):
        argv = [*bucket.argv(folder), f"--checkpoint.async_mode={plan.mode}"]
        run = trainer(argv, folder, _log_of(folder))
        (LocalPath(folder) / f"begun-{rank()}").write_text(str(run.step))
        if not plan.point:
            _note_saves(run, saves)
        runs.append(run)
        run.train()


def _log_of(folder: str) -> logging.Logger:
    log = logging.getLogger("round")
    log.setLevel(logging.INFO)
    log.addHandler(logging.FileHandler(LocalPath(folder) / f"log-{rank()}"))
    return log


def _note_saves(run: Any, saves: set[int]) -> None:
    save = run.saver.save
    saves.add(run.step)

    def noted(position: Any, *rest: Any) -> None:
        save(position, *rest)
        saves.add(position.step)

    run.saver.save = noted


def train_to(step: int, folder: str, bucket: Bucket) -> None:
    """Train without a fault to a last step, which is saved."""
    trainer(
        [*bucket.argv(folder), "--checkpoint.async_mode=async", f"--training.steps={step}"], folder
    ).train()


class Watcher(threading.Thread):
    """Checks all the time that, once there was a checkpoint, there is always one whose every byte
    is right.
    """

    def __init__(self, root: Place) -> None:
        super().__init__(daemon=True, name="watcher")
        self.root, self.looks, self.since, self.missed = root, 0, False, 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            verified = latest_verified(self.root) is not None
            self.since |= verified
            self.looks += self.since
            self.missed += self.since and not verified

    def end(self) -> None:
        self._ended.set()
        self.join()


def watched(soak: Soak) -> Iterator[Soak]:
    """Yield a soak; require that it always had a verified checkpoint, once there was one."""
    watcher = Watcher(soak.root)
    watcher.start()
    yield soak
    watcher.end()
    soak.pool.close()
    assert watcher.looks and not watcher.missed


def latest_verified(root: Place) -> int | None:
    """Return the newest step whose every byte is right; a folder that is deleted meanwhile is
    skipped.
    """
    for step in reversed(committed(root)):
        try:
            manifest = read_manifest(step_folder(root, step))
            if not faults(step_folder(root, step), manifest, manifest.files):
                return step
        except (CorruptCheckpoint, OSError):
            continue
    return None


@dataclass
class Soak:
    """A run through rounds."""

    folder: LocalPath
    pool: Pool = field(
        default_factory=lambda: Pool(RANKS, preload=["titanlite.train.trainer", "torch._dynamo"])
    )
    hits: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    """Kills inside a save."""
    bucket: Bucket = Bucket()

    @property
    def root(self) -> Place:
        return place(self.bucket.url) if self.bucket.url else self.folder / "checkpoint"

    def newest(self) -> int:
        """Return the step that the next start must resume."""
        return latest_verified(self.root) or 0

    def round(self, plan: Plan) -> str:
        """Train until the kill; return what went wrong, or nothing."""
        before = self.newest()
        for name in ("death.json", *(f"begun-{one}" for one in range(RANKS))):
            (self.folder / name).unlink(missing_ok=True)
        try:
            arguments = plan, str(self.folder), self.bucket
            self.pool.run(train_and_die, *arguments, world=RANKS, timeout=120)
            return "nobody was killed"
        except RankFailed as error:
            failure = str(error)
        finally:
            self.pool.close()
        if not (self.folder / "death.json").exists():
            return f"no kill, but: {failure}"
        death = Death(**json.loads((self.folder / "death.json").read_text()))
        self.hits[death.point] += 1
        self.inside += death.in_progress
        return self._judge(plan, death, before, self.newest())

    def _judge(self, plan: Plan, death: Death, before: int, after: int) -> str:
        """Compare the step that the next start will resume with those that it may."""
        begun = [int(path.read_text() or before) for path in self.folder.glob("begun-*")]
        if any(step != before for step in begun):
            return f"it started at steps {begun}, but the newest verified checkpoint was {before}"
        if plan.point:
            if not death.in_progress or death.point != plan.point:
                return f"a kill at {death}, not in a save at {plan.point!r}"
            due = {death.step if plan.point in AFTER_THE_RENAME else death.step - INTERVAL}
        elif death.step == -1:
            due = {before}
        else:
            # A save that training waits for is noted after it.
            due = {death.step, death.step + (-INTERVAL if death.in_progress else INTERVAL)}
        return (
            ""
            if after in due
            else f"the newest verified checkpoint is {after}, but {sorted(due)} would be right"
        )

    def finish(self) -> list[str]:
        """Resume once more, to the end; compare everything with a run that was never killed."""
        last = self.newest() + INTERVAL
        straight = self.folder.parent / "straight"
        for folder, bucket in ((self.folder, self.bucket), (straight, Bucket())):
            self.pool.run(train_to, last, str(folder), bucket, world=RANKS, timeout=600)
        self.pool.close()
        found, expected = (
            load_tensors(step_folder(root, last)) for root in (self.root, straight / "checkpoint")
        )
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        problems = (
            [f"{len(wrong)} tensors differ from a run without kills: {', '.join(wrong[:4])}"]
            if wrong
            else []
        )
        losses, expected_losses = (_logged("loss", folder) for folder in (self.folder, straight))
        if losses != expected_losses:
            problems.append("metrics.jsonl: not the steps and losses of a run without kills")
        kept = sorted({path.name for path in self.root.iterdir()} - _BESIDE)
        if kept != sorted(
            ["latest", *(f"step-{step}" for step in range(last, 0, -INTERVAL)[:KEPT])]
        ):
            problems.append(f"left in {self.root}: {', '.join(kept)}")
        return problems


def _logged(key: str, folder: LocalPath) -> list[tuple[int, float]]:
    """Return the steps that have logged a number, a step twice if it was, each with it."""
    return [(each["step"], each[key]) for each in records(folder) if key in each]


def slow_save(seconds: float, timeout: float, folder: str) -> tuple[int, float]:
    """Train with a disk that takes longer for a save than training waits for its collectives."""
    argv = [*ARGV, "--checkpoint.async_mode=async", "--training.steps=4"]
    run = trainer([*argv, f"--comm.train_timeout_seconds={timeout:g}"], folder)
    slow = iter([True])

    def failpoint(name: str) -> None:
        if name == "half a file" and rank() == 1 and next(slow, False):
            time.sleep(seconds)

    with calling(failpoint), mock.patch.object(distributed, "WATCH_SECONDS", 0):
        run.train()
    saves = _logged("checkpoint_write_seconds", LocalPath(folder))
    return run.step, max(seconds for _, seconds in saves)


def memory_of_saves(saves: int, folder: str) -> list[float]:
    """Return this rank's memory in MiB after each of many consecutive async saves."""
    larger = [f"--model.overrides.{size}" for size in ("dim=256", "hidden_dim=1024", "n_layers=4")]
    argv = [*ARGV, *larger, "--checkpoint.interval=1", "--checkpoint.async_mode=async"]
    run = trainer([*argv, "--training.local_batch_size=1", f"--training.steps={saves}"], folder)
    record_success, sizes = run.saver._record_success, []
    libc = ctypes.CDLL(None)

    def noted(pending: Any) -> None:
        record_success(pending)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # glibc keeps more freed blocks, by turns, than a save would leak
        pages = int(LocalPath("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    run.saver._record_success = noted  # type: ignore[method-assign]
    run.train()
    return sizes
