"""Measure what grows with the number of ranks: python benchmarks/scale.py [--quick] [--json FILE]

Each row runs the code of a real run on synthetic data of many ranks, and measures processor seconds
of one thread. Networks, GPUs and shared file systems are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.harness import keep  # noqa: E402
from tests.checkpoint.test_stored_tensors import large  # noqa: E402
from titanlite.checkpoint.manifest import MANIFEST, File, Manifest, read_manifest  # noqa: E402
from titanlite.checkpoint.stored_tensors import spread, tensor_file  # noqa: E402
from titanlite.config.schema import JobConfig  # noqa: E402
from titanlite.data.mixture import Mixture  # noqa: E402
from titanlite.data.shards import ShardSource  # noqa: E402
from titanlite.errors import format_table  # noqa: E402
from titanlite.fault.beat import LOOK_SECONDS  # noqa: E402
from titanlite.fault.board import EXCHANGE_SECONDS, Board, Link, open_board  # noqa: E402
from titanlite.fault.decide import Decider, Restarts  # noqa: E402
from titanlite.fault.inspection import POLL_SECONDS  # noqa: E402
from titanlite.fault.status import Beat, Status, dump  # noqa: E402
from titanlite.optim.muon import Spread, _plan  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402

RANKS = (64, 512, 4096, 16_384, 98_304)
A_NODE = 8


def processor_seconds(action: Callable[[], Any]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def muon(ranks: int) -> dict[str, float]:
    """A rank's plan of the 882 matrices of 405B, sharded over all ranks."""
    shapes = [(16384, 16384), (1024, 16384), (1024, 16384), (16384, 16384)]
    shapes += [(53248, 16384), (53248, 16384), (16384, 53248)]
    holders: dict[tuple[int, ...], list[int]] = {(rank,): [rank] for rank in range(ranks)}

    class Rows(Spread):
        def box(self, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
            rows = -(-self.weight.shape[0] // ranks)
            start = min(coordinate[0] * rows, self.weight.shape[0])
            return slice(start, min(start + rows, self.weight.shape[0])), slice(0, 1)

    spreads = [Rows(torch.empty(s, device="meta"), 0, holders, (0,)) for s in shapes] * 126
    return {"Muon: a rank's plan, 405B, s": processor_seconds(lambda: _plan(spreads, 0, ranks))}


def board(ranks: int) -> dict[str, float]:
    """Node 0 reads the statuses of all nodes and decides; another node posts its own."""
    nodes = ranks // A_NODE
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    open_board(store, nodes)
    config = JobConfig()

    def status(node: int) -> Status:
        first = node * A_NODE
        beats = {
            rank: Beat(7, "forward", 70, 0.5, 100, "comm.train_timeout_seconds", 1, f"{node}", 6)
            for rank in range(first, first + A_NODE)
        }
        return Status(count=1, processes=A_NODE, beats=beats)

    for node in range(nodes):
        store.set(f"status/{node}", dump(status(node)))
    decider = Decider(config, nodes, 0.0, Restarts())
    link = Link("127.0.0.1", store.port, store=store)
    first = Board(link, 0, nodes, status(0), lambda own: own, dict, decider.look)
    first.exchange()  # begins the attempt
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        first.exchange()
        seconds.append(time.perf_counter() - began)
    other = Board(link, 1, nodes, status(1), lambda own: own, dict)
    other.exchange()
    operations = Counting(store)
    other._show(operations, status(1))  # type: ignore[arg-type]
    exchange = min(seconds)
    # A launcher posts it, node 0 reads it in its next exchange, and another launcher reads the
    # decision.
    worst = 3 * EXCHANGE_SECONDS + 2 * exchange + POLL_SECONDS + LOOK_SECONDS
    return {
        "control plane: node 0's exchange, s": exchange,
        "control plane: a stop is at every rank, at worst, s": worst,
        "control plane: operations of another node's exchange": operations.count,
    }


class Counting:
    """A store that counts the operations on it."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        return getattr(self._store, name)


def replicas(ranks: int) -> dict[str, float]:
    """By count, which tests/parallel/test_replica_check.py checks."""
    return {"replicas: bytes of a rank (405B, HSDP or TP: 4,548 tensors)": 2 * 16 * 4548}


def checkpoint(ranks: int) -> dict[str, float]:
    """The manifest of 405B with AdamW, made by rank 0 and read by any rank."""
    tensors = large(ranks // A_NODE, A_NODE)
    files = {tensor_file(rank): File(1 << 32, 1 << 31) for rank in range(ranks)}

    def make() -> None:
        manifest = Manifest(1, False, files, {**spread(tensors)})
        (folder / MANIFEST).write_bytes(manifest.render())

    with TemporaryDirectory() as name:
        folder = LocalPath(name)
        return {
            "checkpoint: rank 0 makes the manifest, 405B, s": processor_seconds(make),
            "checkpoint: the manifest, bytes": (folder / MANIFEST).stat().st_size,
            "checkpoint: reading it, s": processor_seconds(lambda: read_manifest(folder)),
        }


def shards(ranks: int) -> dict[str, float]:
    """A source that lists as many shards as there are ranks."""
    listed = [{"file": f"tokens-{number:06}.bin", "tokens": 1 << 30} for number in range(ranks)]
    document = {
        "fingerprint": "x",
        "content": "x",
        "state": "",
        "tokens": ranks << 30,
        "documents": 1,
        "end": 9,
        "vocab_size": 1 << 17,
        "shards": listed,
    }
    with TemporaryDirectory() as name:
        Path(name, MANIFEST).write_text(json.dumps(document))
        path = Path(name)
        opening = processor_seconds(lambda: ShardSource(path, 1 << 17))
    return {"data: as many shards as ranks are opened, s": opening}


def mixture(ranks: int) -> dict[str, float]:
    weights = [0.02] * 48 + [0.0199, 0.0201]
    return {"data: a mixture of 50 sources, s": processor_seconds(lambda: Mixture((*weights,)))}


LAWS = (muon, board, replicas, checkpoint, shards, mixture)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the two smallest")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = RANKS[:2] if arguments.quick else RANKS
    found: dict[str, dict[int, float]] = {}
    for law in LAWS:
        for ranks in sizes:
            for name, value in law(ranks).items():
                found.setdefault(name, {})[ranks] = value
    rows = [
        (name, *(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in points.values()))
        for name, points in found.items()
    ]
    print(format_table(rows, ("law", *(f"{ranks:,}" for ranks in sizes)), "<" + ">" * len(sizes)))
    if arguments.json:
        laws = {name: [*points.values()] for name, points in found.items()}
        keep(arguments.json, {"ranks": [*sizes], "laws": laws})


if __name__ == "__main__":
    main()
