"""Preparing text: the same shards with any number of workers, complete or absent, and resumable
after a kill.
"""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.data.assets import make_assets
from tests.jobs import QUIET, TEXT, TINY, job
from tests.messages import refused, says
from tests.runs import environment, wait_for
from titanlite.data import documents as documents_module
from titanlite.data import prepare as module
from titanlite.data.documents import pieces, segments, text_files
from titanlite.data.prepare import prepare, prepare_in_cache
from titanlite.data.shards import ShardSource
from titanlite.data.tokenizer import load_tokenizer, open_tokenizer
from titanlite.launch.preflight import check_machine
from titanlite.runtime.store import LocalPath
from titanlite.tools.data import counts_line


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> LocalPath:
    """Text files and JSON lines, with line ends of all kinds."""
    folder = tmp_path_factory.mktemp("library")
    lines = []
    for number, path in enumerate(sorted((TEXT / "train").iterdir())):
        if number % 2:
            lines.append(json.dumps({"text": path.read_text(), "source": path.name}))
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "line_ends.txt").write_bytes(b"Windows\r\nold Mac\rUnix\n")
    (folder / "more.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory, library):
    texts = [path.read_text() for path in sorted(library.glob("*.txt"))]
    return make_assets(tmp_path_factory.mktemp("assets"), texts, 500)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 1 << 13)


def prepared(path: LocalPath, out: LocalPath, assets: object = "", name: str = "x") -> dict:
    """Prepare a file or folder in this process."""
    return prepare({name: text_files(name, str(path))}, str(assets), out, workers=1)


def texts_of(path: LocalPath, limit: int) -> list[str]:
    """Return the documents, or their parts, that are read in pieces of about this many bytes."""
    found = pieces(text_files("x", str(path)), limit)
    root = path if path.is_dir() else path.parent
    return [segment.text for piece in found for segment in segments(root, piece)]


def test_shards_hold_every_document_once(library, assets, tmp_path):
    manifest = prepared(library, tmp_path / "out", assets)
    tokenizer = load_tokenizer(str(assets))
    documents = []
    for path in sorted(library.iterdir()):
        content = path.read_bytes()  # read_text would turn all line ends into "\n"
        if path.suffix == ".jsonl":
            documents += [json.loads(line)["text"] for line in content.splitlines()]
        else:
            documents.append(content.decode())
    expected: list[int] = []
    for text in documents:
        expected += [*tokenizer.encode(text), tokenizer.end]
    source = ShardSource(tmp_path / "out", 500)
    assert (manifest["tokens"], manifest["documents"]) == (len(expected), len(documents))
    assert source.read(0, source.tokens).tolist() == expected
    assert len(manifest["shards"]) > 5
    ends = source.document_ends()
    assert len(ends) == len(documents) and {expected[end - 1] for end in ends} == {tokenizer.end}
    assert prepared(library, tmp_path / "out", assets) == manifest, "already done"
    with refused(f"{tmp_path}/out", "other data"):
        prepared(library, tmp_path / "out")


COMMAND = """
import sys, time
from titanlite.cli import main
from titanlite.data import prepare

def slowly(*arguments):
    time.sleep(0.3)
    write(*arguments)

write, prepare._write, prepare.UNIT_BYTES = prepare._write, slowly, 1 << 13
if __name__ == "__main__":
    sys.exit(main(["data", "prepare", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_a_killed_run_resumes_and_writes_the_same_bytes(library, assets, tmp_path):
    """Kill the command and its workers before the first shard and after one, then let a run
    finish.
    """
    script, out, staging = tmp_path / "command.py", tmp_path / "out", tmp_path / ".out.preparing"
    script.write_text(COMMAND)
    prepared(library, tmp_path / "undisturbed", assets, str(library))
    command = [sys.executable, script, library, "--tokenizer", assets, "--out", out, "--workers=2"]
    options = {"env": environment(), "text": True, "stdout": subprocess.PIPE}
    for made in (staging / ".plan.json", staging / "shard-000000.bin"):
        process = subprocess.Popen(command, start_new_session=True, **options)
        wait_for(made, process)
        if made.suffix == ".bin":
            process.kill()  # the workers exit by themselves: they hold the other end of the pipe
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        assert not out.exists()
    subprocess.run(command, check=True, timeout=60, **options)
    undisturbed = {path.name: path.read_bytes() for path in (tmp_path / "undisturbed").iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == undisturbed
    assert not staging.exists()


def test_what_an_earlier_try_left_is_continued_or_if_of_other_data_discarded(tmp_path):
    notices: list[str] = []

    def left(identity: str) -> set[str]:
        staging = module._open_staging(tmp_path / "out", identity, notices.append)
        assert staging == tmp_path / ".out.preparing" and not staging.is_symlink()
        return {path.name for path in staging.iterdir()}

    staging = tmp_path / ".out.preparing"
    left("these")
    (staging / "shard-000001.bin").touch()
    assert left("these") == {".plan.json", "shard-000001.bin"} and not notices
    assert left("others") == {".plan.json"}
    says(notices[0], staging, "different data")
    elsewhere = staging.rename(tmp_path / "elsewhere")
    staging.symlink_to(elsewhere)
    assert left("these") == {".plan.json"}
    assert "others" in (elsewhere / ".plan.json").read_text(), "only the link was removed"


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


def test_a_line_belongs_to_the_piece_it_begins_in_and_packed_lines_are_read_as_the_unpacked_ones(
    tmp_path,
):
    texts = ["x" * n for n in (1, 50, 3, 0, 200, 7)]
    content = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    for limit in (1, 7, 13, 64, 1000):
        assert texts_of(plain, limit) == texts_of(packed, limit) == texts, limit
    assert not text_files("x", str(packed)).are_plain
    packed.write_bytes(packed.read_bytes()[:-9])
    with refused(packed):
        texts_of(packed, 100)


def test_a_long_text_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "SEGMENT_BYTES", 40)
    text = "".join(f"line {n}\n" * (n % 3) for n in range(60)) + "no newline at the end"
    (tmp_path / "a.txt").write_text(text)
    for limit in (1, 17, 100, 10_000):
        found = pieces(text_files("x", str(tmp_path)), limit)
        parts = [part for piece in found for part in segments(tmp_path, piece)]
        assert "".join(part.text for part in parts) == text
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        assert max(len(part.text) for part in parts) < 70


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_long_document_is_tokenized_in_parts_with_the_tokens_of_the_whole(
    tmp_path, monkeypatch, suffix
):
    """Lines are cut only where no white space is around their end, in a shard's parts too."""
    block = "def f(x):\n    return x\n\n\nclass A:  \n\u3000\u3000one\r\n\ttwo\nthree\nfour"
    path, text = tmp_path / f"a{suffix}", "\n".join([block] * 60)
    tokenizer = load_tokenizer(str(make_assets(tmp_path, [text])))
    line = json.dumps({"text": text}).encode()
    if suffix == ".parquet":
        arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.table({"text": [text]}), path)
    elif suffix == ".txt":
        path.write_bytes(text.encode())
    else:
        path.write_bytes(gzip.compress(line) if suffix == ".jsonl.gz" else line)
    monkeypatch.setattr(documents_module, "SEGMENT_BYTES", 240)
    monkeypatch.setattr(module, "UNIT_BYTES", 300)
    parts = texts_of(path, 300)
    assert len(parts) > 10 and max(map(len, parts)) < 400 and "".join(parts) == text
    assert prepared(path, tmp_path / "out", tmp_path)["documents"] == 1
    source = ShardSource(tmp_path / "out", 500)
    assert source.read(0, source.tokens - 1).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [("one 二 " * 200, " "), ("\n\n" * 500, "\n"), ("語" * 500, ""), ("\xe9\xff" * 500, "")],
)
def test_a_long_text_without_such_lines_is_cut_before_a_word_at_a_line_end_or_at_a_character(
    tmp_path, monkeypatch, text, where
):
    monkeypatch.setattr(documents_module, "SEGMENT_BYTES", 100)
    content = text.encode("latin-1" if text[0] == "\xe9" else "utf-8")
    (tmp_path / "a.txt").write_bytes(content)
    first, *later = parts = texts_of(tmp_path, 250)
    assert "".join(parts) == content.decode(errors="replace") and max(map(len, parts)) <= 150
    assert later and (
        all(part.startswith(where) for part in later)
        if where == " "
        else all(part.endswith(where) for part in parts)
    )


def test_parquet_rows_are_documents_and_a_damaged_file_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the hf extra")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"

    def write(rows: Any, key: str = "text", **options: int) -> None:
        pyarrow.parquet.write_table(
            arrow.table({key: rows, "b": range(len(rows))}), path, **options
        )

    write(["one", "two", "three"], row_group_size=2)
    assert texts_of(path, 1) == ["one", "two", "three"]
    for rows in (
        arrow.array(["a", None]).dictionary_encode(),
        arrow.array(["a", None], arrow.large_string()),
    ):
        write(rows)
        assert texts_of(path, 1) == ["a", ""]
    write([1], "other")
    with refused(path, '"text"', "other, b"):
        texts_of(path, 1)
    for rows, kind in (([1], "int64"), ([b"a"], "binary"), ([["a"]], "list<")):
        write(rows)
        with refused(path, f'"text" holds {kind}'):
            texts_of(path, 1)
    write([f"{i} text" for i in range(1000)])
    content = path.read_bytes()
    for damaged in (b"PAR1xxxxPAR1", content[:-20], content[:4] + b"\xff" * 400 + content[404:]):
        path.write_bytes(damaged)
        with refused(path, "damaged"):
            texts_of(path, 1 << 20)


BAD_LINES = {
    "{broken": "not JSON: ",
    '"text"': "JSON object",
    '{"body": "x"}': 'no "text" in it but body',
    '{"text": null}': '"text" is null',
    '{"text": ["a"]}': '"text" is ["a"]',
    '{"text": "half \\ud83d"}': '"text" has \\ud83d',
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_json_line_without_text_is_named_with_its_file_and_number(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    for line, named in BAD_LINES.items():
        content = ('{"text": "fine"}\n\n' + line + "\n").encode()
        path.write_bytes(gzip.compress(content) if suffix == ".jsonl.gz" else content)
        with refused(f"{path}: line 3: ", named):
            prepared(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_much_text_makes_no_more_shards_than_a_start_can_look_at(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("ab" * 500)
    monkeypatch.setattr(module, "UNIT_BYTES", 100)
    monkeypatch.setattr(module, "UNITS", 8)
    assert len(prepared(tmp_path, tmp_path / "out")["shards"]) == 8
    monkeypatch.setattr(module, "MOST_UNIT_BYTES", 2000)
    assert len(prepared(tmp_path, tmp_path / "bounded")["shards"]) == 20


def test_what_is_skipped_in_a_folder_is_counted_and_named(tmp_path, capsys, tool):
    (tmp_path / "elsewhere").mkdir()
    texts = tmp_path / "texts"
    (texts / ".hidden").mkdir(parents=True)
    for name in ("a.txt", "B.TXT", "c.json", ".hidden/d.md", "../elsewhere/f.txt"):
        (texts / name).write_text("text")
    (texts / "e.jsonl.gz").write_bytes(gzip.compress(b'{"text": ""}\n'))
    assert text_files("x", str(texts)).names == ("a.txt", "e.jsonl.gz")
    (texts / "e.jsonl").write_text('{"text": ""}')
    (texts / "g.txt").symlink_to(tmp_path / "elsewhere" / "f.txt")
    (texts / "folder").symlink_to(tmp_path / "elsewhere")
    (texts / "gone.txt").symlink_to(tmp_path / "nowhere")
    found = text_files("x", str(texts))
    # Of a packed file and its unpacked copy, one.
    assert found.names == ("a.txt", "e.jsonl", "g.txt")
    assert found.skipped == ("B.TXT", "c.json", "e.jsonl.gz", "folder", "gone.txt")
    said = tool("data prepare", texts, "--out", tmp_path / "out", "--workers=1")
    says(said, f"{texts}: 5 skipped: B.TXT, c.json, e.jsonl.gz, … (only .txt, .jsonl, ")
    (texts / "B.TXT").unlink()
    assert not text_files("x", str(tmp_path / "elsewhere")).notice
    check_machine(job([*TINY, f"--training.dataset_path={texts}"], 1), "cpu", 1)
    says(capsys.readouterr().out, f"{texts}: 4 skipped: c.json")


def test_the_command_prints_the_options_with_which_its_shards_are_trained_on(
    tmp_path, assets, tool
):
    (tmp_path / "a.txt").write_text("one text")
    for number, tokenizer in enumerate(([], ["--tokenizer", assets])):
        out = tmp_path / f"out{number}"
        words = (tmp_path / "a.txt", "--out", out, "--workers=1", *tokenizer)
        printed = tool("data prepare", *words).splitlines()[-1].partition(": ")[2]
        opened = open_tokenizer(job([*QUIET, *shlex.split(printed)], 1))
        assert opened and (opened.assets == str(out)) == bool(tokenizer)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("prepare --out out", "SRC"),
        ("prepare nowhere --out out", "nowhere"),
        ("prepare . --out out --tokenizer no", '--tokenizer = "no": '),
        ("prepare . --out out --worker 2", "--workers?"),
        ("prepare . ./ --out out", "SRC . and ./ both have"),
        ("prepare s3://bucket/text --out out", 'SRC = "s3://bucket/text": must be a folder here'),
        ("prepare . a.txt --out out", "/a.txt; drop"),
    ],
)
def test_a_mistake_is_named(tmp_path, tool, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    says(tool(f"data {words}", code=2), named)
    assert not (tmp_path / "out").exists()


def test_show_has_the_shares_of_the_sources_and_their_text_without_control_characters(
    tmp_path, tool
):
    one, two, out = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "out"
    one.write_text("a" * 299 + "\x1b")
    two.write_text("b" * 99)
    tool("data prepare", one, two, "--out", out, "--workers=1")
    shown = tool("data show", out)
    says(shown, "401 tokens, 2 documents, 2 shards", "75.1%", "24.9%", "aaaa")
    assert "\x1b" not in shown
    single = {"tokens": 1554, "documents": 1, "shards": [{}]}
    assert counts_line(single) == "1,554 tokens, 1 document, 1 shard"


def test_a_folder_of_changed_text_or_with_other_files_is_left_unchanged(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("text")
    out.mkdir()
    (out / "notes").touch()
    with refused(out):
        prepared(text, out)
    (out / "notes").unlink()
    assert prepared(text, out)["tokens"] == 5
    assert np.load(out / "shard-000000.ends.npy").tolist() == [5]
    text.write_text("TEXT")
    os.utime(text, ns=(1, 1))
    with refused(out, "changed"):
        prepared(text, out)
