"""Token shards: one stream over several files, and errors that name the damaged file."""

import json
import os
import pickle
import resource

import numpy as np
import pytest

from tests.messages import refused
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.shards import MAGIC, ShardSource, header
from titanlite.errors import RunFailed

U16, U32 = np.dtype(np.uint16), np.dtype(np.uint32)


def opened(path, vocab_size=100, end=9) -> ShardSource:
    return ShardSource("training", path, vocab_size, end)


def write_bin(path, ids, dtype=U16):
    path.write_bytes(header(len(ids), dtype) + np.asarray(ids, dtype).tobytes())


@pytest.fixture
def shards(tmp_path):
    """Shards of five tokens in several formats, and an empty one; token 9 ends a document."""
    write_bin(tmp_path / "a.bin", [0, 1, 2, 9, 4])
    write_bin(tmp_path / "b.bin", [])
    write_bin(tmp_path / "c.bin", [5, 6, 7, 8, 9], U32)
    np.asarray([10, 11, 9, 13, 14], U16).tofile(tmp_path / "d.npy")  # OLMo's: no header
    np.save(tmp_path / "e.npy", np.asarray([15, 16, 17, 18, 19], np.int32))
    return tmp_path


EXPECTED = [0, 1, 2, 9, 4, 5, 6, 7, 8, 9, 10, 11, 9, 13, 14, 15, 16, 17, 18, 19]


def test_all_formats_are_one_stream_at_any_offset(shards):
    source = opened(shards)
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert copy.tokens == 20
        for start in range(20):
            for stop in (start + 1, min(start + 3, 20), 20):
                assert copy.read(start, stop - start).tolist() == EXPECTED[start:stop]
    # A worker maps the files instead of receiving their content.
    assert len(pickle.dumps(source)) < 3000
    assert source.document_ends().tolist() == [4, 10, 13, 20]
    assert opened(shards / "c.bin").read(0, 5).tolist() == EXPECTED[5:10]
    (shards / "manifest.json").write_text('{"files": 5}')  # of another program
    assert opened(shards).tokens == 20


def test_the_fingerprint_changes_with_the_names_lengths_and_content_of_the_shards(shards):
    fingerprints = [opened(shards).fingerprint]
    write_bin(shards / "a.bin", [0, 1, 2, 9])
    fingerprints.append(opened(shards).fingerprint)
    ids = np.arange(10_000) % 100
    for seed in range(3):  # as many tokens, such as of another tokenizer
        write_bin(shards / "c.bin", np.random.default_rng(seed).permutation(ids))
        fingerprints.append(opened(shards).fingerprint)
    (shards / "c.bin").rename(shards / "f.bin")
    fingerprints.append(opened(shards).fingerprint)
    assert len(set(fingerprints)) == 6


def test_damaged_shards_are_named(shards):
    intact = (shards / "a.bin").read_bytes()
    for content, *named in (
        (intact[:-1], "5 tokens", "1034 bytes", "1033"),
        (b"\0" + intact[1:], MAGIC),
        (intact[:100], MAGIC),
    ):
        (shards / "a.bin").write_bytes(content)
        with refused("a.bin is ", *named):
            opened(shards)
    (shards / "a.bin").unlink()
    (shards / "d.npy").write_bytes(b"odd")
    with refused("d.npy", "damaged", "2"):
        opened(shards, 300)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.arange(9) * 1.5, "float64 of shape (9,)"),
        (np.arange(12).reshape(3, 4), "int64 of shape (3, 4)"),
        (np.array([[1], [2, 3]], dtype=object), "is damaged"),
        (np.array([1, 2, -100, -1], np.int32), "id -100 at token 2 "),
    ],
)
def test_numpy_files_that_hold_no_token_ids_are_named_before_training(tmp_path, array, named):
    np.save(tmp_path / "a.npy", array)
    with refused(tmp_path / "a.npy", named):
        opened(tmp_path)


def test_a_truncated_numpy_file_and_index_are_named(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(90))
    content = path.read_bytes()
    for size in (9, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with refused("a.npy", "damaged"):
            opened(tmp_path)
    path.write_bytes(content)
    (tmp_path / "a.ends.npy").touch()
    with refused("a.ends.npy", "damaged"):
        opened(tmp_path).document_ends()


def test_raw_ids_of_a_vocabulary_of_256_are_read_as_uint8_or_uint16(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, size=10_000)
    for dtype in (np.uint8, np.uint16):
        ids.astype(dtype).tofile(tmp_path / "a.npy")
        source = opened(tmp_path, 256)
        assert source.read(0, source.tokens).tolist() == ids.tolist()
    assert opened(tmp_path, 257).tokens == 10_000


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(shards):
    """In the samples that are read at the start, or when it is read."""
    with refused("e.npy: id 19 at token 4 ", "19", kind=RunFailed):
        opened(shards, 19)
    for wrong in (-1, 100):
        ids = np.arange(10_000) % 100
        ids[1500] = wrong
        np.save(shards / "f.npy", ids)
        source = opened(shards)
        assert source.read(20, 1500).tolist() == ids[:1500].tolist()
        with refused(f"f.npy: id {wrong} at token 1500 ", "of 100", kind=RunFailed):
            source.read(1000, 1000)


def test_there_may_be_more_shards_than_open_files(tmp_path):
    for number in range(200):
        write_bin(tmp_path / f"{number:03}.bin", [number % 100] * 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, hard))
    try:
        source = opened(tmp_path)
        assert source.read(0, 600).tolist() == [i // 3 % 100 for i in range(600)]
        assert source.document_ends()[-1] == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_of_a_manifest_are_checked_whole_and_opened_only_where_they_are_read(tmp_path):
    ids = np.arange(8, dtype=np.uint16)
    listed = [{"file": f"{number}.bin", "tokens": 8} for number in range(3)]
    for shard in listed:
        write_bin(tmp_path / shard["file"], ids)
    names = {"fingerprint": "x", "content": "c", "state": "y"}
    document = {**names, "end": 9, "vocab_size": 100, "shards": listed}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    opened(tmp_path, end=-1).require_whole()
    write_bin(tmp_path / "1.bin", ids[:7])
    (tmp_path / "2.bin").unlink()
    source = opened(tmp_path, end=-1)
    with refused("1.bin has 1038 bytes", "manifest.json", "1040"):
        source.require_whole()
    assert source.read(2, 10).tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    with refused("1.bin", "1040", kind=RunFailed):
        source.read(8, 8)
    with refused("2.bin", kind=RunFailed):
        source.read(16, 8)
    write_bin(tmp_path / "1.bin", ids)
    with refused("2.bin has 0 bytes"):
        source.require_whole()


def test_a_wrong_manifest_and_an_empty_folder_are_named(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with refused(out, "no tokens"):
        opened(out)
    (tmp_path / "a.txt").write_text("text")
    prepare({"x": text_files("x", str(tmp_path / "a.txt"))}, "", out, 1)
    assert opened(out, 256, end=-1).end == 0, "the end token is in the manifest"
    write_bin(out / "stray.bin", [1, 2])
    with refused("manifest.json"):
        opened(out, 256, end=0).require_whole()
    (out / "manifest.json").write_text("{")
    with refused("manifest.json", "damaged"):
        opened(out, 256, end=0)
