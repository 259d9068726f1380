"""Every rank reads its share of the job's order, whatever the workers; the data ends for all ranks at once."""

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


def stream(folder, seq_len: int, repeat: bool) -> Windows:
    source = open_source("training", "text", str(folder), ByteTokenizer(), 256)
    return Windows([Concatenated(source, seq_len, False, "training")], seq_len, seed=0, repeat=repeat)


@pytest.fixture
def windows(tmp_path):
    """7 samples that tell which they are: sample i is the letter i, many times."""

    def make(repeat: bool) -> Windows:
        (tmp_path / "letters.txt").write_text("".join(chr(97 + i) * 4 for i in range(7)))
        return stream(tmp_path, 4, repeat)

    return make


def letters(batches) -> list[str]:
    found = []
    for batch in batches:
        rows = zip(batch.tokens, batch.labels, strict=True)
        found += ["-" if (labels == IGNORED).all() else chr(int(tokens[0])) for tokens, labels in rows]
    return found


def read(data: Windows, ranks: int, consumed: int = 0, steps: int | None = 3, accumulation: int = 1, **settings):
    """Letters of all ranks, micro-batch by micro-batch."""
    shares = [RankSlice(rank, ranks, 4 // ranks // accumulation, accumulation) for rank in range(ranks)]
    per_rank = [BatchPrefetcher(build_loader(data, s, consumed, steps, Dataloader(**settings)), CPU) for s in shares]
    found = []
    for batches in zip(*per_rank, strict=True):
        found += letters(batches)
    return "".join(found)


def test_the_stream_is_the_same_on_any_ranks_workers_and_accumulation(windows):
    data = windows(True)
    expected = read(data, 1)
    assert len(expected) == 12 and sorted(expected[:7]) == list("abcdefg")
    assert read(data, 2) == read(data, 4) == read(data, 2, accumulation=2) == expected
    assert read(data, 1, num_workers=2) == read(data, 2, num_workers=1) == expected


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_chain_of_cuts_reads_what_no_cut_reads(windows, cut):
    """Seven samples in steps of four: the cuts fall inside, at and across epochs, on changing numbers of ranks."""
    data = windows(True)
    pieces = [
        read(data, ranks=(1, 2, 4)[piece % 3], consumed=4 * piece * cut, steps=cut) for piece in range(-(-21 // cut))
    ]
    assert "".join(pieces)[:84] == read(data, 1, steps=21)


def test_labels_are_the_next_tokens(tmp_path):
    (tmp_path / "alphabet.txt").write_text("abcdefghijklmnopq")
    data = stream(tmp_path, 8, True)
    (batch,) = BatchPrefetcher(build_loader(data, RankSlice(0, 1, 2), 0, 1, Dataloader()), CPU)
    rows = {
        bytes(t.byte().tolist()): bytes(n.byte().tolist()) for t, n in zip(batch.tokens, batch.labels, strict=True)
    }
    assert rows == {b"abcdefgh": b"bcdefghi", b"ijklmnop": b"jklmnopq"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_without_repeat_the_last_step_is_padded_and_all_ranks_end_together(windows, ranks):
    found = read(windows(False), ranks, steps=None)
    assert sorted(found[:7]) == list("abcdefg") and found[7:] == "-"


def test_the_end_stays_the_end_and_an_error_reaches_the_trainer(windows, tmp_path):
    batches = BatchPrefetcher(build_loader(windows(False), RankSlice(0, 1, 4), 0, None, Dataloader()), CPU)
    assert len(list(batches)) == 2 and list(batches) == []
    data = windows(True)
    (tmp_path / "letters.txt").unlink()
    with pytest.raises(UserError, match="letters.txt"):
        next(BatchPrefetcher(build_loader(data, RankSlice(0, 1, 4), 0, None, Dataloader()), CPU))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_read_again_gives_the_same_and_may_keep_its_workers(windows, workers):
    settings = Dataloader(num_workers=workers, persistent_workers=workers > 0)
    loader = build_loader(windows(False), RankSlice(0, 1, 4), 0, None, settings)
    read_by: list[list[int]] = []
    found = []
    for _ in range(2):
        found.append(letters(BatchPrefetcher(loader, CPU)))
        read_by.append([worker.pid for worker in loader._iterator._workers] if workers else [])
    assert found[0] == found[1] and len(found[0]) == 8
    assert read_by[0] == read_by[1]
