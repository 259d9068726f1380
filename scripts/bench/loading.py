"""How fast shuffled windows come from memory-mapped shards, beside a bare numpy gather of the same windows.

    python scripts/bench/loading.py [--rounds 7] [--seq 2048] [--json benchmarks/cpu.json]

Rounds take turns: the bare gather (one copy of each window, in the same order, in this thread), then the trainer's
loader, alone in this thread, and with 0, 1 and 2 workers read ahead by another thread, as training reads it. There
nothing else happens meanwhile, so that handing over a batch counts in full. Ratios of medians; a worker's start is
not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from scripts.bench.ratios import keep, ratio  # noqa: E402
from titanlite.config.schema import Dataloader  # noqa: E402
from titanlite.data.loader import BatchPrefetcher, build_loader  # noqa: E402
from titanlite.data.packing import Concatenated  # noqa: E402
from titanlite.data.shards import ShardSource  # noqa: E402
from titanlite.data.shuffle import Order, RankSlice  # noqa: E402
from titanlite.data.windows import Windows  # noqa: E402

VOCAB, TOKENS, BATCH = 50257, 1 << 25, 8
WAYS = {"alone": 0, "read ahead, 0 workers": 0, "read ahead, 1 worker": 1, "read ahead, 2 workers": 2}
WARM_UP, MEASURED = 40, 200
"""Batches: a worker's start and its first ones, and those that count."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    bare, loaded = list[float](), {way: list[float]() for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokens = np.random.default_rng(0).integers(VOCAB, size=TOKENS, dtype=np.uint16)
        np.save(f"{folder}/0.npy", tokens)
        source = ShardSource("bench", Path(folder), VOCAB, end=-1)
        data = Windows([Concatenated(source, asked.seq, False, "bench")], asked.seq, 0, repeat=True)
        for _ in range(asked.rounds):
            bare.append(_bare(Path(folder) / "0.npy", asked.seq))
            for way, workers in WAYS.items():
                loaded[way].append(_loaded(data, workers, way != "alone"))
    rate = MEASURED * BATCH * asked.seq / np.median(bare) / 1e6
    print(f"bare gather: {rate:.0f} million tokens per second, {BATCH} windows of {asked.seq} at a time; of that")
    found = {}
    for way, seconds in loaded.items():
        speed = ratio(bare, seconds)
        print(f"  the loader, {way:<22} {speed}")
        found[way] = {"of_bare_gather": speed.middle, "low": speed.low, "high": speed.high}
    if asked.json:
        keep(asked.json, "loading", found)


def _bare(path: Path, seq: int) -> float:
    """Inputs and labels of each window, as a model takes them."""
    tokens, order = np.load(path, mmap_mode="r"), Order((TOKENS - 1) // seq, 0)
    starts = np.array([order(number) * seq for number in range((WARM_UP + MEASURED) * BATCH)])
    began = 0.0
    for batch, first in enumerate(range(0, len(starts), BATCH)):
        if batch == WARM_UP:
            began = time.perf_counter()
        rows = np.empty((BATCH, 2, seq), np.int64)
        for row, start in zip(rows, starts[first : first + BATCH], strict=True):
            row[0], row[1] = tokens[start : start + seq], tokens[start + 1 : start + seq + 1]
        torch.from_numpy(rows)
    return time.perf_counter() - began


def _loaded(data: Windows, workers: int, ahead: bool) -> float:
    loader = build_loader(data, RankSlice(0, 1, BATCH), 0, WARM_UP + MEASURED, Dataloader(num_workers=workers))
    with closing(BatchPrefetcher(loader, torch.device("cpu"))) if ahead else nullcontext(iter(loader)) as batches:
        for _ in islice(batches, WARM_UP):
            pass
        began = time.perf_counter()
        assert sum(1 for _ in batches) == MEASURED
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
