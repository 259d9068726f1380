"""Watch for a hang of the ranks from each launcher: a rank that is stopped, or keeps the GIL, could not do so."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from titanlite.fault.hang import GATHER_SECONDS, HangWatch, beat_interval
from titanlite.fault.inspection import RankProcess, wait_until
from titanlite.fault.stall import Stalled
from titanlite.launch.attempts import Attempt
from titanlite.launch.rendezvous import NodeRendezvous
from titanlite.launch.workers import kill_group
from titanlite.runtime.distributed import attempt_store
from titanlite.runtime.page import read_pages
from titanlite.runtime.rank_files import PAGE, STACK, rank_file


class Watch:
    """Inside `with`, if the run hangs, `Stalled` ends this node's workers, with the report. The thread that watches
    goes on until the attempt is over on all nodes: node 0 judges, and its ranks may be done."""

    def __init__(self, attempt: Attempt, rendezvous: NodeRendezvous, private: Path) -> None:
        self._attempt, self._rendezvous, self._private = attempt, rendezvous, private
        self._watch: HangWatch | None = None
        self._report = ""

    def __enter__(self) -> Watch:
        self._rendezvous.on_poll.append(self._raise_if_hung)
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rendezvous.on_poll.remove(self._raise_if_hung)

    def _run(self) -> None:
        name, world, ranks = str(self._attempt.number), self._attempt.world, self._attempt.ranks
        with suppress(dist.DistError, RuntimeError):  # node 0's launcher has ended
            store = attempt_store(self._rendezvous.connect_again(), name)
            node, nodes = ranks.start // len(ranks), world // len(ranks)
            watch = self._watch = HangWatch(store, self._attempt.config, world, nodes, node, self._processes, name)
            while not (self._report or self._rendezvous.is_over(self._attempt.number)):
                self._report = watch.look()
                time.sleep(beat_interval(world))

    def _processes(self) -> dict[int, RankProcess]:
        """Return the processes of this node that are ready to be asked."""
        return {
            rank: RankProcess(page.pid, rank_file(self._private, rank, STACK), rank_file(self._private, rank, PAGE))
            for rank, page in read_pages(self._private).items()
            if _leads_session(page.pid)
        }

    def found(self) -> Stalled | None:
        """Return the hang that was found before the workers ended, with its report."""
        if self._watch and self._watch.is_hung:
            wait_until(lambda: bool(self._report), 3 * GATHER_SECONDS)
        return Stalled(self._report, time.time()) if self._report else None

    def _raise_if_hung(self) -> None:
        """Kill the workers first: one that is stopped hears nothing else, and others take SIGTERM for a request to
        save and stop."""
        if self._report:
            now = time.time()
            for pid, *_ in self._processes().values():
                kill_group(pid)
            raise Stalled(self._report, now)


def _leads_session(pid: int) -> bool:
    """Return whether this is still a worker, which leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid) == pid
    return False
