"""Streams: every document is read once an epoch, resumes are exact, and errors name the stream."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import refused
from titanlite.config.load import ConfigError
from titanlite.config.schema import Dataloader
from titanlite.data import documents
from titanlite.data.loader import BatchPrefetcher, build_loader
from titanlite.data.packing import IGNORED
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamReader, open_stream
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import RunFailed

datasets = pytest.importorskip("datasets", reason="streaming needs the extra hf")

CPU = torch.device("cpu")
SIZES = (23, 11, 7)
"""The number of documents in each file."""


def document(file: int, number: int) -> str:
    return f"{file}:{number} " + "ab" * (number % 5)


DOCUMENTS = sorted(document(file, i) for file, size in enumerate(SIZES) for i in range(size))
LENGTH = sum(len(text) + 1 for text in DOCUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    for file, size in enumerate(SIZES):
        texts = [*(document(file, i) for i in range(size)), ""]
        lines = [json.dumps({"text": text, "url": "x"}) + "\n" for text in texts]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    return folder


def stream(folder: Path, seed: int = 0, masked: bool = False) -> Stream:
    name, shards = open_stream("training", "c4_test", str(folder))
    return Stream(name, shards, ByteTokenizer(), 8, seed, masked, block=5)


def texts_of(reader: Iterator, count: int) -> list[str]:
    """Return the first documents of a reader, from the windows that they were cut into."""
    text = ""
    while text.count("\0") < count:
        text += bytes(next(reader)[0].tolist()).decode()
    return text.split("\0")[:count]


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 7])
def test_every_document_is_read_once_an_epoch_by_any_number_of_readers(folder, readers):
    """With three files, three readers get whole files, and others share all of them."""
    data = stream(folder)
    parts = [[*StreamReader(data, number, readers)._read_epoch()] for number in range(readers)]
    assert sorted(itertools.chain(*parts)) == DOCUMENTS and all(parts)


class Short(ByteTokenizer):
    """Takes no long text."""

    def encode(self, text: str) -> list[int]:
        assert len(text) <= 6
        return super().encode(text)


def test_a_long_document_is_tokenized_in_parts(folder, monkeypatch):
    monkeypatch.setattr(documents, "SEGMENT_BYTES", 4)
    texts = texts_of(StreamReader(replace(stream(folder), tokenizer=Short()), 0, 1), len(DOCUMENTS))
    assert sorted(texts) == DOCUMENTS and max(map(len, DOCUMENTS)) > 6


def test_every_epoch_and_seed_has_its_own_order_of_all_documents(folder):
    count = len(DOCUMENTS)
    orders = set()
    for seed in (0, 1):
        texts = texts_of(StreamReader(stream(folder, seed=seed), 0, 1), 2 * count)
        for epoch in (texts[:count], texts[count:]):  # they meet inside a window
            assert sorted(epoch) == DOCUMENTS
            orders.add(" ".join(epoch))
    assert len(orders) == 4


def test_epochs_read_the_files_in_orders_of_their_own(folder):
    count = len(DOCUMENTS)
    texts = texts_of(StreamReader(replace(stream(folder), block=1), 0, 1), 6 * count)
    assert len({text[0] for text in texts[::count]}) > 1


def test_nothing_is_predicted_across_documents_under_a_mask(folder):
    plain, masked = (StreamReader(stream(folder, masked=masked), 0, 1) for masked in (False, True))
    for window, masks in itertools.islice(zip(plain, masked, strict=True), LENGTH // 8):
        assert (masks[1] == IGNORED).tolist() == (window[0] == 0).tolist()
        assert (masks[0] == window[0]).all() and (window[1] != IGNORED).all()


def loader_of(data: Stream, workers: int, ranks: int, rank: int = 0):
    return build_loader(data, RankSlice(rank, ranks, 2), 0, None, Dataloader(num_workers=workers))


def test_a_loader_of_some_steps_reads_the_same_windows_every_time(folder):
    loader = build_loader(stream(folder), RankSlice(0, 1, 2), 0, 3, Dataloader())
    first, again = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == again and len(first) == 3


OFTEN = (1, 1, 2, 3, 5, 8, 1, 13, 4, 7)
"""Micro-batches between interruptions: right after each other, inside blocks and across epochs."""


def in_turn(data: Stream, workers: int, ranks: int) -> Iterator[list]:
    """Yield what rank 1 reads: batches of its readers in turn."""
    count = workers or 1
    readers = [StreamReader(data, count + n, ranks * count) for n in range(count)]
    for reader in itertools.cycle(readers):
        yield [next(reader).tolist(), next(reader).tolist()]


ALONE = [(0, 2, OFTEN), (0, 3, OFTEN)]
"""Readers that share files, and that have whole ones; without workers."""


@pytest.mark.parametrize(("workers", "ranks", "cuts"), sample([*ALONE, (2, 2, (10, 8))], *ALONE))
def test_interrupted_streams_read_what_their_readers_read(folder, workers, ranks, cuts):
    data = stream(folder, masked=True)
    expected = [*itertools.islice(in_turn(data, workers, ranks), sum(cuts))]
    state, read = None, []
    for cut in cuts:
        loader = loader_of(data, workers, ranks, 1)
        if state is not None:
            loader.load_state_dict(state)
        prefetcher = BatchPrefetcher(loader, CPU)
        read += [batch.rows.tolist() for batch in itertools.islice(prefetcher, cut)]
        state = json.loads(json.dumps(prefetcher.state))
        prefetcher.close()
    assert read == expected


def test_a_state_of_other_ranks_workers_or_data_is_refused(folder):
    data = stream(folder)
    assert replace(data, text_key="url").fingerprint != data.fingerprint
    loader = loader_of(data, workers=0, ranks=2)
    next(iter(loader))
    state = loader.state_dict()
    for other, *named in (
        (loader_of(data, 0, ranks=4), "degree was 2 and is 4"),
        (loader_of(data, 0, ranks=2, rank=1), "rank was 0 and is 1"),
        (loader_of(data, 2, ranks=2), "num_workers was 0 and is 2"),
        (loader_of(replace(data, seed=1), 0, ranks=2), "data was"),
    ):
        with refused(folder, *named):
            other.load_state_dict(state)


C4 = "--training.dataset=c4"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([C4, "--training.packing=first-fit"], ["training.packing"]),
        ([C4, "--training.no_repeat"], ["training.repeat", "prepare"]),
        (
            [C4, "--validation.enable", "--validation.dataset=c4", "--validation.steps=-1"],
            ["validation.steps = -1", "number of steps"],
        ),
    ],
)
def test_settings_that_a_stream_does_not_support_are_refused(argv, named):
    with refused(*named, kind=ConfigError):
        job([*TINY, "--training.dataset_path=", *argv], 2)


@pytest.mark.parametrize(
    ("name", "path", "named"),
    [
        ("some/name@test", "", ["test", "train"]),
        ("some/name:en", "", ["'en'", "default"]),
        ("some/name", "nope", ['training.dataset_path = "nope"', "no such folder"]),
        ("c4_test", None, ["training.dataset_path"]),
    ],
)
def test_a_stream_that_cannot_be_opened_is_one_line(folder, name, path, named):
    """A folder that is not there is not looked up on the hub."""
    with refused(*named) as caught:
        open_stream("training", name, path or str(folder) if path is not None else "")
    line = str(caught.value)
    assert "\n" not in line and (path or line.startswith(f'training.dataset = "{name}"'))


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"text": 5}'], ['"text"', "int64"]),
        (['{"content": "abc", "url": "x"}'], ['"text"', "content, url", "training.text_key"]),
    ],
)
def test_a_stream_without_text_is_refused_when_it_is_opened(tmp_path, lines, named):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with refused(f'training.dataset = "c4_test" with dataset_path = "{tmp_path}"', *named):
        stream(tmp_path)


@pytest.mark.parametrize(("line", "named"), [('{"txt": "ab"}', "txt"), ('{"text": "a', "JSON")])
def test_a_file_unlike_the_first_or_damaged_ends_the_run_in_one_line(tmp_path, line, named):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    (tmp_path / "b.jsonl").write_text(f"{line}\n")
    with refused(f"stream {tmp_path}", "reader 0 of 1", named, kind=RunFailed) as caught:
        next(StreamReader(stream(tmp_path), 0, 1))
    assert "\n" not in str(caught.value)


def test_more_readers_than_documents_of_a_repeated_stream_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    with refused("2 readers", "reader 1"):
        next(StreamReader(stream(tmp_path), 1, 2))
