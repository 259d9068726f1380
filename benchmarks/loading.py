"""Compare the loader's speed on memory-mapped shards with a plain numpy gather of the same windows.

    python benchmarks/loading.py [--rounds 7] [--seq 2048] [--json FILE]

Each round times the plain gather (one copy of each window, in the same order, in this thread), then
the trainer's loader: in this thread, and with 0, 1 and 2 workers prefetched by another thread, as
in training. Nothing else runs meanwhile, so the time to hand over a batch counts fully. Prints
ratios of medians; the start of workers is excluded."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.harness import keep, ratio  # noqa: E402
from titanlite.config.schema import Dataloader  # noqa: E402
from titanlite.data.foreign import list_tokens, token_files  # noqa: E402
from titanlite.data.loader import BatchPrefetcher, build_loader  # noqa: E402
from titanlite.data.packing import Concatenated  # noqa: E402
from titanlite.data.shards import ShardSource  # noqa: E402
from titanlite.data.shuffle import RankSlice, SampleOrder  # noqa: E402
from titanlite.data.windows import Windows  # noqa: E402

VOCAB, TOKENS, BATCH = 50257, 1 << 25, 8
WORKERS = {
    "alone": 0,
    "read ahead, 0 workers": 0,
    "read ahead, 1 worker": 1,
    "read ahead, 2 workers": 2,
}
WARM_UP, MEASURED = 40, 200
"""Numbers of batches: before the clock starts, and timed."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gathered, loaded = list[float](), {case: list[float]() for case in WORKERS}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokens = np.random.default_rng(0).integers(VOCAB, size=TOKENS, dtype=np.uint16)
        np.save(f"{folder}/0.npy", tokens)
        files = token_files("bench", f"{folder}/0.npy", "int64")
        list_tokens({"bench": files}, "int64", -1, Path(folder) / "listed")
        source = ShardSource(Path(folder) / "listed", VOCAB)
        data = Windows(
            [Concatenated(source, arguments.seq, False, "bench")], arguments.seq, 0, repeat=True
        )
        for _ in range(arguments.rounds):
            gathered.append(_time_gather(Path(folder) / "0.npy", arguments.seq))
            for case, workers in WORKERS.items():
                loaded[case].append(_time_loader(data, workers, case != "alone"))
    rate = MEASURED * BATCH * arguments.seq / np.median(gathered) / 1e6
    print(
        f"plain gather of {BATCH} windows of {arguments.seq} at a time: "
        f"{rate:.0f} million tokens a second; of that"
    )
    results = {}
    for case, seconds in loaded.items():
        speed = ratio(gathered, seconds)
        print(f"  the loader, {case:<22} {speed}")
        results[case] = {"of_bare_gather": speed.middle, "low": speed.low, "high": speed.high}
    if arguments.json:
        keep(arguments.json, results)


def _time_gather(path: Path, seq: int) -> float:
    """Return the seconds to gather inputs and labels of each window, as a model takes them."""
    tokens, order = np.load(path, mmap_mode="r"), SampleOrder((TOKENS - 1) // seq, 0)
    starts = np.array([order(number) * seq for number in range((WARM_UP + MEASURED) * BATCH)])
    start_time = 0.0
    for batch, first in enumerate(range(0, len(starts), BATCH)):
        if batch == WARM_UP:
            start_time = time.perf_counter()
        rows = np.empty((BATCH, 2, seq), np.int64)
        for row, start in zip(rows, starts[first : first + BATCH], strict=True):
            row[0], row[1] = tokens[start : start + seq], tokens[start + 1 : start + seq + 1]
        torch.from_numpy(rows)
    return time.perf_counter() - start_time


def _time_loader(data: Windows, workers: int, prefetch: bool) -> float:
    loader = build_loader(
        data, RankSlice(0, 1, BATCH), 0, WARM_UP + MEASURED, Dataloader(num_workers=workers)
    )
    with (
        closing(BatchPrefetcher(loader, torch.device("cpu")))
        if prefetch
        else nullcontext(iter(loader)) as batches
    ):
        for _ in islice(batches, WARM_UP):
            pass
        start_time = time.perf_counter()
        assert sum(1 for _ in batches) == MEASURED
        return time.perf_counter() - start_time


if __name__ == "__main__":
    main()
