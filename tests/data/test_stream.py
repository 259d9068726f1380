"""Streams: every document is read once, resumes are exact, all ranks end together, and stalls are
named.
"""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.jobs import TINY, job, trainer, validated
from tests.lanes import sample
from tests.runs import train
from titanlite.config.load import ConfigError
from titanlite.config.schema import Dataloader
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    for file, size in enumerate(SIZES):
        lines = [
            json.dumps({"text": f"{file}:{i} " + "ab" * (i % 5), "url": "x"}) for i in range(size)
        ]
        (folder / f"{file}.jsonl").write_text(
            "\n".join([*lines, '{"text": "", "url": "an empty document"}', ""])
        )
    return folder


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    argv = [*TINY, "--training.dataset=c4", "--model.hf_assets_path="]
    code, out = train(
        argv, tmp_path / "run", NGPU="2", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0"
    )
    assert code == 2 and len(out.splitlines()) == 2 and not (tmp_path / "run").exists(), out
    assert 'training.dataset = "c4" can\'t be streamed: http://127.0.0.1:9 does not answer: ' in out
    assert out.rstrip().endswith("; training.dataset_path names a copy")


def documents() -> list[str]:
    return sorted(
        f"{file}:{i} " + "ab" * (i % 5) for file, size in enumerate(SIZES) for i in range(size)
    )


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


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6, 7])
def test_every_document_is_read_once_by_any_number_of_readers(folder, readers):
    """With three files, readers get whole files, share all of them, or share one each."""
    parts = read_by(stream(folder), readers)
    assert sorted(itertools.chain(*parts)) == documents()
    assert all(parts)


def test_every_epoch_and_seed_has_its_own_order_of_all_documents(folder):
    size = sum(len(text) + 1 for text in documents())
    orders = []
    for seed in (0, 1):
        windows = itertools.islice(
            Reader(stream(folder, repeat=True, seed=seed), 0, 0, 1, 1), -(-2 * size // 8)
        )
        texts = text_of(windows).split("\0")[: 2 * len(documents())]
        first, second = texts[: len(documents())], texts[len(documents()) :]
        assert sorted(first) == sorted(second) == documents(), "the epochs meet inside a window"
        orders += [first, second]
    assert len({" ".join(order) for order in orders}) == 4


def test_windows_are_concatenated_documents_and_the_last_is_padded(folder):
    plain, masked = (
        list(Reader(stream(folder, masked=masked), 0, 0, 1, 7)) for masked in (False, True)
    )
    size = sum(len(text) + 1 for text in documents())
    counts = [int((window[1] != IGNORED).sum()) for window in plain]
    assert len(plain) % 7 == 0 and sum(counts) == size - 1
    assert set(counts[: size // 8]) == {8}
    ended = [window[0] == 0 for window in plain[: size // 8]]
    for window, masks, end in zip(plain, masked, ended, strict=False):
        assert (masks[1] == IGNORED).tolist() == end.tolist(), (
            "nothing is predicted across document boundaries"
        )
        assert (masks[0] == window[0]).all()
        assert masks[2].tolist() == [int(end[:at].sum()) for at in range(8)]
        assert all(masks[3][at + 1] == 0 for at in range(7) if end[at])


def batches(loader) -> list[list]:
    return [batch.rows.tolist() for batch in loader]


def loader_of(data: Stream, workers: int, ranks: int = 1, rank: int = 0, steps: int | None = None):
    return build_loader(data, RankSlice(rank, ranks, 2), 0, steps, Dataloader(num_workers=workers))


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_of_all_ranks_read_different_documents(folder, rank):
    """A rank's batches come from its readers in turn; that readers read different documents is
    tested above.
    """
    data = stream(folder)
    readers = [Reader(data, rank, 2 * rank + worker, 4, batch=2) for worker in range(2)]
    windows = [[window.tolist() for window in reader] for reader in readers]
    turns = itertools.zip_longest(
        *([part[i : i + 2] for i in range(0, len(part), 2)] for part in windows)
    )
    expected = [batch for turn in turns for batch in turn if batch]
    read = batches(
        BatchPrefetcher(
            loader_of(data, workers=2, ranks=2, rank=rank, steps=len(expected) + 3), CPU
        )
    )
    assert read[: len(expected)] == expected
    assert all(row[1] == [IGNORED] * 8 for batch in read[len(expected) :] for row in batch)


OFTEN = (1, 1, 2, 3, 5, 8, 1, 13, 4, 7)
"""Micro-batches between interruptions: right after each other, inside blocks and across epochs."""


@pytest.mark.parametrize(
    ("workers", "repeat", "cuts"),
    sample(
        [(0, True, OFTEN), (0, False, OFTEN), (2, True, (1, 1, 5, 6, 9)), (2, False, (9, 1, 8))],
        (0, True, OFTEN),
        (2, False, (9, 1, 8)),
        long=[],
    ),
)
def test_resumed_streams_read_what_an_uninterrupted_one_reads(folder, workers, repeat, cuts):
    data = stream(folder, repeat=repeat, masked=True)
    uninterrupted = batches(BatchPrefetcher(loader_of(data, workers, 2, 1, steps=sum(cuts)), CPU))
    if repeat:
        assert len({str(batch) for batch in uninterrupted}) > len(uninterrupted) - 3, (
            "epochs differ"
        )
    else:
        assert all(row[1] == [IGNORED] * 8 for batch in uninterrupted[-7:] for row in batch), (
            "interrupted after the end too"
        )
    state, pieces = None, []
    for cut in cuts:
        loader = loader_of(data, workers, 2, 1)
        if state is not None:
            loader.load_state_dict(state)
        prefetcher = BatchPrefetcher(loader, CPU)
        pieces += batches(itertools.islice(prefetcher, cut))
        state = json.loads(json.dumps(prefetcher.state))
        prefetcher.close()
    assert pieces == uninterrupted


@pytest.mark.parametrize("readers", [1, 3])
def test_a_resumed_reader_of_whole_files_loses_no_document(folder, readers):
    for repeat in (True, False):
        data = stream(folder, repeat=repeat, masked=True)
        expected = [
            window.tolist()
            for window in itertools.islice(Reader(data, 0, 0, readers, 1), sum(OFTEN))
        ]
        read, state = [], Reader(data, 0, 0, readers, 1).state_dict()
        for cut in OFTEN:
            reader = Reader(data, 0, 0, readers, 1)
            reader.load_state_dict(state)
            read += [window.tolist() for window in itertools.islice(reader, cut)]
            state = json.loads(json.dumps(reader.state_dict()))
        assert read == expected


def test_a_column_that_holds_no_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n{"text": 6}\n')
    with pytest.raises(
        UserError, match=f'{tmp_path}/a.jsonl: the column "text" holds int64, not strings'
    ):
        next(Reader(stream(tmp_path), 0, 0, 1, 1))


def test_a_state_of_other_ranks_workers_or_data_is_refused(folder):
    data = stream(folder)
    loader = loader_of(data, workers=0, ranks=2)
    next(iter(loader))
    state = loader.state_dict()
    for other, message in (
        (loader_of(data, 0, ranks=4), "data-parallel degree was 2 and is 4"),
        (loader_of(data, 0, ranks=2, rank=1), "data-parallel rank was 0 and is 1"),
        (loader_of(data, 2, ranks=2), "num_workers was 0 and is 2"),
        (loader_of(replace(data, seed=1), 0, ranks=2), "data was"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            other.load_state_dict(state)
        assert str(folder) in str(caught.value)


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
    try:
        run.train()
    except UserError as error:
        return run.tokens, str(error)
    return run.tokens, "no end"


def test_ranks_with_unequal_streams_stop_together(pool, uneven, tmp_path):
    argv = [
        *TINY,
        "--training.dataset=c4_test",
        f"--training.dataset_path={uneven}",
        "--training.no_repeat",
    ]
    argv += ["--training.steps=99"]
    longest = sum(len(f"document {i}\0") for i in range(40))
    steps = -(-(longest - 1) // (2 * 16))
    results = pool.run(train_to_the_end, argv, str(tmp_path / "out"), world=2)
    assert (
        results
        == [
            (
                steps * 2 * 2 * 16,
                f"the data ended after step {steps} of 99: training.repeat is false",
            )
        ]
        * 2
    )


def validate_twice(argv: list[str], folder: str) -> tuple[float, float, float]:
    """Return the losses of two validations, and the loss over all readers' windows by hand."""
    run = trainer(argv, folder)
    data = run.validation_loader._stream
    losses = [validated(run) for _ in range(2)]
    windows = [window for number in range(2) for window in Reader(data, 0, number, 2, 1)]
    rows = torch.stack([torch.as_tensor(window) for window in windows])
    with torch.no_grad():
        total = token_loss_sum(run.parts[0](rows[:, 0]), rows[:, 1])
    return losses[0], losses[1], (total / count_valid(rows[:, 1])).item()


@pytest.mark.parametrize("steps", [-1, 50])
def test_validation_on_an_uneven_stream_covers_all_documents(pool, uneven, tmp_path, steps):
    argv = [
        *TINY,
        "--validation.enable",
        "--validation.dataset=c4_test",
        f"--validation.steps={steps}",
    ]
    for first, again, by_hand in pool.run(
        validate_twice,
        [*argv, f"--validation.dataset_path={uneven}", "--validation.local_batch_size=2"],
        str(tmp_path),
        world=2,
    ):
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


def faulty(tmp_path: Path, kind: str) -> Stream:
    shards = datasets.IterableDataset.from_generator(
        failing, gen_kwargs={"files": ["a", "b"], "marks": str(tmp_path), "kind": kind}
    )
    return Stream(
        "faulty",
        shards,
        ByteTokenizer(),
        8,
        seed=0,
        repeat=False,
        stall_timeout=0.5,
        pause=0.01,
        read=4,
    )


@pytest.mark.parametrize(
    ("kind", "why"), [("stall", "no data for 0.5 seconds"), ("fail", "429 Too Many Requests")]
)
def test_a_failed_or_stalled_read_is_named_and_retried_without_loss(tmp_path, capsys, kind, why):
    texts = text_of(Reader(faulty(tmp_path, kind), 3, 0, 1, 1)).split("\0")[:-1]
    assert sorted(texts) == sorted(f"{file}:{i}" for file in "ab" for i in range(30))
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"titanlite: stream faulty of data-parallel rank 3, file {file} of 2, document 8: "
        f"{why}; retrying in 0.01 s"
        for file in (1, 2)
    ]


def test_the_config_sets_the_stall_timeout(folder):
    argv = [*TINY, "--training.dataset=c4_test", f"--training.dataset_path={folder}"]
    configured = job([*argv, "--training.dataloader.stall_timeout_seconds=0.5"], 1)
    data = training_data(configured, ByteTokenizer(), 0)
    assert isinstance(data, Stream) and data.stall_timeout == 0.5


def test_a_dead_stream_is_given_up_after_five_retries_with_growing_pauses(tmp_path, capsys):
    with pytest.raises(
        RunFailed, match=r"rank 0, file \d of 2, document 8: 429 .*gave up after 5 retries"
    ):
        list(Reader(faulty(tmp_path, "dead"), 0, 0, 1, 1))
    pauses = [line.rsplit(" in ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s", "0.08 s", "0.16 s"]


@pytest.mark.parametrize(
    ("argv", "key", "message"),
    [
        (
            ["--training.dataset=c4", "--training.packing=first-fit"],
            "training.packing",
            "is streamed",
        ),
        (
            ['--training.mixture=[{dataset="a/b", weight=1.0}]'],
            "training.mixture",
            '"a/b" is streamed, and a mixture',
        ),
        (
            ["--training.dataset=c4", "--training.dataloader.stall_timeout_seconds=20"],
            "training.dataloader.stall_timeout_seconds",
            "given up after 151 s, but a run counts as hung after comm.train_timeout_seconds = 100",
        ),
        (
            [
                "--training.dataset=c4",
                "--training.dataloader.stall_timeout_seconds=5",
                "--fault.stall_seconds=60",
            ],
            "training.dataloader.stall_timeout_seconds",
            "given up after 61 s, but a run counts as hung after fault.stall_seconds = 60",
        ),
    ],
)
def test_settings_that_a_stream_does_not_support_are_refused(argv, key, message):
    with pytest.raises(ConfigError) as caught:
        job([*TINY, *argv], 2)
    assert key in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("some/name@test", "{folder}", 'Bad split: test. Available splits: ["train"]'),
        ("some/name:en", "{folder}", "'en' not found. Available: ['default']"),
    ],
)
def test_a_stream_that_cannot_be_opened_is_one_line(folder, name, path, message):
    with pytest.raises(UserError) as caught:
        open_stream("training", name, path.format(folder=folder))
    line = str(caught.value)
    assert line.startswith(
        f'training.dataset = "{name}" with dataset_path = "{path.format(folder=folder)}" can'
    )
    assert message.replace('"', "'") in line.replace('"', "'") and "\n" not in line


@pytest.mark.parametrize("name", ["c4_test", "c4", "some/name"])
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(name):
    with pytest.raises(UserError) as caught:
        open_stream("training", name, "nope")
    assert str(caught.value) == 'training.dataset_path = "nope": there is no such folder'


def test_c4_test_without_its_folder_is_refused():
    with pytest.raises(UserError, match="name its folder in training.dataset_path"):
        open_stream("training", "c4_test", "")


def test_a_stream_without_text_names_its_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "abc", "url": "x"}\n')
    says = rf'{tmp_path}/a.jsonl has no column "text"; it has: content, url; training.text_key '
    with pytest.raises(UserError, match=says):
        next(Reader(stream(tmp_path), 0, 0, 1, 1))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"txt": "ab"}', " and the first file differ in columns: txt; training.text_key = "),
        ('{"text": ["ab"]}', " cannot be read: Couldn't cast array of type list<item: string> to"),
        ('{"text": "a', " cannot be read: JSON parse error: "),
    ],
)
def test_a_file_with_other_content_than_the_first_is_named_and_not_read_again(
    tmp_path, capsys, line, says
):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    (tmp_path / "b.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError) as caught:
        list(Reader(replace(stream(tmp_path), pause=0.01), 0, 0, 1, 1))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/b.jsonl{says}") and "\n" not in text, text
    assert 'training.text_key = "text"' in text and "retrying" not in capsys.readouterr().err


def test_more_readers_than_documents_of_a_repeated_stream_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    with pytest.raises(
        UserError, match=r"fewer documents than the 2 readers .*; reader 1 has none"
    ):
        next(Reader(stream(tmp_path, repeat=True), 0, 1, 2, 1))
