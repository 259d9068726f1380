"""Megatron's .bin and .idx are read as they are: their type, and documents where the index ends
them.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.lanes import sample
from tests.messages import refused
from titanlite.data.packing import DOCUMENTS, LABELS, POSITIONS, Concatenated, Packed
from titanlite.data.sources import open_source

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def write(
    folder: Path, documents: list[list[list[int]]], dtype: str = "uint16", version: int = 1
) -> Path:
    """Write documents of sequences as Megatron's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    ids = np.array([token for sequence in sequences for token in sequence], dtype)
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    stops = np.cumsum(lengths, dtype=np.int64)
    bounds = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    index = b"MMIDIDX\0\0" + struct.pack("<QB", version, CODES[dtype])
    index += struct.pack("<QQ", len(lengths), len(bounds))
    index += lengths.tobytes() + ((stops - lengths) * ids.itemsize).tobytes() + bounds.tobytes()
    (folder / "text.bin").write_bytes(ids.tobytes())
    (folder / "text.idx").write_bytes(index)
    return folder / "text.bin"


def opened(path: Path | str):
    return open_source("training", "tokens", str(path), None, 300)


@pytest.mark.parametrize("dtype", CODES)
def test_documents_end_where_the_index_says(tmp_path, dtype):
    """No end token is there; a document of two sequences is one; an empty one is none."""
    source = opened(write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10, 11, 12, 13]]], dtype))
    assert source.read(0, 9).tolist() == [*range(5, 14)]
    assert source.document_ends().tolist() == [4, 9]
    window = np.empty((4, 6), np.int64)
    Concatenated(source, 6, True, "training").fill(window, 0)
    assert window[LABELS].tolist() == [6, 7, 8, -100, 10, 11]
    assert window[DOCUMENTS].tolist() == [0, 0, 0, 0, 1, 1]
    assert window[POSITIONS].tolist() == [0, 1, 2, 3, 0, 1]
    packed = Packed(source, 7, "training")
    packed.fill(window := np.empty((2, 7), np.int64), 0)
    assert packed.samples == 1 and window[LABELS].tolist() == [6, 7, 8, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda index: b"x" + index[1:], "Megatron"),
        (lambda index: index[:20], "Megatron"),
        (lambda index: index[:-3], "cut"),
        (lambda index: index + b"\0\0", "cut"),
        (lambda index: index[:9] + b"\2" + index[10:], "version 2"),
        (lambda index: index[:17] + b"\6" + index[18:], "type 6"),
        (lambda index: index[:17] + b"\4" + index[18:], "order of"),
        (lambda index: index[:-8] + b"\7" + index[-7:], "damaged"),
    ],
)
def test_another_index_is_named(tmp_path, change, named):
    path = write(tmp_path, [[[5, 6, 7]], [[9, 10, 11]]])
    index = tmp_path / "text.idx"
    index.write_bytes(change(index.read_bytes()))
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

folder, dtype = sys.argv[1:]
other, ours = (
    IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=getattr(numpy, dtype))
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


@pytest.mark.parametrize("dtype", sample(["uint16", "int32"], long=["int32"]))
def test_what_megatrons_own_builder_writes_is_read(tmp_path, dtype):
    """Whole documents, one made item by item, an empty one, and another file's after them.

    In a process of its own: in one that had run other tests both failed once.
    """
    if not find_spec("megatron"):
        pytest.skip("needs megatron-core: pip install --no-deps megatron-core")
    subprocess.run([sys.executable, "-c", THEIRS, str(tmp_path), dtype], check=True)
    source = opened(f"{tmp_path}/text.bin")
    assert source.read(0, 11).tolist() == [*range(5, 16)]
    assert source.document_ends().tolist() == [4, 9, 11]
    found = [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]
    write(tmp_path, [[[5, 6, 7], [8]], [[]], [[9, 10], [11, 12, 13]], [[14, 15]]], dtype)
    assert found == [(tmp_path / name).read_bytes() for name in ("text.bin", "text.idx")]
