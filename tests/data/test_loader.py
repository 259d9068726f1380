"""The loader: each rank reads its part of the job's order, and the data ends for all ranks at
once.
"""

import pytest
import torch

from tests.messages import refused
from titanlite.config.schema import Dataloader
from titanlite.data.loader import BatchPrefetcher, build_loader
from titanlite.data.packing import IGNORED, Concatenated
from titanlite.data.shuffle import RankSlice
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.trained import WindowSource
from titanlite.data.windows import Windows


@pytest.fixture
def windows(tmp_path):
    """Seven samples; sample i is the i-th letter, repeated."""

    def made(repeat: bool) -> Windows:
        (tmp_path / "letters.txt").write_text("".join(4 * letter for letter in "abcdefg"))
        source = open_source("training", "text", str(tmp_path), ByteTokenizer(), 256)
        parts: list[WindowSource] = [Concatenated(source, 4, False, "training")]
        return Windows(parts, 4, seed=0, repeat=repeat)

    return made


CPU = torch.device("cpu")


def loader_of(data, rank_slice: RankSlice, consumed=0, steps=None, **settings):
    return build_loader(data, rank_slice, consumed, steps, Dataloader(**settings))


def letters(batches) -> str:
    names = ""
    for batch in batches:
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            names += "-" if (labels == IGNORED).all() else chr(int(tokens[0]))
    return names


def read(data: Windows, ranks: int, accumulation: int = 1, **given) -> str:
    """Return the letters that all ranks read, in the order of micro-batches."""
    local = 4 // ranks // accumulation
    slices = [RankSlice(rank, ranks, local, accumulation) for rank in range(ranks)]
    per_rank = [BatchPrefetcher(loader_of(data, each, **given), CPU) for each in slices]
    return "".join(letters(step) for step in zip(*per_rank, strict=True))


@pytest.mark.long
def test_the_order_is_the_same_on_any_ranks_workers_and_accumulation(windows):
    data = windows(True)
    expected = read(data, 1, steps=3)
    assert len(expected) == 12 and sorted(expected[:7]) == list("abcdefg")
    assert read(data, 2, steps=3) == read(data, 4, steps=3) == expected
    assert read(data, 2, accumulation=2, steps=3) == expected
    assert read(data, 1, steps=3, num_workers=2) == expected


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_resumed_loaders_read_what_an_uninterrupted_one_reads(windows, cut):
    """Seven samples in steps of four: resume inside and at the end of epochs, on changing numbers
    of ranks.
    """
    data = windows(True)
    pieces = [
        read(data, (1, 2, 4)[piece % 3], consumed=4 * piece * cut, steps=cut)
        for piece in range(-(-21 // cut))
    ]
    assert "".join(pieces)[:84] == read(data, 1, steps=21)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_last_step_is_padded_and_all_ranks_end_together(windows, ranks):
    names = read(windows(False), ranks)
    assert sorted(names[:7]) == list("abcdefg") and names[7:] == "-"


def test_the_end_is_repeated_and_errors_reach_the_trainer(windows, tmp_path):
    rank_slice, data = RankSlice(0, 1, 4), windows(True)
    ending = BatchPrefetcher(loader_of(windows(False), rank_slice), CPU)
    assert len(list(ending)) == 2 and list(ending) == []
    (tmp_path / "letters.txt").unlink()
    with refused("letters.txt"):
        next(BatchPrefetcher(loader_of(data, rank_slice), CPU))


def test_a_loader_can_be_read_again_with_persistent_workers(windows):
    loader = loader_of(windows(False), RankSlice(0, 1, 4), num_workers=1, persistent_workers=True)
    found = []
    for _ in range(2):
        names = letters(BatchPrefetcher(loader, CPU))
        found.append((names, [worker.pid for worker in loader._iterator._workers]))
    assert found[0] == found[1] and len(names) == 8
