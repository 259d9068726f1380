"""Token shards on object stores: the same windows as from a folder, and no fault of a store that
goes unnoticed; and the real command on them.
"""

import threading
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import run
from titanlite.cli import main
from titanlite.data import prepare as preparing
from titanlite.data import remote
from titanlite.data.shards import DATA_MANIFEST, Remote, ShardSource
from titanlite.data.sources import open_shards
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import Windows, training_data
from titanlite.errors import RunFailed
from titanlite.runtime import bucket
from titanlite.runtime.bucket import copy_file, place
from titanlite.runtime.store import LocalPath

SAMPLES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> LocalPath:
    """Eight shards of bytes, made by the real command."""
    root = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(8):
        words = rng.integers(97, 122, size=4000, dtype=np.uint8).tobytes()
        (root / f"{number}.txt").write_bytes(words)
    with patch.object(preparing, "UNIT_BYTES", 4000):
        assert main(["data", "prepare", str(root), "--out", str(root / "out")]) == 0
    return root / "out"


@pytest.fixture
def shards(folder, url, monkeypatch, tmp_path) -> str:
    """The shards in a bucket."""
    put(folder, url)  # patiently
    monkeypatch.setattr(bucket, "_PATIENCE_SECONDS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return url


def put(folder: LocalPath, url: str) -> None:
    for path in folder.glob("[!.]*"):
        copy_file(path, place(url) / path.name)


def arguments(path: object, *more: str) -> list[str]:
    return [*TINY, "--training.dataset=tokens", f"--training.dataset_path={path}", *more]


def windows(path: object, *more: str) -> Windows:
    made = job(arguments(path, *more), world=1)
    data = training_data(made, open_tokenizer(made), seed=1)
    assert isinstance(data, Windows)
    return data


def opened(url: str) -> ShardSource:
    return open_shards("training", url, 256)


def ids(source: ShardSource) -> list[int]:
    """Return the ids, read in pieces over the ends of shards."""
    step = source.tokens // 20
    pieces = [
        source.read(at, min(step, source.tokens - at)).tolist()
        for at in range(0, source.tokens, step)
    ]
    return [each for piece in pieces for each in piece]


def gets(log: list[tuple[str, str]]) -> Counter[str]:
    return Counter(path.rpartition("/")[2] for method, path in log if method == "GET")


@pytest.mark.parametrize("store", sample(["s3", "gs", "az"]), indirect=True)
def test_windows_and_fingerprint_are_those_of_a_folder(folder, shards):
    local, stored = windows(folder), windows(shards)
    assert stored.fingerprint == local.fingerprint
    assert (stored.__getitems__(range(SAMPLES)) == local.__getitems__(range(SAMPLES))).all()


@pytest.mark.long
def test_a_start_reads_one_object_and_a_batch_only_its_windows_at_once(shards, proxy, monkeypatch):
    windows(shards)
    proxy.log.clear()
    remote._fetch_index.cache_clear()
    data = windows(shards)
    assert set(gets(proxy.log)) == {DATA_MANIFEST}
    proxy.log.clear()
    reading, all_are, whole = list[int](), threading.Event(), Remote.read

    def together(self: Any, shard: Any, start: int, size: int) -> bytes:
        reading.append(size)
        if len(reading) == 8:
            all_are.set()
        assert all_are.wait(10)
        return whole(self, shard, start, size)

    monkeypatch.setattr(Remote, "read", together)
    data.__getitems__(range(8))
    assert gets(proxy.log).total() == len(reading)  # a window may go on in the next shard
    assert sum(reading) == 8 * 17 * 2


@pytest.mark.long
def test_packing_reads_the_ends_of_documents_and_no_ids(folder, shards, proxy):
    first_fit = ["--training.packing=first-fit", "--training.document_mask"]
    expected = windows(folder, *first_fit)[3]
    proxy.log.clear()
    data = windows(shards, *first_fit)
    assert not [name for name in gets(proxy.log) if name.endswith(".bin")]
    assert (data[3] == expected).all()


@pytest.mark.long
@pytest.mark.parametrize("fault", [{"status": 503}, {"short": 100}])
def test_a_range_that_fails_is_read_again_within_bounds_and_then_named(
    folder, shards, proxy, fault
):
    source, met = opened(shards), set()
    proxy.rule = lambda method, path: None if path in met or met.add(path) else fault
    assert ids(source) == ids(ShardSource(folder, 256))
    assert met
    source = opened(shards)
    proxy.fail("3.bin", **fault)
    begun = time.monotonic()
    with refused(f"{shards}/shard-000003.bin", kind=RunFailed):
        ids(source)
    assert time.monotonic() - begun < 30


def changed(url: str, name: str, how: str) -> None:
    path: Any = place(url) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if how == "gone":
        path.unlink()
    else:
        content += b"xx" * (how == "longer")
        path.put(bytes(content))


@pytest.mark.parametrize(
    ("how", "named"),
    sample([("edited", "ETag"), ("longer", "9,028"), ("gone", "not exist")], ("edited", "ETag")),
)
def test_a_shard_that_changes_under_a_run_is_named_and_stops_it(shards, how, named):
    source = opened(shards)
    ids(source)
    changed(shards, "shard-000005.bin", how)
    with refused(f"{shards}/shard-000005.bin", named, kind=RunFailed):
        ids(source)


def test_prepare_puts_the_same_shards_and_the_manifest_last(
    folder, url, proxy, tool, monkeypatch, tmp_path
):
    monkeypatch.setattr(preparing, "UNIT_BYTES", 4000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = "data prepare", folder.parent, "--out", url
    proxy.fail("PUT .*shard-000004.bin", status=403)
    tool(*command, code=2)
    assert DATA_MANIFEST not in place(url).entries()
    proxy.heal()
    tool(*command)
    assert proxy.log[-1][0] == "PUT" and proxy.log[-1][1].endswith(DATA_MANIFEST)
    written = {name: path.read_bytes() for name, path in place(url).entries().items()}
    del written[".plan.json"]
    assert written == {path.name: path.read_bytes() for path in folder.glob("[!.]*")}
    assert not [*tmp_path.glob("titanlite/preparing-*/shard-*")]
    says(tool(*command), "already prepared")
    says(tool("data show", url), "window 1: ")
    other = tool("data prepare", folder.parent / "0.txt", "--out", url, code=2)
    says(other, url, "other data")
    ids = folder / "shard-000000.bin"
    says(tool("data prepare", ids, "--from=llm.c", "--out", url, code=2), "--out", "a folder here")


def test_what_is_wrong_is_one_line_that_names_the_key(url, tmp_path, monkeypatch):
    (place(url) / DATA_MANIFEST).put(b'{"fingerprint": ""}')
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for wrong, named in (("s3://nobody/shards", "s3://nobody"), (url, "XDG_CACHE_HOME")):
        with refused("training.dataset_path: ", named) as caught:
            opened(wrong)
        assert "\n" not in str(caught.value)


ARGV = [*TINY, "--training.dataset=tokens", "--checkpoint.enable", "--checkpoint.interval=10"]
ARGV += ["--metrics.log_freq=1", "--lr_scheduler.total_steps=20", "--debug.seed=1"]


@pytest.fixture
def train(store, tmp_path):
    """Trains on shards with two ranks, in the folder tmp_path / NAME."""

    def train(name: str, path: object, *more: str, code: int | None = 0):
        here = {"XDG_CACHE_HOME": str(tmp_path / "user"), **store.environment}
        argv = [*ARGV, f"--training.dataset_path={path}", *more]
        return run(argv, tmp_path / name, ranks=2, code=code, **here)

    return train


@pytest.mark.long
def test_losses_are_those_of_a_folder_and_resumed(train, folder, url):
    """The ranks read the first half themselves, workers of theirs the second."""
    half, whole = "--training.steps=10", "--training.steps=20"
    put(folder, url)
    expected = train("local", folder, whole).losses
    assert len(expected) == 20
    train("stored", url, half)
    workers = "--training.dataloader.num_workers=1"
    assert train("stored", url, whole, workers).losses == expected
