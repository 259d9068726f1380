"""Batches of one rank, in the job's order, read ahead of the step that needs them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Windows as they were read, (batch, rows, tokens): one copy takes them to the device."""

    rows: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(self.rows.to(device, non_blocking=True))

    @property
    def tokens(self) -> torch.Tensor:
        return self.rows[:, 0]

    @property
    def labels(self) -> torch.Tensor:
        """The next tokens, or IGNORED."""
        return self.rows[:, 1]

    @property
    def documents(self) -> torch.Tensor | None:
        """Under a document mask, the number of each token's document."""
        return self.rows[:, 2] if self.rows.size(1) > 2 else None

    @property
    def positions(self) -> torch.Tensor | None:
        """Under a document mask, each token's position in its document."""
        return self.rows[:, 3] if self.rows.size(1) > 2 else None


@dataclass(frozen=True)
class IndexSampler:
    """Sample numbers of every micro-batch of one rank, from the sample where the job stands."""

    share: RankSlice
    consumed: int
    steps: int | None

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        while self.steps is None or step < self.steps:
            first = self.consumed + step * self.share.per_step
            for number in range(self.share.accumulation):
                yield list(self.share.micro_batch(first, number))
            step += 1


def build_loader(
    data: Windows | Stream, share: RankSlice, consumed: int, steps: int | None, settings: Dataloader
) -> Loader:
    """Micro-batches from sample `consumed` on, for `steps` steps or as long as the data lasts.

    A stream knows no sample numbers: it begins at its beginning, or from a state that its loader is given.
    """
    options: dict[str, Any] = {"collate_fn": np.asarray}  # a batch as it is, or windows put together
    if settings.num_workers:
        # Not fork: a child forked after a backward pass hangs in torch.
        context = get_context("forkserver")
        context.set_forkserver_preload(["titanlite.data.loader"])
        options |= {
            "num_workers": settings.num_workers,
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": context,
            "worker_init_fn": _leave_with_parent,
        }
    # torchdata 0.11 calls what torch 2.13 deprecates
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    if isinstance(data, Stream):
        return StreamLoader(data, share, None if steps is None else steps * share.accumulation, options)
    if settings.num_workers:
        options["snapshot_every_n_steps"] = 1 << 30  # the position is the trainer's count, not the loader's state
    left = data.steps_left(consumed, share.per_step)
    steps = left if steps is None else steps if left is None else min(steps, left)
    return StatefulDataLoader(data, batch_sampler=IndexSampler(share, consumed, steps), **options)


def _leave_with_parent(_: int) -> None:
    """End this worker when its rank is gone, however it went: torch's own watchdog looks at the fork server."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class BatchPrefetcher:
    """Reads a loader once, in a thread: the next batch is ready, and pinned for a GPU, before it is asked for."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.state: dict[str, Any] | None = None
        """Of a stream: its state after the batch that was asked for last, however far it was read ahead."""
        self._pin = device.type == "cuda"
        self._ahead = Prefetcher(self._read(), depth=2)

    def _read(self) -> Iterator[tuple[MicroBatch, dict[str, Any] | None]]:
        streamed = isinstance(self.loader, StreamLoader)
        for batch in self.loader:
            tensor = torch.as_tensor(batch)
            state = self.loader.state_dict() if streamed else None
            yield MicroBatch(tensor.pin_memory() if self._pin else tensor), state

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch, self.state = next(self._ahead)
        return batch

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._ahead.close()
