"""Preparing text: the same shards with any number of workers, complete or absent, and resumable
after a kill.
"""

import gzip
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.assets import make_assets
from tests.jobs import QUIET, TINY, job
from tests.runs import environment
from titanlite.cli import main
from titanlite.config.schema import Dataloader
from titanlite.data import documents as documents_module
from titanlite.data import prepare as module
from titanlite.data.documents import Documents, pieces, segments, standard_library, text_files
from titanlite.data.loader import BatchPrefetcher, build_loader
from titanlite.data.packing import Concatenated
from titanlite.data.prepare import prepare, prepare_in_cache
from titanlite.data.shards import ShardSource
from titanlite.data.shuffle import RankSlice
from titanlite.data.tokenizer import load_tokenizer, open_tokenizer
from titanlite.data.windows import Windows
from titanlite.errors import UserError
from titanlite.launch.preflight import check_machine
from titanlite.tools.data import counts_line


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """About 3 MB of the standard library, as text files and JSON lines, with line ends of all
    kinds.
    """
    folder = tmp_path_factory.mktemp("library")
    documents = standard_library(held_out=False)
    lines = []
    for i, name in list(enumerate(documents.names))[::3]:
        text = (documents.root / name).read_bytes().decode("utf-8", errors="replace")
        if i % 2:
            lines.append(json.dumps({"text": text, "source": name}))
        else:
            (folder / f"{i}.txt").write_bytes(text.encode())
    (folder / "line_ends.txt").write_bytes(b"Windows\r\nold Mac\rUnix\n")
    (folder / "more.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory, library) -> Path:
    texts = [p.read_text()[:20000] for p in sorted(library.glob("*.txt"))[:20]]
    return make_assets(tmp_path_factory.mktemp("assets"), texts, 500)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 1 << 18)


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_shards_hold_every_document_once(library, assets, tmp_path):
    documents = text_files("test", str(library))
    manifest = prepare({"library": documents}, str(assets), tmp_path / "out", workers=1)
    tokenizer = load_tokenizer(str(assets))
    expected: list[int] = []
    count = 0
    for name in documents.names:
        content = (library / name).read_bytes()  # read_text would turn all line ends into "\n"
        texts = (
            [json.loads(line)["text"] for line in content.splitlines()]
            if name == "more.jsonl"
            else [content.decode()]
        )
        for text in texts:
            expected += [*tokenizer.encode(text), tokenizer.end]
            count += 1
    source = ShardSource("test", tmp_path / "out", 500, tokenizer.end)
    assert (manifest["tokens"], manifest["documents"]) == (len(expected), count)
    assert source.read(0, source.tokens).tolist() == expected
    assert len(manifest["shards"]) > 5
    ends = source.document_ends()
    assert len(ends) == count and all(expected[end - 1] == tokenizer.end for end in ends)
    assert prepare({"library": documents}, str(assets), tmp_path / "out", workers=1) == manifest, (
        "already done"
    )
    with pytest.raises(UserError, match="holds other data"):
        prepare({"library": documents}, "", tmp_path / "out", workers=1)


COMMAND = """
import sys
from titanlite.cli import main
from titanlite.data import prepare
prepare.UNIT_BYTES = 1 << 18
if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
"""


def test_a_killed_run_resumes_and_writes_the_same_bytes(library, assets, tmp_path):
    """Kill the command and its workers before the first shard and after one, then let a run
    finish.
    """
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    prepare(
        {str(library): text_files("x", str(library))},
        str(assets),
        tmp_path / "undisturbed",
        workers=1,
    )
    out = tmp_path / "out"
    argv = [
        "prepare",
        str(library),
        "--tokenizer",
        str(assets),
        "--out",
        str(out),
        "--workers",
        "2",
    ]
    command = [sys.executable, str(script), *argv]
    for shards in (0, 1):
        process = subprocess.Popen(
            command, env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        while (
            process.poll() is None
            and len(list((tmp_path / ".out.preparing").glob("*.bin"))) < shards
        ):
            time.sleep(0.01)
        assert process.poll() is None and not out.exists(), "killed before the end"
        if shards == 1:
            process.kill()  # the workers exit by themselves: they hold the other end of the pipe
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
    final = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert final.returncode == 0, final.stderr
    assert digest(out) == digest(tmp_path / "undisturbed")
    assert not (tmp_path / ".out.preparing").exists()


def test_a_retry_first_deletes_the_drafts_of_earlier_tries(tmp_path):
    staging = module._open_staging(tmp_path / "out", "the same", print)
    (staging / "shard-000000.draft-elsewhere-1").touch()
    (staging / "shard-000001.bin").touch()
    assert module._open_staging(tmp_path / "out", "the same", print) == staging
    assert {path.name for path in staging.iterdir()} == {".plan.json", "shard-000001.bin"}


def test_shards_left_by_a_run_on_other_sources_are_discarded(library, assets, tmp_path):
    staging = tmp_path / ".out.preparing"
    staging.mkdir()
    (staging / "shard-000000.bin").write_bytes(b"of another run")
    (staging / ".plan.json").write_text("{}")
    messages: list[str] = []
    documents = text_files("x", str(library / "more.jsonl"))
    prepare({"x": documents}, str(assets), tmp_path / "out", 1, log=messages.append)
    assert "made from different data; starting over" in messages[0]
    assert ShardSource("x", tmp_path / "out", 500, 0).tokens > 1000


def test_of_a_linked_leftover_the_link_is_removed_and_the_target_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".plan.json").write_text("{}")
    (tmp_path / ".out.preparing").symlink_to(elsewhere)
    assert not module._open_staging(tmp_path / "out", "other data", lambda line: None).is_symlink()
    assert (elsewhere / ".plan.json").read_text() == "{}"


def test_a_token_cache_may_be_a_link(assets, tmp_path):
    disk, text = tmp_path / "disk", tmp_path / "text"
    disk.mkdir()
    text.mkdir()
    (disk / "kept").touch()
    (text / ".titanlite").symlink_to(disk)
    for words in ("some text", "some other text"):
        (text / "a.txt").write_text(words * 20)
        prepare_in_cache("text", text_files("x", str(text)), load_tokenizer(str(assets)))
    assert (text / ".titanlite").is_symlink() and (disk / "kept").exists()


def test_a_line_belongs_to_the_piece_it_begins_in(tmp_path):
    lines = [json.dumps({"text": "x" * n}) for n in (1, 50, 3, 0, 200, 7)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents = text_files("x", str(tmp_path))
    for limit in (1, 7, 13, 64, 1000):
        texts = [s.text for piece in pieces(documents, limit) for s in segments(tmp_path, piece)]
        assert [len(text) for text in texts] == [1, 50, 3, 0, 200, 7], limit


def test_a_long_text_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "SEGMENT_BYTES", 40)
    text = "".join(f"line {n}\n" * (n % 3) for n in range(60)) + "no newline at the end"
    (tmp_path / "a.txt").write_text(text)
    for limit in (1, 17, 100, 10_000):
        parts = [
            s
            for piece in pieces(text_files("x", str(tmp_path)), limit)
            for s in segments(tmp_path, piece)
        ]
        assert "".join(part.text for part in parts) == text
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        assert max(len(part.text) for part in parts) < 70


def test_parquet_rows_are_documents(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the hf extra")
    import pyarrow.parquet

    table = arrow.table({"text": ["one", "two", "three"], "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    documents = text_files("x", str(tmp_path))
    assert [s.text for piece in pieces(documents, 1) for s in segments(tmp_path, piece)] == [
        "one",
        "two",
        "three",
    ]
    for columns, message in (
        ({"other": [1]}, 'has no column "text"; it has: other'),
        ({"text": [1]}, 'the column "text" holds int64, not strings'),
        ({"text": [b"a"]}, 'the column "text" holds binary, not strings'),
        ({"text": [["a"]]}, 'the column "text" holds list<'),
        ({"text": [{"string": "a"}]}, 'the column "text" holds struct<'),
    ):
        pyarrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        with pytest.raises(UserError) as caught:
            list(pieces(text_files("x", str(tmp_path)), 1))
        assert "a.parquet" in str(caught.value) and message in str(caught.value)
    for texts in (
        arrow.array(["a", None]).dictionary_encode(),
        arrow.array(["a", None], arrow.large_string()),
    ):
        pyarrow.parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet")
        (piece,) = pieces(text_files("x", str(tmp_path)), 1)
        assert [segment.text for segment in segments(tmp_path, piece)] == ["a", ""]


def test_a_damaged_parquet_file_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the hf extra")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(arrow.table({"text": [f"{i} text" for i in range(1000)]}), path)
    content = path.read_bytes()
    for damaged in (b"PAR1xxxxPAR1", content[:-20], content[:4] + b"\xff" * 400 + content[404:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="a.parquet is (not a parquet file, or )?damaged: "):
            documents = text_files("x", str(path))
            list(segments(tmp_path, next(pieces(documents, 1 << 20))))


BAD_LINES = {
    "{broken": "not JSON: ",
    '"text"': "not a JSON object",
    '{"body": "x"}': 'no "text" in it',
    '{"text": null}': '"text" is null, not a string',
    '{"text": 5}': '"text" is 5, not a string',
    '{"text": ["a"]}': '"text" is ["a"], not a string',
    '{"text": "half \\ud83d"}': (
        '"text" has \\ud83d, half of a surrogate pair, which is not a character; replace it'
    ),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_json_line_without_text_is_named_with_its_file_and_number(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    for line, message in BAD_LINES.items():
        content = ('{"text": "fine"}\n\n' + line + "\n").encode()
        path.write_bytes(gzip.compress(content) if suffix == ".jsonl.gz" else content)
        with pytest.raises(UserError) as caught:
            prepare({"x": text_files("x", str(path))}, "", tmp_path / "out", 1)
        assert str(caught.value).startswith(f"{path}: line 3: {message}")
    assert not (tmp_path / "out").exists()


def test_much_text_makes_no_more_shards_than_a_start_can_look_at(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("ab" * 500)
    monkeypatch.setattr(module, "UNIT_BYTES", 100)
    monkeypatch.setattr(module, "UNITS", 8)
    sources = {"x": text_files("x", str(tmp_path))}
    assert len(prepare(sources, "", tmp_path / "out", 1)["shards"]) == 8
    monkeypatch.setattr(module, "MOST_UNIT_BYTES", 2000)
    assert len(prepare(sources, "", tmp_path / "bounded", 1)["shards"]) == 20


def test_packed_lines_are_read_as_the_unpacked_ones(tmp_path, monkeypatch):
    texts = [f"document {i} " * (i % 7) for i in range(99)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(module, "UNIT_BYTES", 100)
    prepare({"x": text_files("x", str(tmp_path))}, "", tmp_path / "out", 1)
    source = ShardSource("training", tmp_path / "out", 256, 0)
    assert bytes(source.read(0, source.tokens).astype(np.uint8)).decode().split("\0")[:-1] == texts
    assert not text_files("x", str(tmp_path / "a.jsonl.gz")).are_plain
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(UserError, match="a.jsonl.gz cannot be read: Compressed file ended"):
        prepare({"x": text_files("x", str(tmp_path / "a.jsonl.gz"))}, "", tmp_path / "again", 1)


def test_what_is_skipped_in_a_folder_is_counted_and_named(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    texts = tmp_path / "texts"
    (texts / ".hidden").mkdir(parents=True)
    for name in ("a.txt", "B.TXT", "c.json", ".hidden/d.md", "e.jsonl.gz", "../elsewhere/f.txt"):
        (texts / name).write_bytes(
            gzip.compress(b'{"text": ""}\n') if name.endswith("gz") else b"text"
        )
    assert text_files("x", str(texts)).names == ("a.txt", "e.jsonl.gz")
    (texts / "e.jsonl").write_text('{"text": ""}')
    (texts / "g.txt").symlink_to(tmp_path / "elsewhere" / "f.txt")
    (texts / "folder").symlink_to(tmp_path / "elsewhere")
    (texts / "gone.txt").symlink_to(tmp_path / "nowhere")
    found = text_files("x", str(texts))
    assert found.names == ("a.txt", "e.jsonl", "g.txt"), (
        "of a packed file and its unpacked copy, one"
    )
    assert found.skipped == ("B.TXT", "c.json", "e.jsonl.gz", "folder", "gone.txt")
    assert main(["data", "prepare", str(texts), "--out", str(tmp_path / "out"), "--workers=1"]) == 0
    notice = (
        f"titanlite: {texts}: 5 skipped: B.TXT, c.json, e.jsonl.gz, … "
        "(only .txt, .jsonl, .jsonl.gz, .parquet files"
    )
    assert notice in capsys.readouterr().err
    (texts / "B.TXT").unlink()
    assert not text_files("x", str(tmp_path / "elsewhere")).notice
    argv = [*TINY, "--training.dataset=text", f"--training.dataset_path={texts}"]
    check_machine(job(argv, 1), "cpu", 1)
    assert f"titanlite: {texts}: 4 skipped: c.json" in capsys.readouterr().out


def test_the_command_prints_the_options_with_which_its_shards_are_trained_on(
    tmp_path, assets, capsys
):
    (tmp_path / "a.txt").write_text("one text")
    for number, tokenizer in enumerate(([], ["--tokenizer", str(assets)])):
        out = tmp_path / f"out{number}"
        assert (
            main(
                [
                    "data",
                    "prepare",
                    str(tmp_path / "a.txt"),
                    "--out",
                    str(out),
                    "--workers=1",
                    *tokenizer,
                ]
            )
            == 0
        )
        words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
        opened = open_tokenizer(job([*QUIET, *words], 1))
        assert opened and (opened.assets == str(out)) == bool(tokenizer)


def test_the_command_prepares_shows_and_names_mistakes(library, tmp_path, capsys):
    assert main(["data", "prepare", "--out", str(tmp_path / "out")]) == 2
    assert "the following arguments are required: SRC" in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "there is no such folder or file" in capsys.readouterr().err
    assert (
        main(["data", "prepare", str(library), "--out", str(tmp_path / "out"), "--tokenizer", "no"])
        == 2
    )
    assert capsys.readouterr().err.startswith(
        'titanlite: --tokenizer = "no": cannot read tokenizer.json there'
    )
    assert (
        main(["data", "prepare", str(library), "--out", str(tmp_path / "out"), "--worker", "2"])
        == 2
    )
    assert "unknown option --worker; did you mean --workers?" in capsys.readouterr().err
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a" * 299 + "\x1b")
    two.write_text("b" * 99)
    assert (
        main(["data", "prepare", str(one), str(two), "--out", str(tmp_path / "out"), "--workers=1"])
        == 0
    )
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "401 tokens, 2 documents, 2 shards" in shown and "75.1%" in shown and "24.9%" in shown
    assert "aaaa" in shown and "\x1b" not in shown
    assert main(["data", "show", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("documents", "shards", "line"),
    [
        (1, [{}], "1,554 tokens, 1 document, 1 shard"),
        (2, [{}, {}], "1,554 tokens, 2 documents, 2 shards"),
    ],
)
def test_one_document_and_one_shard_are_singular(documents, shards, line):
    assert counts_line({"tokens": 1554, "documents": documents, "shards": shards}) == line


def test_text_is_tokenized_again_only_when_it_changes(assets, tmp_path):
    from titanlite.data.sources import open_source

    (tmp_path / "a.txt").write_text("def f(): return 1")
    first = open_source("training", "text", str(tmp_path), load_tokenizer(str(assets)), 500)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / ".titanlite").rglob("*.bin")}
    again = open_source("training", "text", str(tmp_path), load_tokenizer(str(assets)), 500)
    assert again.fingerprint == first.fingerprint
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / ".titanlite").rglob("*.bin")}
    (tmp_path / "a.txt").write_text("def g(): return 2")  # the same size
    changed = open_source("training", "text", str(tmp_path), load_tokenizer(str(assets)), 500)
    assert "def g(): return 2" in load_tokenizer(str(assets)).decode(
        changed.read(0, changed.tokens).tolist()
    )


def test_preparing_changed_text_into_the_same_folder_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    prepare({"x": text_files("x", str(tmp_path / "a.txt"))}, "", tmp_path / "out", 1)
    (tmp_path / "a.txt").write_text("TEXT")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    with pytest.raises(UserError, match="has changed since"):
        prepare({"x": text_files("x", str(tmp_path / "a.txt"))}, "", tmp_path / "out", 1)


def test_a_folder_with_other_files_is_left_unchanged(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("")
    with pytest.raises(UserError, match="was not made by this command"):
        prepare({"x": Documents(tmp_path, ("a.txt",), (4,))}, "", tmp_path / "out", 1)
    shutil.rmtree(tmp_path / "out")
    assert (
        prepare({"x": Documents(tmp_path, ("a.txt",), (4,))}, "", tmp_path / "out", 1)["tokens"]
        == 5
    )
    assert np.load(tmp_path / "out" / "shard-000000.ends.npy").tolist() == [5]


def read_shards(path: str, ranks: int, workers: int) -> list[bytes]:
    """Read three steps on all ranks; return their samples in the order of micro-batches."""
    source = ShardSource("training", Path(path), 500, -1)
    windows = Windows([Concatenated(source, 32, False, "training")], 32, seed=0, repeat=True)
    settings = Dataloader(num_workers=workers)
    per_rank = [
        list(
            BatchPrefetcher(
                build_loader(windows, RankSlice(rank, ranks, 8 // ranks), 0, 3, settings),
                torch.device("cpu"),
            )
        )
        for rank in range(ranks)
    ]
    batches = [batch for step in zip(*per_rank, strict=True) for batch in step]
    return [row.numpy().tobytes() for batch in batches for row in batch.rows]


def test_shards_are_read_in_the_same_order_by_any_ranks_and_workers(library, assets, tmp_path):
    prepare({"library": text_files("test", str(library))}, str(assets), tmp_path / "out", workers=1)
    expected = read_shards(str(tmp_path / "out"), 1, 0)
    assert len(set(expected)) == 24
    for ranks, workers in ((4, 0), (1, 2), (4, 2)):
        assert read_shards(str(tmp_path / "out"), ranks, workers) == expected
