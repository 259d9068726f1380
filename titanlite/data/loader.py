"""Load the micro-batches of one rank in the job's order, ahead of the step that needs them."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.schema import Dataloader
from titanlite.data.packing import DOCUMENTS, LABELS, POSITIONS, TOKENS
from titanlite.data.prefetch import Prefetcher
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.windows import Windows
from titanlite.runtime.parent import exit_with_parent

Loader = StatefulDataLoader | StreamLoader


@dataclass(frozen=True)
class MicroBatch:
    """A batch of windows as one tensor (batch, rows, tokens): one copy moves it to the device.

    The rows are tokens, labels (the next token or IGNORED), and under a document mask documents and
    positions.
    """

    rows: torch.Tensor
    own_positions: torch.Tensor | None = None
    """The token positions of this rank under context parallel; None for all."""

    def to(self, device: torch.device, own_positions: torch.Tensor | None = None) -> "MicroBatch":
        """Return the batch on the device, with the tokens at `own_positions` as this rank's own."""
        return MicroBatch(self.rows.to(device, non_blocking=True), own_positions)

    def split(self, size: int) -> "list[MicroBatch]":
        """Return batches of `size` windows each."""
        return [MicroBatch(rows, self.own_positions) for rows in self.rows.split(size)]

    @property
    def tokens(self) -> torch.Tensor:
        return self._own(TOKENS)

    @property
    def labels(self) -> torch.Tensor:
        return self._own(LABELS)

    @property
    def documents(self) -> torch.Tensor | None:
        """The documents of all tokens, including other ranks', which masks need."""
        if self.rows.size(1) > 2:
            return self.rows[:, DOCUMENTS]
        return None

    @property
    def positions(self) -> torch.Tensor | None:
        if self.rows.size(1) > 2:
            return self._own(POSITIONS)
        if self.own_positions is None:
            return None
        return self.own_positions.expand(len(self.rows), -1)

    def _own(self, row: int) -> torch.Tensor:
        if self.own_positions is None:
            return self.rows[:, row]
        return self.rows[:, row, self.own_positions]


@dataclass(frozen=True)
class IndexSampler:
    """The sample indices of every micro-batch of one rank, from sample `consumed` of the job on."""

    rank_slice: RankSlice
    consumed: int
    steps: int | None

    def __iter__(self) -> Iterator[list[int]]:
        steps = count() if self.steps is None else range(self.steps)
        for step in steps:
            first = self.consumed + step * self.rank_slice.per_step
            for number in range(self.rank_slice.accumulation):
                yield list(self.rank_slice.micro_batch(first, number))


def build_loader(
    data: Windows | Stream,
    rank_slice: RankSlice,
    consumed: int,
    steps: int | None,
    settings: Dataloader,
) -> Loader:
    """Load micro-batches from sample `consumed` on, for `steps` steps or as long as the data lasts.

    A stream has no sample numbers: it starts from its beginning, or from the state that its loader
    loads.
    """
    options: dict[str, Any] = {}
    options["collate_fn"] = np.asarray  # keeps a batch as it is, and stacks a stream's windows
    if settings.num_workers:
        context = get_context("forkserver")  # a child forked after a backward pass hangs in torch
        context.set_forkserver_preload(["titanlite.data.loader"])
        options["num_workers"] = settings.num_workers
        options["prefetch_factor"] = settings.prefetch_factor
        options["persistent_workers"] = settings.persistent_workers
        options["multiprocessing_context"] = context
        options["worker_init_fn"] = exit_with_parent
    # torchdata 0.11 calls this deprecated function.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    if isinstance(data, Stream):
        micro_batches = None if steps is None else steps * rank_slice.accumulation
        return StreamLoader(data, rank_slice, micro_batches, options)
    options["snapshot_every_n_steps"] = 1 << 30  # the trainer counts the samples itself
    if not data.repeat:
        left = max(0, math.ceil((data.samples - consumed) / rank_slice.per_step))
        steps = left if steps is None else min(steps, left)
    sampler = IndexSampler(rank_slice, consumed, steps)
    return StatefulDataLoader(data, batch_sampler=sampler, **options)


class BatchPrefetcher:
    """Iterate over a loader once, in a thread that reads the next batches and pins them."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.state: dict[str, Any] | None = None
        """A stream's state after the last returned batch, ignoring those read ahead."""
        self._prefetcher = Prefetcher(_read(loader, pin=device.type == "cuda"), depth=2)
        self.close = self._prefetcher.close

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch, self.state = next(self._prefetcher)
        return batch


def _read(loader: Loader, pin: bool) -> Iterator[tuple[MicroBatch, dict[str, Any] | None]]:
    """Yield each batch, together with a stream's state."""
    for batch in loader:
        rows = torch.as_tensor(batch)
        if pin:
            rows = rows.pin_memory()
        state = loader.state_dict() if isinstance(loader, StreamLoader) else None
        yield MicroBatch(rows), state
