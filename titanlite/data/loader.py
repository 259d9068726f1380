"""Batches of one rank, in the job's order, read ahead of the step that needs them."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.schema import Dataloader
from titanlite.data.order import Order, Share
from titanlite.data.sources import Source
from titanlite.errors import UserError
from titanlite.loss import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and labels (batch, tokens); labels are the next tokens, and IGNORED where there are none."""

    tokens: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(self.tokens.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


class Windows(Dataset[np.ndarray]):
    """A source cut into windows of seq_len + 1 tokens, addressed by the job's sample number.

    Numbers beyond the end (without `repeat`, or the padding of an uneven validation) give windows whose labels
    are all ignored, so that every rank can take part in every batch.
    """

    def __init__(self, source: Source, seq_len: int, seed: int, repeat: bool, key: str) -> None:
        self.source, self.seq_len, self.repeat = source, seq_len, repeat
        self.samples = (source.tokens - 1) // seq_len
        if self.samples < 1:
            raise UserError(
                f"{key}: {source.tokens} tokens do not fill one window of {seq_len} tokens and a next one"
            )
        self.order = Order(self.samples, seed)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens in row 0, labels in row 1."""
        if not self.repeat and index >= self.samples:
            return np.stack([np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORED, np.int64)])
        window = self.source.read(self.order(index) * self.seq_len, self.seq_len + 1)
        return np.stack([window[:-1], window[1:]])

    def steps_left(self, consumed: int, per_step: int) -> int | None:
        """Steps that still have a sample; None for never-ending data."""
        return None if self.repeat else max(0, -(-(self.samples - consumed) // per_step))


@dataclass(frozen=True)
class IndexSampler:
    """Sample numbers of every micro-batch of one rank, from the sample where the job stands."""

    share: Share
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
    windows: Windows, share: Share, consumed: int, steps: int | None, settings: Dataloader
) -> StatefulDataLoader:
    """Micro-batches from sample `consumed` on, for `steps` steps or as long as the data lasts."""
    left = windows.steps_left(consumed, share.per_step)
    steps = left if steps is None else steps if left is None else min(steps, left)
    options: dict[str, Any] = {"collate_fn": np.stack}
    if settings.num_workers:
        # Not fork: a child forked after a backward pass hangs in torch.
        context = get_context("forkserver")
        context.set_forkserver_preload(["titanlite.data.loader"])
        options |= {
            "num_workers": settings.num_workers,
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": context,
            "snapshot_every_n_steps": 1 << 30,  # the position is the trainer's count, not the loader's state
        }
    # torchdata 0.11 calls what torch 2.13 deprecates
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    return StatefulDataLoader(windows, batch_sampler=IndexSampler(share, consumed, steps), **options)


class Ahead:
    """Reads a loader once, in a thread: the next batch is ready, and pinned for a GPU, before it is asked for."""

    def __init__(self, loader: StatefulDataLoader, device: torch.device) -> None:
        self.loader = loader
        self._ready: queue.Queue[MicroBatch | BaseException | None] = queue.Queue(maxsize=2)
        self._stopped = threading.Event()
        self._pin = device.type == "cuda"
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for batch in self.loader:
                tensor = torch.as_tensor(batch)
                tensor = tensor.pin_memory() if self._pin else tensor
                if not self._put(MicroBatch(tensor[:, 0], tensor[:, 1])):
                    return
        except BaseException as error:
            last = error
        self._put(last)

    def _put(self, item: MicroBatch | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        item = self._ready.get()
        if isinstance(item, MicroBatch):
            return item
        self._ready.put(item)  # the end stays the end
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._stopped.set()
        self._thread.join()
