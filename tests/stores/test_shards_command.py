"""The real command on token shards of a store: the losses of a run on a folder, whatever is cached
when, and a mistake is refused before any worker starts.
"""

from __future__ import annotations

import pytest

from tests.jobs import TINY
from tests.messages import says
from tests.runs import run
from tests.stores.test_shards import cached, folder, put
from titanlite.cli import main

__all__ = ["folder"]
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


@pytest.mark.long
def test_a_shard_that_changes_under_a_run_ends_it_with_its_name(train, folder, url, proxy):
    put(folder, url)
    met = list[str]()

    def rule(method: str, path: str) -> dict[str, int] | None:
        if path.endswith(".bin"):
            met.append(path)
        return {"status": 404} if len(met) > 60 and path.endswith("3.bin") else None

    proxy.rule = rule
    ended = train("run", url, "--training.steps=2000", "--fault.max_restarts=0", code=None)
    says(ended.out, f"{url}/shard-000003.bin")
    assert ended.code not in (0, 2)
