"""OLMo's ids and the table beside them are read as they are, and raw ids in the type that is
named.
"""

from __future__ import annotations

import gzip
import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import refused, says
from titanlite.config.schema import Dataloader
from titanlite.data.packing import DOCUMENTS, LABELS, Concatenated, Packed
from titanlite.data.sources import open_source


def write(folder: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    """Write documents as dolma's MemmapWriter does, one of them without an end token."""
    ids = np.array([token for document in documents for token in document], dtype)
    stops = np.cumsum([len(document) for document in documents])
    rows = [
        f'{stop - len(document)},{stop},"doc, {number}",./a.jsonl.gz,{number}\r\n'
        for number, (stop, document) in enumerate(zip(stops, documents, strict=True))
    ]
    ids.tofile(folder / "part-0.npy")
    (folder / "part-0.csv.gz").write_bytes(gzip.compress("".join(rows).encode()))
    return folder / "part-0.npy"


def opened(folder: Path, **settings: Any):
    given = Dataloader(**settings)
    return open_source("training", "tokens", str(folder), None, 300, "text", given)


DOCUMENTS_OF = [[5, 6, 7, 8], [], [9, 10, 11, 12, 13]]


def test_documents_end_where_the_table_says(tmp_path):
    """No end token is there, and an empty document is none; numpy's own files may have a table."""
    path = write(tmp_path, DOCUMENTS_OF)
    for _ in range(2):
        source = opened(tmp_path)
        assert source.read(0, 9).tolist() == [*range(5, 14)]
        assert source.document_ends().tolist() == [4, 9]
        window = np.empty((4, 6), np.int64)
        Concatenated(source, 6, True, "training").fill(window, 0)
        assert window[LABELS].tolist() == [6, 7, 8, -100, 10, 11]
        assert window[DOCUMENTS].tolist() == [0, 0, 0, 0, 1, 1]
        assert Packed(source, 5, "training").samples == 2
        assert pickle.loads(pickle.dumps(source)).document_ends().tolist() == [4, 9]
        np.save(path, np.fromfile(path, np.uint16))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("name", ["ids.npy", "ids.bin"])
def test_ids_of_a_file_that_does_not_say_their_type_have_the_named_one(tmp_path, name, dtype):
    ids = np.arange(200, dtype=dtype)
    ids.tofile(tmp_path / name)
    source = opened(tmp_path, token_dtype=dtype)
    assert source.read(0, 200).tolist() == ids.tolist()
    assert pickle.loads(pickle.dumps(source)).tokens == 200


def test_what_a_file_says_of_its_ids_is_above_the_named_type(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.int64))
    assert opened(tmp_path, token_dtype="uint16").tokens == 9


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_ids_that_would_be_read_in_another_type_are_named(tmp_path, dtype):
    path = write(tmp_path, DOCUMENTS_OF, "uint32")
    with refused("csv.gz", "9 ids", "18", "token_dtype"):
        opened(tmp_path)
    (tmp_path / "part-0.csv.gz").unlink()
    np.arange(1, 99, dtype=dtype).tofile(path)
    with refused("part-0.npy", "4 bytes"):
        opened(tmp_path)
    assert opened(tmp_path, token_dtype=dtype).tokens == 98
    np.zeros(99, np.uint16).tofile(path)
    assert opened(tmp_path).tokens == 99, "all zero is no sign of that"


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (b"hello", "gzipped"),
        (gzip.compress(b"0,4\n4,9\n")[:-9], "damaged: Compressed"),
        (gzip.compress(b"start,end\n0,9\n"), "damaged: invalid"),
        (gzip.compress(b"0,4\n5,9\n"), "begin where"),
        (gzip.compress(b"0\n4,9\n"), "damaged"),
        (gzip.compress(b""), "of 0 ids"),
    ],
    ids=["no gzip", "cut", "a head", "a gap", "a column", "empty"],
)
def test_a_table_that_is_none_is_named_before_anything_starts(tmp_path, tool, table, named):
    write(tmp_path, DOCUMENTS_OF)
    (tmp_path / "part-0.csv.gz").write_bytes(table)
    out = tmp_path / "out"
    argv = ["--training.dataset=tokens", f"--training.dataset_path={tmp_path}"]
    says(tool("train", *argv, f"--job.dump_folder={out}", code=2), "part-0.csv.gz", named)
    assert not out.exists()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_what_dolmas_own_writer_writes_is_read(tmp_path, dtype):
    writer = pytest.importorskip(
        "dolma.tokenizer.memmap_writer",
        reason="needs dolma, whose numpy is older: pip install --no-deps dolma==1.2.1 anyascii "
        "fasttext msgspec necessary nltk omegaconf requirements-parser smart_open uniseg zstandard",
    )
    types = importlib.import_module("dolma.tokenizer.data_types")
    with writer.MemmapWriter(str(tmp_path / "part-0"), np.dtype(dtype), max_tokens=100) as theirs:
        for number, tokens in enumerate(DOCUMENTS_OF):
            row = types.TokenizerOutput.from_tokens(
                f"doc, {number}", "./a.jsonl.gz", number, tokens
            )
            assert theirs.write(row)
    source = opened(tmp_path, token_dtype=dtype)
    assert source.read(0, 9).tolist() == [*range(5, 14)]
    assert source.document_ends().tolist() == [4, 9]
    ids, table = (tmp_path / name for name in ("part-0.npy", "part-0.csv.gz"))
    found = ids.read_bytes(), gzip.decompress(table.read_bytes())
    write(tmp_path, DOCUMENTS_OF, dtype)
    assert found == (ids.read_bytes(), gzip.decompress(table.read_bytes()))
