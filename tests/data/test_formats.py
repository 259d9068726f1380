"""Token ids of Megatron and OLMo are read as they are: their type, and documents where the index or
the table beside them ends them; raw ids in the type that is named.
"""

import gzip
import pickle
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import refused, says
from titanlite.data.megatron import read_index
from titanlite.data.olmo import read_table
from titanlite.data.packing import LABELS, Concatenated, Packed
from titanlite.data.packing_plan import open_plan
from titanlite.data.sources import open_source

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def write(folder: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    """Write documents of sequences as Megatron's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    ids = np.array([token for sequence in sequences for token in sequence], dtype)
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    stops = np.cumsum(lengths, dtype=np.int64)
    bounds = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    index = b"MMIDIDX\0\0" + struct.pack("<QB", 1, CODES[dtype])
    index += struct.pack("<QQ", len(lengths), len(bounds))
    index += lengths.tobytes() + ((stops - lengths) * ids.itemsize).tobytes() + bounds.tobytes()
    (folder / "text.bin").write_bytes(ids.tobytes())
    (folder / "text.idx").write_bytes(index)
    return folder / "text.bin"


def opened(path: Path, vocabulary: int = 300, token_dtype: str = ""):
    return open_source("training", "tokens", str(path), None, vocabulary, "text", token_dtype)


@pytest.mark.parametrize("dtype", CODES)
def test_documents_end_where_the_index_says(tmp_path, dtype):
    """No end token is there; a document of two sequences is one; an empty one is none."""
    source = opened(write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10, 11, 12, 13]]], dtype))
    assert source.read(0, 9).tolist() == [*range(5, 14)]
    assert source.document_ends().tolist() == [4, 9]
    window = np.empty((4, 6), np.int64)
    Concatenated(source, 6, True, "training").fill(window, 0)
    assert window[LABELS].tolist() == [6, 7, 8, -100, 10, 11]
    Packed(source, 7, "training").fill(window := np.empty((2, 7), np.int64), 0)
    assert window[LABELS].tolist() == [6, 7, 8, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("at", "byte", "named"),  # without a byte, the rest is cut off
    [
        (0, b"x", "Megatron"),
        (20, b"", "Megatron"),
        (-3, b"", "truncated"),
        (1 << 20, b"\0", "truncated"),
        (9, b"\2", "version 2"),
        (17, b"\6", "type 6"),
        (17, b"\4", "order of"),
        (-8, b"\7", "damaged"),
        (-24, b"\1", "damaged"),  # the first document does not begin the file
        (-16, b"\7", "damaged"),
        (-9, b"\xff", "damaged"),
    ],
)
def test_another_index_is_named(tmp_path, at, byte, named):
    path = write(tmp_path, [[[5, 6, 7]], [[9, 10, 11]]])
    index = tmp_path / "text.idx"
    content = bytearray(index.read_bytes())
    content[at : at + 1 if byte else None] = byte
    index.write_bytes(content)
    with refused("text.idx", named):
        opened(path)


def test_a_bin_of_another_size_is_named(tmp_path):
    path = write(tmp_path, [[[5, 6, 7]]])
    path.write_bytes(path.read_bytes()[:-1])
    with refused("3 ids of uint16", "5 bytes"):
        opened(path)


THEIRS = """
import sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

folder = sys.argv[1]
other, ours = (
    IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=numpy.int32)
    for name in ("other", "text")
)
other.add_document(torch.tensor([14, 15]), [2])
other.finalize(f"{folder}/other.idx")
ours.add_document(torch.tensor([5, 6, 7, 8]), [3, 1])
ours.add_document(torch.tensor([]), [0])
for item in ([9, 10], [11, 12, 13]):
    ours.add_item(torch.tensor(item))
ours.end_document()
ours.add_index(f"{folder}/other")
ours.finalize(f"{folder}/text.idx")
"""


@pytest.mark.long
def test_what_megatrons_own_builder_writes_is_read(tmp_path):
    """Whole documents, one made item by item, an empty one, and another file's after them.

    In a process of its own: in one that had run other tests both failed once.
    """
    if not find_spec("megatron"):
        pytest.skip("needs megatron-core: pip install --no-deps megatron-core")
    subprocess.run([sys.executable, "-c", THEIRS, str(tmp_path)], check=True)
    source = opened(tmp_path / "text.bin")
    assert source.read(0, 11).tolist() == [*range(5, 16)]
    assert source.document_ends().tolist() == [4, 9, 11]
    found = [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]
    write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10], [11, 12, 13]], [[14, 15]]], "int32")
    assert found == [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]


def write_table(folder: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    """Write documents as dolma's MemmapWriter does, one of them without an end token."""
    ids = np.array([token for document in documents for token in document], dtype)
    stops = np.cumsum([len(document) for document in documents])
    rows = [
        f'{stop - len(document)},{stop},"doc, {number}",./a.jsonl.gz,{number}\r\n'
        for number, (stop, document) in enumerate(zip(stops, documents, strict=True))
    ]
    ids.tofile(folder / "part-0.npy")
    table = gzip.compress("".join(rows).encode(), mtime=0)  # the time would be other bytes
    (folder / "part-0.csv.gz").write_bytes(table)
    return folder / "part-0.npy"


DOCUMENTS_OF = [[5, 6, 7, 8], [], [9, 10, 11, 12, 13]]


def test_documents_end_where_the_table_says(tmp_path):
    """No end token is there, and an empty document is none; numpy's own files may have a table."""
    path = write_table(tmp_path, DOCUMENTS_OF)
    for _ in range(2):
        source = opened(tmp_path)
        assert source.read(0, 9).tolist() == [*range(5, 14)]
        assert source.document_ends().tolist() == [4, 9]
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
    path = write_table(tmp_path, DOCUMENTS_OF, "uint32")
    with refused("csv.gz", "9 ids", "18", "token_dtype"):
        opened(tmp_path)
    (tmp_path / "part-0.csv.gz").unlink()
    np.arange(1, 99, dtype=dtype).tofile(path)
    with refused("part-0.npy", "4 bytes"):
        opened(tmp_path)
    assert opened(tmp_path, token_dtype=dtype).tokens == 98
    if dtype == "int64":  # read as uint32, every second id would be 0
        with refused("part-0.npy", "8 bytes", "token_dtype"):
            opened(tmp_path, vocabulary=100_000)
    np.zeros(99, np.uint16).tofile(path)
    assert opened(tmp_path).tokens == 99, "all zero is no sign of that"


@pytest.mark.parametrize("kind", [write, write_table])
def test_other_ends_of_documents_are_other_data_with_a_plan_of_their_own(tmp_path, kind):
    """And so is another length of windows."""
    found = []
    for every, seq_len in ((8, 32), (32, 32), (32, 16)):
        documents: Any = [[*range(at, at + every)] for at in range(1, 65, every)]
        kind(tmp_path, [[each] for each in documents] if kind is write else documents)
        read_index.cache_clear()  # as a new process begins
        read_table.cache_clear()
        source = opened(tmp_path)
        found.append((source.fingerprint, [*open_plan(source, seq_len).pieces(0)]))
    (eights, many), (others, few), (same, short) = found
    assert eights != others == same
    assert len(many) > len(few) and few != short


def test_other_ids_anywhere_in_a_long_shard_are_other_data(tmp_path):
    ids = np.arange(8192, dtype=np.uint16) % 200 + 1
    ids.tofile(tmp_path / "a.npy")
    before = opened(tmp_path).fingerprint
    ids[2100:4100] += 5
    ids.tofile(tmp_path / "a.npy")
    assert opened(tmp_path).fingerprint != before


def test_shards_of_subfolders_are_read_and_hidden_files_are_not(tmp_path):
    (tmp_path / "part2" / ".cache").mkdir(parents=True)
    for name, first in (("a.npy", 1), ("part2/b.npy", 101)):
        np.arange(first, first + 64, dtype=np.uint16).tofile(tmp_path / name)
    for hidden in ("._a.npy", "part2/._b.npy", "part2/.cache/c.npy"):
        (tmp_path / hidden).write_bytes(b"\0\5\26\7" * 32)
    assert opened(tmp_path).read(0, 128).tolist() == [*range(1, 65), *range(101, 165)]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (b"hello", "gzipped"),
        (gzip.compress(b"0,4\n4,9\n")[:-9], "damaged: Compressed"),
        (gzip.compress(b"start,end\n0,9\n"), "damaged: invalid"),
        (gzip.compress(b"0,4\n5,9\n"), "begin where"),
        (gzip.compress(b"0\n4,9\n"), "damaged"),
        (gzip.compress(b""), "has 0 ids"),
    ],
    ids=range(6),  # bytes with a time in them would be other names in each worker
)
def test_a_table_that_is_none_is_named_before_anything_starts(tmp_path, tool, table, named):
    write_table(tmp_path, DOCUMENTS_OF)
    (tmp_path / "part-0.csv.gz").write_bytes(table)
    out = tmp_path / "out"
    argv = ["--training.dataset=tokens", f"--training.dataset_path={tmp_path}"]
    says(tool("train", *argv, f"--job.dump_folder={out}", code=2), "part-0.csv.gz", named)
    assert not out.exists()
