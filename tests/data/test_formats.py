"""Token files of other programs: a run reads what `data prepare --from` lists of them, with
documents that end where they say.
"""

import gzip
import shlex
import struct
import subprocess
import sys
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.assets import listed, make_assets
from tests.jobs import TINY
from tests.messages import refused, says
from titanlite.data.packing import LABELS, Concatenated, Packed
from titanlite.data.packing_plan import open_plan
from titanlite.data.shards import ShardSource, shard_header
from titanlite.data.tokenizer import load_tokenizer

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


def opened(path: Path, kind: str) -> ShardSource:
    return ShardSource(listed(path, kind, end=6), 300)  # which is within documents


@pytest.mark.parametrize(
    ("at", "byte", "named"),  # without a byte, the rest is cut off
    [
        (0, b"x", "Megatron"),
        (20, b"", "truncated"),
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
        listed(path, "megatron")


def test_a_bin_of_another_size_is_named(tmp_path):
    path = write(tmp_path, [[[5, 6, 7]]])
    path.write_bytes(path.read_bytes()[:-1])
    with refused("3 tokens of uint16", "5 bytes"):
        listed(path, "megatron")
    (tmp_path / "text.idx").unlink()
    with refused(path, "text.idx"):
        listed(path, "megatron")


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


@pytest.mark.nightly
def test_what_megatrons_own_builder_writes_is_read(tmp_path):
    """Whole documents, one made item by item, an empty one, and another file's after them.

    In a process of its own: in one that had run other tests both failed once.
    """
    if not find_spec("megatron"):
        pytest.skip("needs megatron-core: pip install --no-deps megatron-core")
    subprocess.run([sys.executable, "-c", THEIRS, str(tmp_path)], check=True)
    source = opened(tmp_path / "text.bin", "megatron")
    assert source.read(0, 11).tolist() == [*range(5, 16)]
    assert source.document_ends().tolist() == [4, 9, 11]
    found = [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]
    write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10], [11, 12, 13]], [[14, 15]]], "int32")
    assert found == [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]


def write_as(kind: str, folder: Path, documents: Any) -> None:
    if kind == "olmo":
        write_table(folder, documents)
    else:
        write(folder, [[each] for each in documents])


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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("megatron", dtype) for dtype in CODES),
        *(("olmo", dtype) for dtype in ("uint8", "uint16", "uint32", "int64")),
    ],
)
def test_documents_end_where_the_index_or_the_table_says(tmp_path, kind, dtype):
    """No end token is there; a document of two sequences is one; an empty one is none. Of a table,
    ids have the bytes of its number.
    """
    if kind == "olmo":
        path = write_table(tmp_path, DOCUMENTS_OF, dtype)
    else:
        path = write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10, 11, 12, 13]]], dtype)
    source = opened(path, kind)
    assert source.read(0, 9).tolist() == [*range(5, 14)]
    assert source.document_ends().tolist() == [4, 9]
    window = np.empty((4, 6), np.int64)
    Concatenated(source, 6, True, "training").fill(window, 0)
    assert window[LABELS].tolist() == [6, 7, 8, -100, 10, 11]
    Packed(source, 7, "training").fill(window := np.empty((2, 7), np.int64), 0)
    assert window[LABELS].tolist() == [6, 7, 8, 10, 11, 12, 13]


def saved(array: Any) -> bytes:
    """Return what numpy writes."""
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


INTACT = shard_header(5, np.dtype(np.uint16)) + bytes(10)


@pytest.mark.parametrize(
    ("kind", "name", "content", "named"),
    [
        ("olmo", "part-0.csv.gz", b"hello", "gzipped"),
        ("olmo", "part-0.csv.gz", gzip.compress(b"0,4\n4,9\n")[:-9], "damaged: Compressed"),
        ("olmo", "part-0.csv.gz", gzip.compress(b"start,end\n0,9\n"), "damaged: invalid"),
        ("olmo", "part-0.csv.gz", gzip.compress(b"0,4\n5,9\n"), "begin where"),
        ("olmo", "part-0.csv.gz", gzip.compress(b"0\n4,9\n"), "damaged"),
        ("olmo", "part-0.csv.gz", gzip.compress(b""), "0 tokens"),
        ("olmo", "part-0.csv.gz", gzip.compress(b"0,4\n4,8\n"), "8 tokens"),
        ("llm.c", "a.bin", INTACT + bytes(2), "it has 6 tokens, not the 5"),
        ("llm.c", "a.bin", INTACT[:100], "cannot be read"),
        ("llm.c", "a.bin", bytes(2000), "use --from uint16"),
        ("uint16", "a.npy", b"odd", "multiple"),
        ("uint16", "a.npy", saved(np.arange(9) * 1.5), "float64 of shape (9,)"),
        ("uint16", "a.npy", saved(np.arange(12).reshape(3, 4)), "int64 of shape (3, 4)"),
        ("uint16", "a.npy", saved(np.arange(90))[:-1], "damaged"),
    ],
    ids=range(14),  # bytes with a time in them would be other names in each worker
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, kind, name, content, named):
    write_table(tmp_path, DOCUMENTS_OF)
    (tmp_path / name).write_bytes(content)
    with refused(name, named):
        listed(tmp_path, kind)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
def test_ids_have_the_named_type_or_that_of_numpys_header(tmp_path, dtype):
    ids = np.arange(200, dtype=dtype)
    ids.tofile(tmp_path / "a.bin")
    ids.tofile(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", ids.astype(np.int32))
    assert opened(tmp_path, dtype).read(0, 600).tolist() == [*range(200)] * 3


@pytest.mark.parametrize("kind", ["megatron", "olmo"])
def test_other_ends_of_documents_are_other_data_with_a_plan_of_their_own(tmp_path, kind):
    found = []
    for cut in (8, 24):
        write_as(kind, tmp_path, [[*range(1, cut)], [*range(cut, 65)]])
        source = opened(tmp_path, kind)
        found.append((source.fingerprint, [*open_plan(source, 32).pieces(0)]))
    (first, eight), (second, whole) = found
    assert first != second and eight != whole


def test_files_of_subfolders_are_listed_and_hidden_ones_are_not(tmp_path):
    (tmp_path / "part2" / ".cache").mkdir(parents=True)
    for name, first in (("a.npy", 1), ("part2/b.npy", 101)):
        np.arange(first, first + 64, dtype=np.uint16).tofile(tmp_path / name)
    np.save(tmp_path / "shard-000000.ends.npy", np.arange(9))  # a list's own
    for hidden in ("._a.npy", "part2/._b.npy", "part2/.cache/c.npy"):
        (tmp_path / hidden).write_bytes(b"\0\5\26\7" * 32)
    source = opened(tmp_path, "uint16")
    assert source.read(0, source.tokens).tolist() == [*range(1, 65), *range(101, 165)]


@pytest.mark.parametrize("kind", ["megatron", "olmo"])
def test_a_run_names_the_command_that_lists_foreign_files_and_reads_the_list(
    tmp_path, tool, monkeypatch, kind
):
    """And refuses each file that has changed since, before anything starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    write_as(kind, tmp_path / "theirs", [[*range(at, at + 50)] for at in range(1, 201, 50)])
    files = [*(tmp_path / "theirs").iterdir()]
    argv = [*TINY, "--training.dataset=tokens", "--training.document_mask"]
    said = tool("train", *argv, "--training.dataset_path=theirs", code=2)
    says(said, 'training.dataset_path = "theirs"', f"{kind} files")
    command = shlex.split(next(line for line in said.splitlines() if "--from" in line))
    command = command[command.index("data") :]
    says(tool(*command), "200 tokens, 4 documents, 1 shard", "theirs-listed")
    says(tool("data show", "theirs-listed"), "200 tokens", " 8 9 10 ")
    says(tool(*command, code=2), "theirs-listed has a manifest.json")
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"?")
        said = tool("train", *argv, "--training.dataset_path=theirs-listed", code=2)
        says(said, path.name, "has changed", "prepare")
        path.write_bytes(content)
    assert [*(tmp_path / "theirs").iterdir()] == files and not (tmp_path / "outputs").exists()


def test_ids_alone_end_their_documents_by_a_tokenizer(tmp_path, tool):
    assets, ids = make_assets(tmp_path, ["the cat"]), tmp_path / "ids.bin"
    end = load_tokenizer(str(assets)).end
    np.asarray([5, 6, end, 7, end, 8], np.uint32).tofile(ids)
    out = tmp_path / "out"
    tool("data prepare", ids, "--from=uint32", "--tokenizer", assets, "--out", out)
    says(tool("data show", out, f"--model.hf_assets_path={assets}", "--training.seq_len=5"), "⟦")
    source = ShardSource(out, 500)
    assert source.document_ends().tolist() == [3, 5, 6] and source.end == end
