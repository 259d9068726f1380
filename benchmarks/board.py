"""The launchers' board with simulated nodes: seconds from a request, or a failure, until all nodes
have the decision.

    python benchmarks/board.py [--nodes 64 512 2048] [--ranks 8] [--clients 4] [--json FILE]

Node 0 is real: its store, its thread, its decisions over the statuses of all. The other nodes are
the real exchanges of a board, made in turn by a few processes with a connection each; a cluster
would give each node a machine. So what is measured is node 0 and its store, and the simulation's
own time is in it. Printed beside the seconds: how long one round of all exchanges takes, which is
EXCHANGE_SECONDS where the machine keeps up."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist  # noqa: E402

from titanlite.config.schema import JobConfig  # noqa: E402
from titanlite.errors import FAILED  # noqa: E402
from titanlite.fault.board import EXCHANGE_SECONDS, Board, Link, open_board  # noqa: E402
from titanlite.fault.decide import Decider, Restarts  # noqa: E402
from titanlite.fault.status import Beat, Ended, Failure, Status  # noqa: E402

LIMIT_SECONDS = 120


class Direct(Link):
    """A connection without time limits, which simulated nodes share."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._direct = store

    def ask(self, operation: Callable[[dist.Store], Any], seconds: float) -> Any:
        return operation(self._direct)


def with_beats(node: int, ranks: int) -> Callable[[Status], Status]:
    """Return the function that adds the beats of a node's ranks, which move on all the time."""
    places = range(node * ranks, (node + 1) * ranks)

    def look(status: Status) -> Status:
        beat = Beat(
            status.count,
            "forward",
            status.count,
            0.1,
            300.0,
            "comm.train_timeout_seconds",
            1,
            f"node{node}",
        )
        return replace(status, beats=dict.fromkeys(places, beat))

    return look


def simulate(port: int, nodes: range, count: int, ranks: int, pipe: Any) -> None:
    """Be nodes until the run ends: answer each request on the pipe with the time at which all had
    its decision.
    """
    store = dist.TCPStore(
        "localhost", port, is_master=False, timeout=timedelta(seconds=LIMIT_SECONDS)
    )
    boards = []
    for node in nodes:
        own = Status(processes=ranks)
        boards.append(Board(Direct(store), node, count, own, with_beats(node, ranks), dict))
    wanted, waiting = "members", {*range(len(boards))}
    while True:
        began = time.monotonic()
        for at, board in enumerate(boards):
            board.exchange()
            if wanted == "verdict" and board.decision.failed and board.own.ended is None:
                board.put(ended=Ended(over=True))
            if getattr(board.decision, wanted, None):
                waiting.discard(at)
        if not waiting:
            pipe.send((time.monotonic(), time.monotonic() - began))
            waiting = {-1}  # for the next request
        if pipe.poll(max(0.0, EXCHANGE_SECONDS - (time.monotonic() - began))):
            wanted, change = pipe.recv()
            if not wanted:
                return
            waiting = {*range(len(boards))}
            if change:
                boards[-1].put(**change)


def measure(count: int, ranks: int, clients: int) -> dict[str, float]:
    """Return the seconds of each event with so many nodes, and the longest round of the
    simulation.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    decider = Decider(JobConfig(), count, time.monotonic(), Restarts())
    open_board(store, count)
    own = Status(processes=ranks)
    board = Board(Direct(store), 0, count, own, with_beats(0, ranks), dict, decider.look)
    context = get_context("spawn")
    pipes, processes = [], []
    for client in range(clients):
        nodes = range(
            1 + client * (count - 1) // clients, 1 + (client + 1) * (count - 1) // clients
        )
        ours, theirs = context.Pipe()
        process = context.Process(
            target=simulate, args=(store.port, nodes, count, ranks, theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    board.start()
    rounds: list[float] = []

    def all_have(began: float) -> float:
        answers = [pipe.recv() for pipe in pipes]
        rounds.extend(seconds for _, seconds in answers)
        return max(at for at, _ in answers) - began

    all_have(0.0)
    found = {}
    failure = Failure(
        count * ranks - 1, "here", time.time(), None, "killed", "killed", FAILED, known=False
    )
    for name, wanted, change in (
        ("request to stop", "stop", {"stop": "SIGTERM to rank 1"}),
        ("failure to the end of all workers", "failed", {"ended": Ended(failure, over=True)}),
        ("end of the workers to the verdict", "verdict", None),
    ):
        time.sleep(3 * EXCHANGE_SECONDS)
        began = time.monotonic()
        for number, pipe in enumerate(pipes):
            pipe.send((wanted, change if number == len(pipes) - 1 else None))
        if wanted == "verdict":
            board.put(ended=Ended(over=True))
        found[name] = round(all_have(began), 2)
    for pipe in pipes:
        pipe.send(("", None))
    board.end()
    for process in processes:
        process.join()
    return {**found, "longest round": round(max(rounds), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--clients", type=int, default=4, help="processes that simulate nodes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for count in options.nodes:
        results[count] = measure(count, options.ranks, options.clients)
        print(
            f"{count} nodes x {options.ranks} ranks:",
            ", ".join(f"{k} {v} s" for k, v in results[count].items()),
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
