"""Sources: the token stream of a data set, its fingerprint, and its errors."""

import json
import os
import pickle
import pwd
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.data.assets import make_assets
from tests.jobs import TINY, job
from tests.messages import refused
from titanlite.data.documents import standard_library
from titanlite.data.packing import Concatenated
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer, open_tokenizer
from titanlite.errors import RunFailed
from titanlite.launch.terminal import note
from titanlite.observe.console import open_log

BYTES = ByteTokenizer()


def opened(path: Path, tokenizer=BYTES, text_key: str = "text"):
    return open_source("training", "text", str(path), tokenizer, 1000, text_key)


def text_of(source) -> bytes:
    return bytes(source.read(0, source.tokens).astype(np.uint8))


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    texts = ["def f(x): return x + 1\n" * 20, "the cat sat on the mat"]
    return make_assets(tmp_path_factory.mktemp("assets"), texts)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("def f(x):\n    return x")
    (tmp_path / "b" / "c.txt").write_text("")
    (tmp_path / "b" / "d.txt").write_text("the cat")
    (tmp_path / "ignored.py").write_text("not text")
    return tmp_path


def test_the_standard_library_is_split_into_training_and_validation():
    train, held_out = standard_library(False), standard_library(True)
    assert sum(train.sizes) >= 5_000_000
    assert not {*train.names} & {*held_out.names}
    assert 0.03 < len(held_out.names) / len(train.names + held_out.names) < 0.05
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in train.names)


def test_text_whose_file_name_is_not_utf8_is_read(tmp_path, assets):
    """Also named in a log: of the launcher, and of a rank below torchrun."""
    stem = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{stem}.txt").write_text("the cat")
    plain = opened(tmp_path)
    assert text_of(plain) == b"the cat\0"
    (tmp_path / f"{stem}.txt").rename(tmp_path / f"{os.fsdecode(bytes([0xE8]))}.txt")
    assert opened(tmp_path).fingerprint != plain.fingerprint
    (tmp_path / f"{stem}.jsonl").write_text('{"text": "the mat"}')
    parquet, pyarrow = map(pytest.importorskip, ("pyarrow.parquet", "pyarrow"))
    with (tmp_path / f"{stem}.parquet").open("wb") as file:
        parquet.write_table(pyarrow.table({"text": ["the hat"]}), file)
    assert text_of(opened(tmp_path)) == b"the mat\0the hat\0the cat\0"
    source = opened(tmp_path, tokenizer := load_tokenizer(str(assets)))
    assert tokenizer.decode(source.read(0, 5).tolist()).startswith("the mat")
    (tmp_path / "logs").mkdir()
    note(tmp_path / "logs", f"cannot read {stem}")
    open_log(tmp_path, 0, launched=False, shown=False).info(f"cannot read {stem}")
    for log in ("launcher.log", "rank-0.log"):
        assert (tmp_path / "logs" / log).read_text().endswith(" cannot read caf?\n")


def test_text_is_tokenized_once_into_a_cache_and_again_when_it_changes(texts, assets):
    tokenizer = load_tokenizer(str(assets))

    def expected() -> list[int]:
        read = ((texts / name).read_text() for name in ("a.txt", "b/c.txt", "b/d.txt"))
        return [token for text in read for token in (*tokenizer.encode(text), tokenizer.end)]

    with ThreadPoolExecutor(4) as threads:  # many processes may start at once
        sources = [*threads.map(opened, [texts] * 4, [tokenizer] * 4)]
    for source in (*sources, pickle.loads(pickle.dumps(sources[0]))):
        assert source.read(0, source.tokens).tolist() == expected()
    (made,) = (texts / ".titanlite").glob("*/*.bin")
    written = made.stat().st_mtime_ns
    assert opened(texts, tokenizer).fingerprint == sources[0].fingerprint
    assert made.stat().st_mtime_ns == written
    (texts / "b/d.txt").write_text("cat the")  # of the same size
    changed = opened(texts, tokenizer)
    assert changed.read(0, changed.tokens).tolist() == expected()


def test_a_cache_that_cannot_be_written_names_the_variable_for_another_place(
    texts, assets, tmp_path, monkeypatch
):
    tokenizer = load_tokenizer(str(assets))

    def root_may_not(path, mode):
        return mode != os.W_OK or Path(path) != texts

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", root_may_not)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        (tmp_path / "file").touch()
        patch.setenv("HOME", str(tmp_path / "file"))
        with refused(texts, "XDG_CACHE_HOME"):
            opened(texts, tokenizer)
        patch.delenv("HOME")
        patch.setattr(pwd, "getpwuid", {}.__getitem__)  # a random user id
        with refused(texts, "XDG_CACHE_HOME"):
            opened(texts, tokenizer)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert opened(texts, tokenizer).folder.parent == tmp_path / "cache/titanlite"
    monkeypatch.delenv("HOME", raising=False)
    assert opened(texts, tokenizer).folder.parent == texts / ".titanlite"


def test_the_fingerprint_changes_with_the_data_and_the_tokenizer(texts, assets):
    tokenizers = (BYTES, load_tokenizer(str(assets)))
    fingerprints = [opened(texts, tokenizer).fingerprint for tokenizer in tokenizers]
    for changed in ("the cats", "the cat.", "cat. the"):  # of the same size
        (texts / "b" / "d.txt").write_text(changed)
        fingerprints += [opened(texts, tokenizer).fingerprint for tokenizer in tokenizers]
    (texts / "b" / "d.txt").rename(texts / "e.txt")
    fingerprints.append(opened(texts).fingerprint)
    assert len({*fingerprints}) == len(fingerprints)


@pytest.mark.parametrize(
    ("name", "path", "named"),
    [
        ("text", "nowhere", ["training.dataset_path", "no such"]),
        ("text", "", ["training.dataset_path", ".txt, .jsonl, .jsonl.gz, .parquet"]),
        ("txt", "", ["training.dataset", "text?", "python-stdlib"]),
    ],
)
def test_a_missing_path_an_empty_folder_and_an_unknown_name_are_refused(
    tmp_path, name, path, named
):
    with refused(*named):
        open_source("training", name, str(tmp_path / path), BYTES, 256)


def test_too_little_text_for_one_window_is_refused(texts):
    source = opened(texts)
    with refused("32 tokens", "33"):
        Concatenated(source, 32, masked=False, key="training")
    assert Concatenated(source, 31, masked=False, key="training").samples == 1


def test_a_file_that_changes_during_the_run_is_named(texts):
    source = opened(texts)
    (texts / "a.txt").write_text("def")
    with refused("a.txt", "shorter", kind=RunFailed):
        source.read(0, 20)
    (texts / "a.txt").unlink()
    with refused("a.txt", "changed", kind=RunFailed):
        source.read(0, 20)


def test_truncation_in_a_tokenizer_file_is_not_applied(assets, tmp_path):
    backend = Tokenizer.from_file(str(assets / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    original, limited = load_tokenizer(str(assets)), load_tokenizer(str(tmp_path))
    text = "the cat sat on the mat, def f(x): return x"
    assert limited.encode(text) == original.encode(text) and len(original.encode(text)) > 3


def test_a_missing_broken_or_too_large_tokenizer_is_named(tmp_path, assets):
    with refused("model.hf_assets_path = ", "tokenizer.json", "hf download REPO --include"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(tmp_path, "tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((assets / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with refused("tokenizer_config.json"):
        load_tokenizer(str(tmp_path))
    argv = [*TINY, f"--model.hf_assets_path={assets}", "--model.overrides.vocab_size=10"]
    with refused(f'model.hf_assets_path = "{assets}"', "10; --model.overrides.vocab_size "):
        open_tokenizer(job(argv, 1))


def test_the_text_is_in_any_field_or_column(tmp_path):
    lines = [json.dumps({"text": "wrong", "content": text}) for text in ("ab", "cd")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert text_of(opened(tmp_path, BYTES, "content")) == b"ab\0cd\0"
    # Another field, another cache.
    assert text_of(opened(tmp_path)) == b"wrong\0wrong\0"
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"content": ["ab", "cd"]}), table)
    assert text_of(opened(table, BYTES, "content")) == b"ab\0cd\0"
