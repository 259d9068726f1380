"""The loader: each rank reads its part of the job's order, and the data ends for all ranks at
once.
"""

import pytest
import torch

from titanlite.config.schema import Dataloader
from titanlite.data.loader import BatchPrefetcher, build_loader
from titanlite.data.packing import IGNORED, Concatenated
from titanlite.data.shuffle import RankSlice
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.windows import Windows
from titanlite.errors import UserError

CPU = torch.device("cpu")


def open_windows(folder, seq_len: int, repeat: bool) -> Windows:
    source = open_source("training", "text", str(folder), ByteTokenizer(), 256)
    return Windows(
        [Concatenated(source, seq_len, False, "training")], seq_len, seed=0, repeat=repeat
    )


@pytest.fixture
def windows(tmp_path):
    """Seven samples; sample i is the i-th letter, repeated."""

    def make(repeat: bool) -> Windows:
        (tmp_path / "letters.txt").write_text("".join(chr(97 + i) * 4 for i in range(7)))
        return open_windows(tmp_path, 4, repeat)

    return make


def letters(batches) -> list[str]:
    names = []
    for batch in batches:
        rows = zip(batch.tokens, batch.labels, strict=True)
        names += [
            "-" if (labels == IGNORED).all() else chr(int(tokens[0])) for tokens, labels in rows
        ]
    return names


def read(
    data: Windows,
    ranks: int,
    consumed: int = 0,
    steps: int | None = 3,
    accumulation: int = 1,
    **settings,
):
    """Return the letters that all ranks read, in the order of micro-batches."""
    slices = [
        RankSlice(rank, ranks, 4 // ranks // accumulation, accumulation) for rank in range(ranks)
    ]
    per_rank = [
        BatchPrefetcher(build_loader(data, s, consumed, steps, Dataloader(**settings)), CPU)
        for s in slices
    ]
    names = []
    for batches in zip(*per_rank, strict=True):
        names += letters(batches)
    return "".join(names)


def test_the_order_is_the_same_on_any_ranks_workers_and_accumulation(windows):
    data = windows(True)
    expected = read(data, 1)
    assert len(expected) == 12 and sorted(expected[:7]) == list("abcdefg")
    assert read(data, 2) == read(data, 4) == read(data, 2, accumulation=2) == expected
    assert read(data, 1, num_workers=2) == read(data, 2, num_workers=1) == expected


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_resumed_loaders_read_what_an_uninterrupted_one_reads(windows, cut):
    """Seven samples in steps of four: resume inside and at the end of epochs, on changing numbers
    of ranks.
    """
    data = windows(True)
    pieces = [
        read(data, ranks=(1, 2, 4)[piece % 3], consumed=4 * piece * cut, steps=cut)
        for piece in range(-(-21 // cut))
    ]
    assert "".join(pieces)[:84] == read(data, 1, steps=21)


def test_labels_are_the_next_tokens(tmp_path):
    (tmp_path / "alphabet.txt").write_text("abcdefghijklmnopq")
    data = open_windows(tmp_path, 8, True)
    (batch,) = BatchPrefetcher(build_loader(data, RankSlice(0, 1, 2), 0, 1, Dataloader()), CPU)
    rows = {
        bytes(t.byte().tolist()): bytes(n.byte().tolist())
        for t, n in zip(batch.tokens, batch.labels, strict=True)
    }
    assert rows == {b"abcdefgh": b"bcdefghi", b"ijklmnop": b"jklmnopq"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_last_step_is_padded_and_all_ranks_end_together(windows, ranks):
    names = read(windows(False), ranks, steps=None)
    assert sorted(names[:7]) == list("abcdefg") and names[7:] == "-"


def test_the_end_is_repeated_and_errors_reach_the_trainer(windows, tmp_path):
    batches = BatchPrefetcher(
        build_loader(windows(False), RankSlice(0, 1, 4), 0, None, Dataloader()), CPU
    )
    assert len(list(batches)) == 2 and list(batches) == []
    data = windows(True)
    (tmp_path / "letters.txt").unlink()
    with pytest.raises(UserError, match="letters.txt"):
        next(BatchPrefetcher(build_loader(data, RankSlice(0, 1, 4), 0, None, Dataloader()), CPU))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_can_be_read_again_with_persistent_workers(windows, workers):
    settings = Dataloader(num_workers=workers, persistent_workers=workers > 0)
    loader = build_loader(windows(False), RankSlice(0, 1, 4), 0, None, settings)
    worker_pids: list[list[int]] = []
    names = []
    for _ in range(2):
        names.append(letters(BatchPrefetcher(loader, CPU)))
        worker_pids.append([worker.pid for worker in loader._iterator._workers] if workers else [])
    assert names[0] == names[1] and len(names[0]) == 8
    assert worker_pids[0] == worker_pids[1]
