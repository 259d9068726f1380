"""A step beside the bookkeeping of a save: python benchmarks/scale/beside.py [--pairs 200]

Rank 0's work for the tensors of Llama 405B with AdamW on 512 ranks, all of it but the network and
its own bytes, runs in a thread, as in a save, while the main thread takes a step; every other step
is without. Prints the ratio of steps by the clock, and the seconds of the bookkeeping by itself."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from benchmarks.ratios import ratio  # noqa: E402
from benchmarks.usual import BATCH, SEQ, SIZES, build  # noqa: E402
from models.llama3 import FLAVORS  # noqa: E402
from tests.checkpoint.test_places import large  # noqa: E402
from titanlite.checkpoint.manifest import File, Manifest  # noqa: E402
from titanlite.checkpoint.places import header, rank_file, spread, written_by  # noqa: E402

SHARDS, TP = 64, 8


def bookkeeping(tensors: dict[str, Any]) -> None:
    """What rank 0 does in a save for the other ranks, and the plan of its own file."""
    shared = pickle.loads(pickle.dumps([spread(tensors)]))[0]
    header(shared, written_by(0, shared))
    files = {rank_file(rank): File(1 << 32, 1 << 31) for rank in range(SHARDS * TP)}
    Manifest(1, False, files, shared).render()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    (tensors,) = large(SHARDS, TP, 1)
    flavor: Any = dataclasses.replace(FLAVORS["debugmodel"], **SIZES)
    model = build("llama3")(flavor, SEQ)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (BATCH, SEQ))

    def step() -> float:
        began = time.perf_counter()
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    began = time.perf_counter()
    bookkeeping(tensors)
    alone = time.perf_counter() - began
    for _ in range(3):
        step()
    beside, without = list[float](), list[float]()
    for _ in range(pairs):
        thread = threading.Thread(target=bookkeeping, args=(tensors,))
        thread.start()
        beside.append(step())
        thread.join()
        without.append(step())
    middle = sorted(without)[pairs // 2]
    share = ratio(beside, without)
    print(f"bookkeeping: {1e3 * alone:.0f} ms by itself")
    print(f"a step of {1e3 * middle:.0f} ms beside it takes {share} of one without")


if __name__ == "__main__":
    main()
