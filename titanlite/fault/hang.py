"""Watch the ranks' beats in the store, and when the run hangs gather a stack of every rank into one report.

Every launcher watches for its node's ranks. Without launchers every rank does so for itself: its thread that beats.
Number 0 of the watchers judges and writes the report; the others look at their processes when it says so.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.fault.inspection import RankProcess, inspect, wait_until
from titanlite.fault.stall import Hang, Inspection, Judge, report

HANG, REPORT = "hang", "hang/report"
"""Keys of the attempt's store: that the run hangs, and what was found."""
GATHER_SECONDS = 8
"""How long node 0 waits for what the others found."""


def beat_key(rank: int) -> str:
    """Return the key of a rank's beat in the store of its attempt."""
    return f"beat/{rank}"


def beat_interval(world: int) -> float:
    """Return the seconds between two beats of a rank: the store takes some 500 of them a second."""
    return max(1.0, world / 512)


class HangWatch:
    """One of the watchers. `processes` returns, by rank, those it can ask."""

    def __init__(
        self,
        store: dist.Store,
        config: JobConfig,
        world: int,
        watchers: int,
        number: int,
        processes: Callable[[], Mapping[int, RankProcess]],
        name: str,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store, self._watchers, self._number, self._processes = store, watchers, number, processes
        self._say = say
        self._file = Path(config.job.dump_folder, "logs", f"hang-{name}.txt")
        self._unheard, self._heard = set(range(world)), []
        start = config.comm.init_timeout_seconds, "comm.init_timeout_seconds"
        self.is_hung = False
        """Known before the stacks are: a process may die when it is asked for its own."""
        self._judge = Judge(world, beat_interval(world), start, time.monotonic()) if number == 0 else None

    def look(self) -> str:
        """Return "" while the run moves. If it hangs, take what stacks this watcher can, and return the report."""
        hang = self._judge.look(self._beats(), time.monotonic()) if self._judge else None
        if hang:
            self._store.set(HANG, "")
        elif not self._store.check([HANG]):
            return ""
        self.is_hung = True
        self._store.set(f"{HANG}/{self._number}", json.dumps(inspect(self._processes())))
        if hang:
            text = self._gather(hang)
            self._say(f"titanlite: {text}")  # before the others end
            self._store.set(REPORT, text)
        else:
            wait_until(lambda: self._store.check([REPORT]), 2 * GATHER_SECONDS)
            time.sleep(0.5)  # or the ranks of node 0 could fail for the loss of these before they are ended
        return self._store.get(REPORT).decode() if self._store.check([REPORT]) else "the run hangs; see node 0"

    def _beats(self) -> dict[int, bytes]:
        """Return the beats of all ranks that were ever heard of; a store waits for keys that do not exist."""
        new = [rank for rank in self._unheard if self._store.check([beat_key(rank)])]
        self._unheard.difference_update(new)
        self._heard += new
        texts = self._store.multi_get([beat_key(rank) for rank in self._heard]) if self._heard else []
        return dict(zip(self._heard, texts, strict=True))

    def _gather(self, hang: Hang) -> str:
        """Return the report with what the watchers found, and write the longer one into its file."""
        keys = [f"{HANG}/{number}" for number in range(self._watchers)]
        wait_until(lambda: self._store.check(keys), GATHER_SECONDS)
        found: dict[int, Inspection] = {}
        for key in keys:
            if self._store.check([key]):
                found |= {int(rank): Inspection(*each) for rank, each in json.loads(self._store.get(key)).items()}
        hang = hang.inspected(found)
        with suppress(OSError):  # a full disk: the console still has it
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(report(hang, whole=True) + "\n", encoding="utf-8")
        return f"{report(hang)}\nall stacks: {self._file}"
