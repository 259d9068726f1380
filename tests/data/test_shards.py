"""Token shards: one stream over several files, and errors that name the damaged file."""

import json
import os
import pickle
import resource

import numpy as np
import pytest

from tests.data.assets import listed
from tests.messages import refused
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.shards import ShardSource, shard_header
from titanlite.data.sources import open_source
from titanlite.errors import RunFailed

U16, U32 = np.dtype(np.uint16), np.dtype(np.uint32)


def opened(path) -> ShardSource:
    return ShardSource(listed(path, "llm.c", 9), 100)


def write_bin(path, ids, dtype=U16):
    path.write_bytes(shard_header(len(ids), dtype) + np.asarray(ids, dtype).tobytes())


EXPECTED = [0, 1, 2, 9, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def shards(tmp_path):
    """Shards of five tokens of both versions, and an empty one; token 9 ends a document."""
    write_bin(tmp_path / "a.bin", EXPECTED[:5])
    write_bin(tmp_path / "b.bin", [])
    write_bin(tmp_path / "c.bin", EXPECTED[5:], U32)
    return tmp_path


def test_several_files_are_one_stream_at_any_offset(shards):
    source = opened(shards)
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert copy.tokens == 10
        for start in range(10):
            for stop in (start + 1, min(start + 3, 10), 10):
                assert copy.read(start, stop - start).tolist() == EXPECTED[start:stop]
    # A worker maps the files instead of receiving their content.
    assert len(pickle.dumps(source)) < 3000
    assert source.document_ends().tolist() == [4, 10]
    with refused(shards / "b.bin", "no tokens"):
        opened(shards / "b.bin")


def test_the_fingerprint_changes_with_the_names_lengths_and_content_of_the_shards(shards):
    fingerprints = [opened(shards).fingerprint]
    write_bin(shards / "a.bin", [0, 1, 2, 9])
    fingerprints.append(opened(shards).fingerprint)
    ids = np.arange(10_000) % 9  # no end token
    for seed in range(3):  # as many tokens, such as of another tokenizer
        write_bin(shards / "c.bin", np.random.default_rng(seed).permutation(ids))
        fingerprints.append(opened(shards).fingerprint)
    (shards / "c.bin").rename(shards / "f.bin")
    fingerprints.append(opened(shards).fingerprint)
    assert len(set(fingerprints)) == 6


def test_damaged_ends_of_documents_are_named(shards):
    source = opened(shards)
    (source.folder / "shard-000002.ends.npy").write_bytes(b"")
    with refused("shard-000002.ends.npy", "damaged"):
        source.document_ends()


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(shards):
    path = shards / "f.npy"
    np.save(path, np.append(np.arange(1500) % 100, [-1] + [100] * 501))
    source = ShardSource(listed(path, "int64"), 100)
    assert source.read(0, 1500).tolist() == [i % 100 for i in range(1500)]
    for start, wrong in ((1000, "-1 at token 1500 "), (1501, "100 at token 1501 ")):
        with refused(f"f.npy: id {wrong}", "of 100", kind=RunFailed):
            source.read(start, 501)


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
    names = {"fingerprint": "x", "content": "c", "state": "y", "tokens": 24, "documents": 0}
    document = {**names, "end": 9, "vocab_size": 100, "shards": listed}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    ShardSource(tmp_path, 100).require_whole()
    write_bin(tmp_path / "1.bin", ids[:7])
    (tmp_path / "2.bin").unlink()
    source = ShardSource(tmp_path, 100)
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


def test_a_wrong_manifest_and_a_folder_without_one_are_named(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("manifest.txt", "manifest.json"):
        (out / name).write_text('{"files": 5}')  # of another program
        with refused(out, "no manifest.json"):
            open_source("training", "tokens", str(out), None, 100)
        (out / name).unlink()
    (tmp_path / "a.txt").write_text("text")
    prepare({"x": text_files("x", str(tmp_path / "a.txt"))}, "", out, 1)
    assert ShardSource(out, 256).end == 0, "the end token is in the manifest"
    (out / "manifest.json").write_text("{")
    with refused("manifest.json", "damaged"):
        ShardSource(out, 256)
