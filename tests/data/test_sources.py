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
from titanlite.data.documents import standard_library
from titanlite.data.packing import Concatenated
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer, open_tokenizer
from titanlite.errors import RunFailed, UserError

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(
        tmp_path_factory.mktemp("assets"),
        ["def f(x): return x + 1\n" * 20, "the cat sat on the mat"],
    )


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
    assert not set(train.names) & set(held_out.names)
    assert 0.03 < len(held_out.names) / len(train.names + held_out.names) < 0.05
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in train.names)


def test_bytes_are_the_documents_with_end_tokens(texts):
    source = open_source("training", "text", str(texts), BYTES, 256)
    expected = b"def f(x):\n    return x\0\0the cat\0"
    assert source.tokens == len(expected)
    for start in range(len(expected)):
        for count in (1, 5, len(expected) - start):
            ids = source.read(start, min(count, len(expected) - start))
            assert bytes(ids.astype(np.uint8)) == expected[start : start + count]


def test_text_is_tokenized_once_into_a_cache(texts, assets):
    tokenizer = load_tokenizer(str(assets))
    expected = []
    for name in ("a.txt", "b/c.txt", "b/d.txt"):
        expected += [*tokenizer.encode((texts / name).read_text()), tokenizer.end]
    with ThreadPoolExecutor(4) as threads:  # many processes may start at once
        sources = list(
            threads.map(
                lambda _: open_source("training", "text", str(texts), tokenizer, 1000), range(4)
            )
        )
    for source in (*sources, pickle.loads(pickle.dumps(sources[0]))):
        assert source.read(0, source.tokens).tolist() == expected
    assert len(list((texts / ".titanlite").glob("*/*.bin"))) == 1
    assert tokenizer.decode(expected[:3]) in (texts / "a.txt").read_text()


def test_a_cache_that_cannot_be_written_names_the_variable_for_another_place(
    texts, assets, tmp_path, monkeypatch
):
    tokenizer = load_tokenizer(str(assets))
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.W_OK or Path(path) != texts
    )  # root may write anywhere
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    message = (
        f"{texts} can't be written to, nor can the user's cache: "
        ".*name a folder .* in XDG_CACHE_HOME"
    )
    with pytest.raises(UserError, match=message):
        open_source("training", "text", str(texts), tokenizer, 1000)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a random user id
    with pytest.raises(UserError, match=message):
        open_source("training", "text", str(texts), tokenizer, 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (
        open_source("training", "text", str(texts), tokenizer, 1000).folder.parent
        == tmp_path / "cache/titanlite"
    )
    monkeypatch.undo()
    monkeypatch.delenv("HOME", raising=False)
    assert (
        open_source("training", "text", str(texts), tokenizer, 1000).folder.parent
        == texts / ".titanlite"
    )


def test_the_fingerprint_changes_with_the_data_and_the_tokenizer(texts, assets):
    fingerprints = {open_source("training", "text", str(texts), BYTES, 256).fingerprint}
    fingerprints.add(
        open_source("training", "text", str(texts), load_tokenizer(str(assets)), 1000).fingerprint
    )
    (texts / "b" / "d.txt").write_text("the cats")
    for changed in ("the cat.", "cat. the"):  # of the same size
        (texts / "b" / "d.txt").write_text(changed)
        fingerprints.add(open_source("training", "text", str(texts), BYTES, 256).fingerprint)
        fingerprints.add(
            open_source(
                "training", "text", str(texts), load_tokenizer(str(assets)), 1000
            ).fingerprint
        )
    (texts / "b" / "d.txt").write_text("the cats")
    fingerprints.add(open_source("training", "text", str(texts), BYTES, 256).fingerprint)
    (texts / "b" / "d.txt").rename(texts / "e.txt")
    fingerprints.add(open_source("training", "text", str(texts), BYTES, 256).fingerprint)
    assert len(fingerprints) == 8


def test_a_missing_path_an_empty_folder_and_an_unknown_name_are_refused(tmp_path):
    for name, path, message in (
        ("text", str(tmp_path / "nowhere"), "there is no such folder or file"),
        ("tokens", str(tmp_path / "nowhere"), "there is no such folder or file"),
        (
            "text",
            str(tmp_path),
            "no text there (looked for .txt, .jsonl, .jsonl.gz, .parquet files)",
        ),
        ("txt", "", "did you mean text? Legal: python-stdlib"),
    ):
        with pytest.raises(UserError, match="training.dataset") as caught:
            open_source("training", name, path, BYTES, 256)
        assert message in str(caught.value)


def test_too_little_text_for_one_window_is_refused(texts):
    source = open_source("training", "text", str(texts), BYTES, 256)
    with pytest.raises(UserError, match="dataset too small: 32 tokens, need at least 33"):
        Concatenated(source, 32, masked=False, key="training")
    assert Concatenated(source, 31, masked=False, key="training").samples == 1


def test_a_file_that_changes_during_the_run_is_named(texts):
    source = open_source("training", "text", str(texts), BYTES, 256)
    (texts / "a.txt").write_text("def")
    with pytest.raises(RunFailed, match="a.txt is shorter than it was"):
        source.read(0, 20)
    (texts / "a.txt").unlink()
    with pytest.raises(RunFailed, match="data changed during the run: .*a.txt"):
        source.read(0, 20)


def test_truncation_in_a_tokenizer_file_is_not_applied(assets, tmp_path):
    backend = Tokenizer.from_file(str(assets / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    original, limited = load_tokenizer(str(assets)), load_tokenizer(str(tmp_path))
    text = "the cat sat on the mat, def f(x): return x"
    assert limited.encode(text) == original.encode(text) and len(original.encode(text)) > 3
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json is not JSON"):
        load_tokenizer(str(tmp_path))


def test_a_missing_broken_or_too_large_tokenizer_is_named(tmp_path, assets):
    with pytest.raises(
        UserError,
        match="model.hf_assets_path = .*cannot read tokenizer.json .*hf download REPO --include",
    ):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(
        UserError,
        match=f'model.hf_assets_path = "{assets}": the tokenizer has ids up to .* beyond the '
        "model's vocabulary of 10; --model.overrides.vocab_size [1-9]",
    ):
        open_tokenizer(
            job([*TINY, f"--model.hf_assets_path={assets}", "--model.overrides.vocab_size=10"], 1)
        )


def test_the_text_is_in_any_field_or_column(tmp_path):
    lines = [json.dumps({"text": "wrong", "content": text}) for text in ("ab", "cd")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = open_source("training", "text", str(tmp_path), BYTES, 256, "content")
    assert bytes(source.read(0, source.tokens).astype(np.uint8)) == b"ab\0cd\0"
    other = open_source("training", "text", str(tmp_path), BYTES, 256)
    assert bytes(other.read(0, 5).astype(np.uint8)) == b"wrong", "another field, another cache"
    with pytest.raises(UserError, match='line 1: no "body" in it'):
        open_source("training", "text", str(tmp_path), BYTES, 256, "body")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "table"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"content": ["ab", "cd"]}), folder / "a.parquet")
    source = open_source("training", "text", str(folder), BYTES, 256, "content")
    assert bytes(source.read(0, source.tokens).astype(np.uint8)) == b"ab\0cd\0"
    with pytest.raises(UserError, match='no column "text"; it has: content'):
        open_source("training", "text", str(folder), BYTES, 256)
