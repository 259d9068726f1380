"""Streams: every document is read once, resumes are exact, all ranks end together, and stalls are
named.
"""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.jobs import TINY, job, trainer, validated
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import run
from titanlite.config.load import ConfigError
from titanlite.config.schema import Dataloader
from titanlite.data import documents
from titanlite.data.loader import BatchPrefetcher, build_loader
from titanlite.data.packing import IGNORED
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Reader, Stream, open_stream
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.windows import training_data
from titanlite.errors import RunFailed, UserError
from titanlite.train.loss import count_valid, token_loss_sum

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


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    argv = [*TINY, "--training.dataset=c4", "--training.dataset_path=", "--model.hf_assets_path="]
    hub = "http://127.0.0.1:9"
    variables = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "real": "they are read by an import"}
    offline = run(argv, tmp_path / "run", ranks=2, code=2, **variables)
    assert len(offline.out.splitlines()) == 2 and not offline.folder.exists()
    says(offline.out, 'training.dataset = "c4"', hub, "training.dataset_path")


def stream(folder: Path, seed: int = 0, repeat: bool = False, masked: bool = False) -> Stream:
    name, shards = open_stream("training", "c4_test", str(folder))
    return Stream(name, shards, ByteTokenizer(), 8, seed, repeat, masked, block=5)


def text_of(windows) -> str:
    """Join windows back into the text they were cut from."""
    ids: list[int] = []
    for window in windows:
        valid = window[1] != IGNORED
        if valid.any():
            ids[len(ids) - bool(ids) :] = [
                *window[0][valid].tolist(),
                *window[1][valid][-1:].tolist(),
            ]
    return bytes(ids).decode()


def read_by(data: Stream, readers: int) -> list[list[str]]:
    """Return the documents of every reader."""
    texts = [text_of(Reader(data, 0, number, readers, batch=4)) for number in range(readers)]
    return [text.split("\0")[:-1] for text in texts]


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 7])
def test_every_document_is_read_once_by_any_number_of_readers(folder, readers):
    """With three files, readers get whole files, share one each, or share all of them."""
    parts = read_by(stream(folder), readers)
    assert sorted(itertools.chain(*parts)) == DOCUMENTS
    assert all(parts)


class Short(ByteTokenizer):
    """Takes no long text."""

    def encode(self, text: str) -> list[int]:
        assert len(text) <= 6
        return super().encode(text)


def test_a_long_document_is_tokenized_in_parts(folder, monkeypatch):
    monkeypatch.setattr(documents, "SEGMENT_BYTES", 4)
    (texts,) = read_by(replace(stream(folder), tokenizer=Short()), 1)
    assert sorted(texts) == DOCUMENTS and max(map(len, DOCUMENTS)) > 6


def test_every_epoch_and_seed_has_its_own_order_of_all_documents(folder):
    count = len(DOCUMENTS)
    orders = set()
    for seed in (0, 1):
        reader = Reader(stream(folder, repeat=True, seed=seed), 0, 0, 1, 1)
        texts = text_of(itertools.islice(reader, -(-2 * LENGTH // 8))).split("\0")
        for epoch in (texts[:count], texts[count : 2 * count]):  # they meet inside a window
            assert sorted(epoch) == DOCUMENTS
            orders.add(" ".join(epoch))
    assert len(orders) == 4


def test_windows_are_concatenated_documents_and_the_last_is_padded(folder):
    plain, masked = (
        list(Reader(stream(folder, masked=masked), 0, 0, 1, 7)) for masked in (False, True)
    )
    counts = [int((window[1] != IGNORED).sum()) for window in plain]
    full = LENGTH // 8
    assert len(plain) % 7 == 0 and sum(counts) == LENGTH - 1 and set(counts[:full]) == {8}
    for window, masks in zip(plain[:full], masked, strict=False):
        end = window[0] == 0
        # Nothing is predicted across document boundaries.
        assert (masks[1] == IGNORED).tolist() == end.tolist()
        assert (masks[0] == window[0]).all()


def loader_of(data: Stream, workers: int, ranks: int, rank: int = 0):
    return build_loader(data, RankSlice(rank, ranks, 2), 0, None, Dataloader(num_workers=workers))


OFTEN = (1, 1, 2, 3, 5, 8, 1, 13, 4, 7)
"""Micro-batches between interruptions: right after each other, inside blocks and across epochs."""


ALONE = [(0, 2, True, OFTEN), (0, 3, True, OFTEN), (0, 3, False, OFTEN)]
"""Readers that share files, and that have whole ones; without workers."""


def in_turn(data: Stream, workers: int, ranks: int) -> Iterator[list]:
    """Yield what rank 1 reads: batches of its readers in turn."""
    count = workers or 1
    readers = [iter(Reader(data, 1, count + n, ranks * count, batch=2)) for n in range(count)]
    for turn in itertools.zip_longest(*(zip(each, each, strict=False) for each in readers)):
        yield from ([window.tolist() for window in pair] for pair in turn if pair)


@pytest.mark.parametrize(
    ("workers", "ranks", "repeat", "cuts"),
    sample([*ALONE, (2, 2, False, (10, 8))], *ALONE),
)
def test_interrupted_streams_read_what_their_readers_read(folder, workers, ranks, repeat, cuts):
    data = stream(folder, repeat=repeat, masked=True)
    expected = [*itertools.islice(in_turn(data, workers, ranks), sum(cuts))]
    assert repeat or len(expected) < sum(cuts), "interrupted after the end too"
    state, read = None, []
    for cut in cuts:
        loader = loader_of(data, workers, ranks, 1)
        if state is not None:
            loader.load_state_dict(state)
        prefetcher = BatchPrefetcher(loader, CPU)
        read += [batch.rows.tolist() for batch in itertools.islice(prefetcher, cut)]
        state = json.loads(json.dumps(prefetcher.state))
        prefetcher.close()
    assert read[: len(expected)] == expected
    assert all(row[1] == [IGNORED] * 8 for batch in read[len(expected) :] for row in batch)


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


@pytest.fixture
def uneven(tmp_path) -> Path:
    """Two files, so that each of two ranks reads one."""
    (tmp_path / "uneven").mkdir()
    for name, size in (("long", 40), ("short", 3)):
        lines = (f'{{"text": "document {i}"}}\n' for i in range(size))
        (tmp_path / "uneven" / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path / "uneven"


def train_to_the_end(argv: list[str], folder: str) -> tuple[int, str]:
    run = trainer(argv, folder)
    with pytest.raises(UserError) as caught:
        run.train()
    return run.tokens, str(caught.value)


@pytest.mark.long
def test_ranks_with_unequal_streams_stop_together(pool, uneven, tmp_path):
    argv = [*TINY, "--training.dataset=c4_test", f"--training.dataset_path={uneven}"]
    argv += ["--training.no_repeat", "--training.steps=99"]
    longest = sum(len(f"document {i}\0") for i in range(40))
    steps = -(-(longest - 1) // (2 * 16))
    for tokens, error in pool.run(train_to_the_end, argv, str(tmp_path / "out"), world=2):
        assert tokens == steps * 2 * 2 * 16
        says(error, f"step {steps} of 99", "training.repeat")


def validate_twice(argv: list[str], folder: str) -> tuple[float, float, float]:
    """Return the losses of two validations, and the loss over all readers' windows by hand."""
    run = trainer(argv, folder)
    data = run.data.validation_loader._stream
    losses = [validated(run) for _ in range(2)]
    windows = [window for number in range(2) for window in Reader(data, 0, number, 2, 1)]
    rows = torch.stack([torch.as_tensor(window) for window in windows])
    with torch.no_grad():
        total = token_loss_sum(run.parts[0](rows[:, 0]), rows[:, 1])
    return losses[0], losses[1], (total / count_valid(rows[:, 1])).item()


@pytest.mark.long
@pytest.mark.parametrize("steps", [-1, 50])
def test_validation_on_an_uneven_stream_covers_all_documents(pool, uneven, tmp_path, steps):
    argv = [*TINY, "--validation.enable", "--validation.dataset=c4_test"]
    argv += [f"--validation.dataset_path={uneven}", "--validation.local_batch_size=2"]
    argv += [f"--validation.steps={steps}"]
    for first, again, by_hand in pool.run(validate_twice, argv, str(tmp_path), world=2):
        assert first == again == pytest.approx(by_hand, rel=1e-6)


def failing(files: list[str], marks: str, kind: str):
    """Yield documents; stall or fail at the tenth, once or every time."""
    for file in files:
        for i in range(30):
            mark = Path(marks) / f"{kind}{file}"
            if i == 10 and (kind == "dead" or not mark.exists()):
                mark.touch()
                if kind == "stall":
                    time.sleep(60)
                raise ConnectionError("429 Too Many Requests")
            yield {"text": f"{file}:{i}"}


def faulty(tmp_path: Path, kind: str) -> Reader:
    given = {"files": ["a", "b"], "marks": str(tmp_path), "kind": kind}
    shards = datasets.IterableDataset.from_generator(failing, gen_kwargs=given)
    shape = {"seed": 0, "repeat": False, "read": 4}
    data = Stream("faulty", shards, ByteTokenizer(), 8, stall_timeout=0.5, pause=0.01, **shape)
    return Reader(data, 3, 0, 1, 1)


@pytest.mark.parametrize(("kind", "why"), [("stall", "0.5 seconds"), ("fail", "429 ")])
def test_a_failed_or_stalled_read_is_named_and_retried_without_loss(tmp_path, capsys, kind, why):
    texts = text_of(faulty(tmp_path, kind)).split("\0")[:-1]
    assert sorted(texts) == sorted(f"{file}:{i}" for file in "ab" for i in range(30))
    first, second = sorted(capsys.readouterr().err.splitlines())
    says(first, "faulty", "rank 3", "file 1 of 2", "document 8", why, "0.01 s")
    says(second, "file 2 of 2", why)


def test_a_dead_stream_is_given_up_after_five_retries_with_growing_pauses(tmp_path, capsys):
    with refused("rank 3", " of 2, document 8", "429", "5 retries", kind=RunFailed):
        list(faulty(tmp_path, "dead"))
    pauses = [line.rsplit(" in ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s", "0.08 s", "0.16 s"]


def test_the_config_sets_the_stall_timeout(folder):
    argv = [*TINY, "--training.dataset=c4_test", f"--training.dataset_path={folder}"]
    configured = job([*argv, "--training.dataloader.stall_timeout_seconds=0.5"], 1)
    data = training_data(configured, ByteTokenizer(), 0)
    assert isinstance(data, Stream) and data.stall_timeout == 0.5


C4 = "--training.dataset=c4"
STALL = "training.dataloader.stall_timeout_seconds"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([C4, "--training.packing=first-fit"], ["training.packing"]),
        (['--training.mixture=[{dataset="a/b", weight=1.0}]'], ["training.mixture", '"a/b"']),
        ([C4, f"--{STALL}=20"], [STALL, "151 s", "comm.train_timeout_seconds = 100"]),
        (
            [C4, f"--{STALL}=5", "--fault.stall_seconds=60"],
            [STALL, "61 s", "fault.stall_seconds = 60"],
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
    ("lines", "file", "named"),
    [
        (['{"text": 5}'], "a", ['"text"', "int64"]),
        (['{"content": "abc", "url": "x"}'], "a", ['"text"', "content, url", "training.text_key"]),
        (['{"text": "ab"}', '{"txt": "ab"}'], "b", ["txt", 'training.text_key = "text"']),
        (['{"text": "ab"}', '{"text": "a'], "b", ["JSON", 'training.text_key = "text"']),
    ],
)
def test_a_file_without_text_or_unlike_the_first_is_named_and_not_read_again(
    tmp_path, capsys, lines, file, named
):
    for name, line in zip("ab", lines, strict=False):
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n")
    with refused(f"{tmp_path}/{file}.jsonl", *named) as caught:
        list(Reader(replace(stream(tmp_path), pause=0.01), 0, 0, 1, 1))
    assert "\n" not in str(caught.value) and "retrying" not in capsys.readouterr().err


def test_more_readers_than_documents_of_a_repeated_stream_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    with refused("2 readers", "reader 1"):
        next(Reader(stream(tmp_path, repeat=True), 0, 1, 2, 1))
