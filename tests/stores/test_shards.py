"""Token shards on object stores: the same windows as from a folder, by range or cached, and no
fault of a store that goes unnoticed; and the real command on them.
"""

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import run
from titanlite.cli import main
from titanlite.config.schema import Dataloader
from titanlite.data import prepare as preparing
from titanlite.data import remote
from titanlite.data.shards import MANIFEST, ShardSource
from titanlite.data.sources import open_shards
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import Windows, training_data
from titanlite.errors import RunFailed
from titanlite.launch.preflight import _open_dataset
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import copy, list_folder, read, write
from titanlite.train.prepared import Prepared

SAMPLES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
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


def put(folder: Path, url: str) -> None:
    for path in folder.glob("[!.]*"):
        copy(path, place(url) / path.name)


def arguments(path: object, *more: str) -> list[str]:
    return [*TINY, "--training.dataset=tokens", f"--training.dataset_path={path}", *more]


def windows(path: object, *more: str) -> Windows:
    made = job(arguments(path, *more), world=1)
    data = training_data(made, open_tokenizer(made), seed=1)
    assert isinstance(data, Windows)
    return data


def opened(url: str, cache: object = "", gib: float = 1) -> ShardSource:
    settings = Dataloader(cache_folder=str(cache), cache_gib=gib)
    return open_shards("training", url, 256, 0, settings)


def ids(source: ShardSource) -> list[int]:
    """Return the ids, read in pieces over the ends of shards."""
    step = source.tokens // 20
    pieces = [
        source.read(at, min(step, source.tokens - at)).tolist()
        for at in range(0, source.tokens, step)
    ]
    return [each for piece in pieces for each in piece]


def cached(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("shards/*/shard-*.bin")}


def until_cached(cache: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(cached(cache)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gets(log: list[tuple[str, str]]) -> Counter[str]:
    return Counter(path.rpartition("/")[2] for method, path in log if method == "GET")


@pytest.mark.parametrize("store", sample(["s3", "gs", "az"], "s3"), indirect=True)
def test_windows_and_fingerprint_are_those_of_a_folder_cold_and_while_and_when_cached(
    folder, shards, store, tmp_path
):
    local = windows(folder)
    expected = local.__getitems__(range(SAMPLES))
    cold = windows(shards)
    assert cold.fingerprint == local.fingerprint
    assert (cold.__getitems__(range(SAMPLES)) == expected).all()
    assert not cached(tmp_path)
    cache = f"--training.dataloader.cache_folder={tmp_path}"
    caching = windows(shards, cache)
    assert (caching.__getitems__(range(SAMPLES)) == expected).all()
    until_cached(tmp_path, 8)
    log = store.proxy.log
    log.clear()
    for data in (caching, windows(shards, cache)):
        assert (data.__getitems__(range(SAMPLES)) == expected).all()
    assert not [name for name in gets(log) if name.endswith(".bin")]
    own = next(tmp_path.glob(f"shards/*/{MANIFEST}")).parent
    assert all((own / path.name).read_bytes() == path.read_bytes() for path in folder.glob("*.bin"))


@pytest.mark.long
def test_a_start_reads_one_object_and_a_batch_only_its_windows_at_once(shards, proxy, monkeypatch):
    windows(shards)
    proxy.log.clear()
    remote._fetch_index.cache_clear()
    data = windows(shards)
    assert set(gets(proxy.log)) == {MANIFEST}
    proxy.log.clear()
    reading, all_are, whole = list[int](), threading.Event(), remote.Remote._read

    def together(self: Any, shard: Any, start: int, size: int) -> bytes:
        reading.append(size)
        if len(reading) == 8:
            all_are.set()
        assert all_are.wait(10)
        return whole(self, shard, start, size)

    monkeypatch.setattr(remote.Remote, "_read", together)
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
    assert ids(source) == ids(ShardSource("training", folder, 256, 0))
    assert met
    source = opened(shards)
    proxy.fail("3.bin", **fault)
    begun = time.monotonic()
    with refused(f"{shards}/shard-000003.bin", kind=RunFailed):
        ids(source)
    assert time.monotonic() - begun < 30


def changed(url: str, name: str, how: str) -> None:
    path: Any = place(url) / name
    content = bytearray(read(path))
    content[-1] ^= 1
    if how == "gone":
        path.unlink()
    else:
        content += b"xx" * (how == "longer")
        write(path, bytes(content))


@pytest.mark.parametrize(
    ("how", "named"),
    sample([("edited", "ETag"), ("longer", "9,028"), ("gone", "not there")], ("edited", "ETag")),
)
def test_a_shard_that_changes_under_a_run_is_named_and_stops_it(shards, how, named):
    source = opened(shards)
    ids(source)
    changed(shards, "shard-000005.bin", how)
    with refused(f"{shards}/shard-000005.bin", named, kind=RunFailed):
        ids(source)


def test_a_shard_that_differs_from_its_manifest_is_never_cached(shards, tmp_path):
    changed(shards, "shard-000005.bin", "edited")
    source = opened(shards, tmp_path)
    with refused(f"{shards}/shard-000005.bin", "prepared", kind=RunFailed):
        for _ in range(1000):
            ids(source)
            time.sleep(0.01)
    assert "shard-000005.bin" not in cached(tmp_path)


@pytest.mark.long
def test_two_runs_that_share_a_cache_fetch_each_shard_once_and_what_was_killed_is_begun_again(
    folder, shards, tmp_path, monkeypatch
):
    sources = [opened(shards, tmp_path) for _ in range(2)]
    own = next(tmp_path.glob(f"shards/*/{MANIFEST}")).parent
    (own / "shard-000000.part").write_bytes(b"half")
    whole, fetched = remote.Remote._read, list[str]()

    def counted(self: Any, shard: Any, start: int, size: int) -> bytes:
        if size == shard.size:
            fetched.append(shard.path.name)
            time.sleep(0.05)
        return whole(self, shard, start, size)

    monkeypatch.setattr(remote.Remote, "_read", counted)
    expected = ids(ShardSource("training", folder, 256, 0))
    assert [ids(source) for source in sources] == [expected] * 2
    until_cached(tmp_path, 8)
    assert sorted(fetched) == sorted(cached(tmp_path)) and not [*own.glob("*.part")]


@pytest.mark.long
def test_the_cache_keeps_its_limit_and_lets_only_old_shards_of_other_data_go(shards, tmp_path):
    source = opened(shards, tmp_path, gib=14_000 / 2**30)
    size = source._shards[0].size
    other = tmp_path / "shards" / "other"
    other.mkdir()
    for name, age in (("old", 1e6), ("older", 2e6), ("used", -1e6)):
        (other / f"{name}.bin").write_bytes(bytes(4000))
        os.utime(other / f"{name}.bin", (time.time() - age,) * 2)
    ids(source)
    until_cached(tmp_path, 1)
    ids(source)
    time.sleep(0.3)
    assert {path.name for path in other.iterdir()} == {"used.bin"}
    assert len(cached(tmp_path)) == 1 and 2 * size > 14_000


@pytest.mark.long
def test_a_limit_below_a_shard_is_said_once_and_windows_are_read_by_range(folder, shards, tmp_path):
    def notice_of(*more: str) -> str:
        cache = f"--training.dataloader.cache_folder={tmp_path}"
        made = job(arguments(shards, cache, *more), world=1)
        return _open_dataset("training", made.config.training, made, Prepared())

    notice = notice_of("--training.dataloader.cache_gib=1e-6")
    says(notice, "training.dataloader.cache_gib = 1e-06", shards)
    source = opened(shards, tmp_path, gib=1e-6)
    assert ids(source) == ids(ShardSource("training", folder, 256, 0))
    time.sleep(0.2)
    assert not cached(tmp_path)
    assert not notice_of()


def test_prepare_puts_the_same_shards_and_the_manifest_last(
    folder, url, proxy, tool, monkeypatch, tmp_path
):
    monkeypatch.setattr(preparing, "UNIT_BYTES", 4000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = "data prepare", folder.parent, "--out", url
    proxy.fail("PUT .*shard-000004.bin", status=403)
    tool(*command, code=2)
    assert MANIFEST not in list_folder(place(url))
    proxy.heal()
    tool(*command)
    assert proxy.log[-1][0] == "PUT" and proxy.log[-1][1].endswith(MANIFEST)
    written = {name: read(path) for name, path in list_folder(place(url)).items()}
    assert written == {path.name: path.read_bytes() for path in folder.glob("[!.]*")}
    assert not [*tmp_path.glob("titanlite/preparing-*/shard-*")]
    says(tool(*command), "already prepared")
    says(tool("data show", url), "window 1: ")
    other = tool("data prepare", folder.parent / "0.txt", "--out", url, code=2)
    says(other, url, "other data")


def test_what_is_wrong_is_one_line_that_names_the_key(url, tmp_path):
    write(place(url) / MANIFEST, b'{"fingerprint": ""}')
    (tmp_path / "file").write_text("")
    cache = "training.dataloader.cache_folder: "
    for wrong, named in (("s3://nobody/shards", "s3://nobody"), (url, cache)):
        with refused("training.dataset_path: ", named) as caught:
            opened(wrong, tmp_path / "file")
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
def test_losses_are_those_of_a_folder_cold_caching_and_cached_and_resumed_in_each(
    train, folder, url, tmp_path
):
    """The ranks read the first half themselves, workers of theirs the second."""
    half, whole = "--training.steps=10", "--training.steps=20"
    put(folder, url)
    expected = train("local", folder, whole).losses
    assert len(expected) == 20
    caching = f"--training.dataloader.cache_folder={tmp_path / 'cache'}"
    for name, keys, count in (("cold", [], 0), ("caching", [caching], 8)):
        train(name, url, half, *keys)
        assert len(cached(tmp_path / "cache")) == count
        workers = "--training.dataloader.num_workers=1"
        assert train(name, url, whole, workers, *keys).losses == expected


def test_what_is_wrong_with_a_url_is_one_line_before_anything_starts(url, tmp_path, capfd):
    argv = [*ARGV, f"--training.dataset_path={url}", f"--job.dump_folder={tmp_path}/run"]
    assert main(["train", "--config", "debug.toml", *argv]) == 2
    said = "".join(capfd.readouterr())
    says(said, "training.dataset_path", f"{url} has no manifest.json")
    assert len(said.splitlines()) == 2 and not (tmp_path / "run").exists()
