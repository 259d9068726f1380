"""Load the micro-batches of one rank in the job's order, ahead of the step that needs them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.schema import Dataloader
from titanlite.data.prefetch import Prefetcher
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.windows import Windows

Loader = StatefulDataLoader | StreamLoader


@dataclass(frozen=True)
class MicroBatch:
    """A batch of windows as one tensor (batch, rows, tokens), so that one copy takes it to the device."""

    rows: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(self.rows.to(device, non_blocking=True))

    @property
    def tokens(self) -> torch.Tensor:
        return self.rows[:, 0]

    @property
    def labels(self) -> torch.Tensor:
        """The next token of each token, or IGNORED."""
        return self.rows[:, 1]

    @property
    def documents(self) -> torch.Tensor | None:
        """The number of each token's document, if there is a document mask."""
        return self.rows[:, 2] if self.rows.size(1) > 2 else None

    @property
    def positions(self) -> torch.Tensor | None:
        """Each token's position in its document, if there is a document mask."""
        return self.rows[:, 3] if self.rows.size(1) > 2 else None


@dataclass(frozen=True)
class IndexSampler:
    """The sample indices of every micro-batch of one rank, from sample `consumed` of the job on."""

    rank_slice: RankSlice
    consumed: int
    steps: int | None

    def __iter__(self) -> Iterator[list[int]]:
        for step in count() if self.steps is None else range(self.steps):
            first = self.consumed + step * self.rank_slice.per_step
            for number in range(self.rank_slice.accumulation):
                yield list(self.rank_slice.micro_batch(first, number))


def build_loader(
    data: Windows | Stream, rank_slice: RankSlice, consumed: int, steps: int | None, settings: Dataloader
) -> Loader:
    """Load micro-batches from sample `consumed` on, for `steps` steps or as long as the data lasts.

    A stream has no sample numbers: it starts from its beginning, or from the state that its loader loads.
    """
    options: dict[str, Any] = {"collate_fn": np.asarray}  # keeps a batch as it is, and stacks a stream's windows
    if settings.num_workers:
        # A child forked after a backward pass hangs in torch.
        context = get_context("forkserver")
        context.set_forkserver_preload(["titanlite.data.loader"])
        options |= {
            "num_workers": settings.num_workers,
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": context,
            "worker_init_fn": _exit_with_parent,
        }
    # torchdata 0.11 calls what torch 2.13 deprecates
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    if isinstance(data, Stream):
        micro_batches = None if steps is None else steps * rank_slice.accumulation
        return StreamLoader(data, rank_slice, micro_batches, options)
    if settings.num_workers:
        options["snapshot_every_n_steps"] = 1 << 30  # the trainer counts the samples itself
    left = data.steps_left(consumed, rank_slice.per_step)
    steps = left if steps is None else steps if left is None else min(steps, left)
    return StatefulDataLoader(data, batch_sampler=IndexSampler(rank_slice, consumed, steps), **options)


def _exit_with_parent(_: int) -> None:
    """End this worker when its rank dies in any way; torch's own watchdog watches the fork server instead."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class BatchPrefetcher:
    """Iterate over a loader once, in a thread that reads the next batches and pins them for a GPU."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.state: dict[str, Any] | None = None
        """The state of a stream after the batch returned last, however far the thread has read ahead."""
        self._pin = device.type == "cuda"
        self._prefetcher = Prefetcher(self._read(), depth=2)

    def _read(self) -> Iterator[tuple[MicroBatch, dict[str, Any] | None]]:
        streamed = isinstance(self.loader, StreamLoader)
        for batch in self.loader:
            tensor = torch.as_tensor(batch)
            state = self.loader.state_dict() if streamed else None
            yield MicroBatch(tensor.pin_memory() if self._pin else tensor), state

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch, self.state = next(self._prefetcher)
        return batch

    def close(self) -> None:
        """Stop reading; may be called more than once."""
        self._prefetcher.close()
