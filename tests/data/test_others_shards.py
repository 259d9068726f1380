"""Shards that other programs wrote: what they leave beside them is no data, documents are part of
the data, and a file that cannot be what it is taken for is refused.
"""

import gzip
import struct

import numpy as np
import pytest

from tests.messages import refused
from titanlite.data.megatron import read_index
from titanlite.data.olmo import read_table
from titanlite.data.packing_plan import open_plan
from titanlite.data.shards import ShardSource

IDS = np.arange(64, dtype=np.uint16) + 1


def source(path, vocab_size=1000, **more):
    return ShardSource("training", path, vocab_size, 0, **more)


def write_index(path, lengths, documents, dtype_code=8):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype_code, len(lengths), len(documents))
    parts = np.int32(lengths), np.int64(starts), np.int64(documents)
    path.write_bytes(head + b"".join(part.tobytes() for part in parts))


def write_table(path, every):
    rows = [f"{start},{start + every},x\n" for start in range(0, len(IDS), every)]
    path.write_bytes(gzip.compress("".join(rows).encode()))


@pytest.mark.parametrize("kind", ["idx", "csv.gz"])
def test_other_ends_of_documents_are_other_data_with_a_plan_of_their_own(tmp_path, kind):
    def write(every):
        if kind == "idx":
            count = len(IDS) // every
            write_index(tmp_path / "a.idx", [every] * count, range(count + 1))
        else:
            write_table(tmp_path / "a.csv.gz", every)

    IDS.tofile(tmp_path / ("a.bin" if kind == "idx" else "a.npy"))
    found = []
    for every in (8, 32):
        write(every)
        read_index.cache_clear()  # as a new process begins
        read_table.cache_clear()
        made = source(tmp_path)
        found.append((made.fingerprint, [*open_plan(made, 32).pieces(0)]))
    (before, eights), (after, thirty_twos) = found
    assert before != after
    assert len(eights) > len(thirty_twos)


def test_other_text_anywhere_in_a_long_shard_is_other_data(tmp_path):
    ids = np.arange(8192, dtype=np.uint16) % 900 + 1
    ids.tofile(tmp_path / "a.npy")
    before = source(tmp_path).fingerprint
    ids[2100:4100] += 5
    ids.tofile(tmp_path / "a.npy")
    assert source(tmp_path).fingerprint != before


def test_another_length_of_windows_has_another_plan(tmp_path):
    IDS.tofile(tmp_path / "a.npy")
    write_table(tmp_path / "a.csv.gz", 8)
    plans = [[*open_plan(source(tmp_path), seq_len).pieces(0)] for seq_len in (32, 16)]
    assert plans[0] != plans[1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, np.uint32), (100_000, np.int64)])
def test_ids_of_twice_the_bytes_of_what_is_read_are_refused_unless_their_type_is_named(
    tmp_path, vocab_size, dtype
):
    path = tmp_path / "a.npy"
    IDS.astype(dtype).tofile(path)
    with refused("a.npy", str(np.dtype(dtype).itemsize), "training.dataloader.token_dtype"):
        source(tmp_path, vocab_size)
    named = source(tmp_path, vocab_size, raw_type=np.dtype(dtype).name)
    assert named.read(0, 64).tolist() == IDS.tolist()


@pytest.mark.parametrize(
    ("lengths", "documents"),
    [
        ([16] * 4, [0, 3, 99, 4]),
        ([16] * 4, [0, 3, 2, 4]),
        ([16] * 4, [1, 4]),
        ([16] * 4, [0, -1, 4]),
        ([16, 48, 32, -32], [0, 4]),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, lengths, documents):
    IDS.tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", lengths, documents)
    with refused("a.idx", "damaged"):
        source(tmp_path)


def test_shards_of_subfolders_are_read_and_hidden_files_are_not(tmp_path):
    (tmp_path / "part2" / ".cache").mkdir(parents=True)
    IDS.tofile(tmp_path / "a.npy")
    (IDS + 100).astype(np.uint16).tofile(tmp_path / "part2" / "b.npy")
    for hidden in ("._a.npy", "part2/._b.npy", "part2/.cache/c.npy"):
        (tmp_path / hidden).write_bytes(b"\0\5\26\7" * 32)
    made = source(tmp_path)
    assert made.read(0, 128).tolist() == [*IDS.tolist(), *(IDS + 100).tolist()]
