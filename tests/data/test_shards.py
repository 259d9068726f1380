"""Token shards: one stream over several files, and errors that name the damaged file."""

import json
import os
import pickle
import resource

import numpy as np
import pytest

from titanlite.data.shards import MAGIC, ShardSource, header
from titanlite.errors import RunFailed, UserError

U16, U32 = np.dtype(np.uint16), np.dtype(np.uint32)


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
    source = ShardSource("training", shards, 100, end=9)
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert copy.tokens == 20
        for start in range(20):
            for count in (1, 3, 20 - start):
                assert (
                    copy.read(start, min(count, 20 - start)).tolist()
                    == EXPECTED[start : start + count]
                )
    assert len(pickle.dumps(source)) < 3000, (
        "a worker maps the files instead of receiving their content"
    )


def test_document_ends_follow_end_tokens(shards):
    assert ShardSource("training", shards, 100, end=9).document_ends().tolist() == [4, 10, 13, 20]


def test_a_single_shard_can_be_opened(shards):
    assert (
        ShardSource("training", shards / "c.bin", 100, end=9).read(0, 5).tolist() == EXPECTED[5:10]
    )


def test_the_fingerprint_changes_with_the_names_lengths_and_content_of_the_shards(shards):
    fingerprints = [ShardSource("training", shards, 100, end=9).fingerprint]
    write_bin(shards / "a.bin", [0, 1, 2, 9])
    fingerprints.append(ShardSource("training", shards, 100, end=9).fingerprint)
    ids = np.arange(10_000) % 100
    for seed in range(3):  # as many tokens, such as of another tokenizer
        write_bin(shards / "c.bin", np.random.default_rng(seed).permutation(ids))
        fingerprints.append(ShardSource("training", shards, 100, end=9).fingerprint)
    (shards / "c.bin").rename(shards / "f.bin")
    fingerprints.append(ShardSource("training", shards, 100, end=9).fingerprint)
    assert len(set(fingerprints)) == 6
    assert len({fingerprint.partition("+")[0] for fingerprint in fingerprints[2:5]}) == 1, (
        "as older versions wrote it"
    )


def test_damaged_shards_are_named(shards, tmp_path):
    intact = (shards / "a.bin").read_bytes()
    for content, message in (
        (intact[:-1], "a.bin is damaged: 5 tokens make 1034 bytes, and it has 1033"),
        (b"\0" + intact[1:], f"a.bin is not a token shard: it does not start with {MAGIC}"),
        (intact[:100], "a.bin is not a token shard"),
    ):
        (shards / "a.bin").write_bytes(content)
        with pytest.raises(UserError) as caught:
            ShardSource("training", shards, 100, end=9)
        assert message in str(caught.value)
    (shards / "a.bin").unlink()
    (shards / "d.npy").write_bytes(b"odd")
    with pytest.raises(UserError, match="d.npy is damaged: its size is not a multiple of 2"):
        ShardSource("training", shards, 300, end=9)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(9) * 1.5, "holds float64 of shape (9,), not integers in one dimension"),
        (np.arange(12).reshape(3, 4), "holds int64 of shape (3, 4), not integers in one dimension"),
        (np.array([True, False]), "holds bool of shape (2,)"),
        (np.array(5), "holds int64 of shape ()"),
        (
            np.array([[1], [2, 3]], dtype=object),
            "is damaged: Array can't be memory-mapped: Python objects",
        ),
        (
            np.array([1, 2, -100, -1], np.int32),
            "id -100 at token 2 is not in the model's vocabulary of 100",
        ),
    ],
)
def test_numpy_files_that_hold_no_token_ids_are_named_before_training(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError) as caught:
        ShardSource("training", tmp_path, 100, end=9)
    assert str(tmp_path / "a.npy") in str(caught.value) and message in str(caught.value)


def test_a_truncated_numpy_file_and_index_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(90))
    content = (tmp_path / "a.npy").read_bytes()
    for size in (9, 100, len(content) - 1):
        (tmp_path / "a.npy").write_bytes(content[:size])
        with pytest.raises(UserError, match="a.npy is damaged: "):
            ShardSource("training", tmp_path, 100, end=9)
    (tmp_path / "a.npy").write_bytes(content)
    (tmp_path / "a.ends.npy").write_bytes(b"")
    with pytest.raises(UserError, match="a.ends.npy is damaged: "):
        ShardSource("training", tmp_path, 100, end=9).document_ends()


def test_raw_ids_of_a_vocabulary_of_256_are_read_as_uint8_or_uint16(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, size=10_000)
    for dtype in (np.uint8, np.uint16):
        ids.astype(dtype).tofile(tmp_path / "a.npy")
        source = ShardSource("training", tmp_path, 256, end=0)
        assert source.read(0, source.tokens).tolist() == ids.tolist()
    ids.astype(np.uint16).tofile(tmp_path / "a.npy")
    assert ShardSource("training", tmp_path, 257, end=0).tokens == 10_000


def test_a_manifest_of_another_program_is_ignored(shards):
    (shards / "manifest.json").write_text('{"files": 5}')
    assert ShardSource("training", shards, 100, end=9).tokens == 20


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(shards):
    """In the samples that are read at the start, or when it is read."""
    with pytest.raises(
        RunFailed, match="e.npy: id 19 at token 4 is not in the model's vocabulary of 19"
    ):
        ShardSource("training", shards, 19, end=9)
    for wrong in (-1, 100):
        ids = np.arange(10_000) % 100
        ids[1500] = wrong
        np.save(shards / "f.npy", ids)
        source = ShardSource("training", shards, 100, end=9)
        assert source.read(20, 1500).tolist() == ids[:1500].tolist()
        with pytest.raises(
            RunFailed,
            match=f"f.npy: id {wrong} at token 1500 is not in the model's vocabulary of 100",
        ):
            source.read(1000, 1000)


def test_there_may_be_more_shards_than_open_files(tmp_path):
    for number in range(200):
        write_bin(tmp_path / f"{number:03}.bin", [number % 100] * 3)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        source = ShardSource("training", tmp_path, 100, end=9)
        assert source.read(0, 600).tolist() == [
            number % 100 for number in range(200) for _ in range(3)
        ]
        assert source.document_ends()[-1] == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_shards_of_a_manifest_are_checked_whole_and_opened_only_where_they_are_read(tmp_path):
    ids = np.arange(8, dtype=np.uint16)
    listed = [{"file": f"{number}.bin", "tokens": 8} for number in range(3)]
    for shard in listed:
        write_bin(tmp_path / shard["file"], ids)
    document = {"fingerprint": "x", "state": "y", "end": 9, "vocab_size": 100, "shards": listed}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    ShardSource("training", tmp_path, 100, -1).require_whole()
    write_bin(tmp_path / "1.bin", ids[:7])
    (tmp_path / "2.bin").unlink()
    source = ShardSource("training", tmp_path, 100, -1)
    with pytest.raises(UserError, match="1.bin has 1038 bytes, and its manifest.json says 1040"):
        source.require_whole()
    assert source.read(2, 10).tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    with pytest.raises(RunFailed, match="1.bin is shorter than the 1040 bytes it should have"):
        source.read(8, 8)
    with pytest.raises(RunFailed, match="2.bin cannot be read: No such file"):
        source.read(16, 8)
    write_bin(tmp_path / "1.bin", ids)
    with pytest.raises(UserError, match="2.bin has 0 bytes"):
        source.require_whole()


def test_empty_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="no tokens in"):
        ShardSource("training", tmp_path, 100, 0)


def test_a_wrong_manifest_is_an_error(tmp_path):
    from titanlite.data.documents import Documents
    from titanlite.data.prepare import prepare

    (tmp_path / "a.txt").write_text("text")
    prepare({"x": Documents(tmp_path, ("a.txt",), (4,))}, "", tmp_path / "out", 1)
    assert ShardSource("training", tmp_path / "out", 256, -1).end == 0, (
        "the end token is in the manifest"
    )
    write_bin(tmp_path / "out" / "stray.bin", [1, 2])
    with pytest.raises(UserError, match="its manifest.json says"):
        ShardSource("training", tmp_path / "out", 256, 0).require_whole()
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        ShardSource("training", tmp_path / "out", 256, 0)
