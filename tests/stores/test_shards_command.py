"""The real command on token shards of a store: the losses of a run on a folder, whatever is cached
when, and a mistake is refused before any worker starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.runs import finish, records, start
from tests.stores.server import credentials, mistake
from tests.stores.test_shards import cached, folder, put

__all__ = ["folder"]
STEPS = 20
ARGV = [
    *TINY,
    "--training.dataset=tokens",
    "--checkpoint.enable",
    "--checkpoint.interval=10",
    "--metrics.log_freq=1",
    "--lr_scheduler.total_steps=20",
    "--debug.seed=1",
]


def train(path: object, out: Path, port: int, *more: str) -> tuple[int, str]:
    argv = [*ARGV, f"--training.dataset_path={path}", *more]
    here = {"XDG_CACHE_HOME": str(out.parent / "user"), **credentials(port)}
    return finish(start(argv, out, NGPU="2", **here))


def losses(out: Path) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in records(out) if "loss" in each]


@pytest.mark.exhaustive
def test_losses_are_those_of_a_folder_cold_caching_and_cached_and_resumed_in_each(
    folder, url, proxy, tmp_path
):
    """The ranks read the first half themselves, workers of theirs the second."""
    half = ["--training.dataloader.num_workers=0", "--training.steps=10"]
    more = ["--training.dataloader.num_workers=2", f"--training.steps={STEPS}"]
    put(folder, url)
    code, out = train(folder, tmp_path / "local", proxy.port, *more)
    assert code == 0, out
    expected = losses(tmp_path / "local")
    assert len(expected) == STEPS
    cache = tmp_path / "cache"
    caching = f"--training.dataloader.cache_folder={cache}"
    for name, keys in {"cold": [], "caching": [caching], "cached": [caching]}.items():
        own = tmp_path / name
        assert train(url, own, proxy.port, *half, *keys)[0] == 0
        assert (len(cached(cache)) == 8) == (name != "cold")
        code, out = train(url, own, proxy.port, *more, *keys)
        assert code == 0 and losses(own) == expected, out


@pytest.mark.parametrize(
    "case", sample(["no manifest", "no answer", "no bucket", "no key"], every=2)
)
def test_what_is_wrong_with_a_url_is_one_line_before_anything_starts(case, url, proxy, tmp_path):
    url, here, line = mistake(case, url, proxy.port, tmp_path)
    line = line or f"{url} has no manifest.json"
    argv = [*ARGV, f"--training.dataset_path={url}"]
    code, out = finish(start(argv, tmp_path / "run", NGPU="1", **here))
    assert code == 2 and "training.dataset_path: s3://" in out and line in out
    assert "Traceback" not in out and not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_shard_that_changes_under_a_run_ends_it_with_its_name(folder, url, proxy, tmp_path):
    put(folder, url)
    met = list[str]()

    def rule(method: str, path: str) -> dict[str, int] | None:
        if path.endswith(".bin"):
            met.append(path)
        return {"status": 404} if len(met) > 60 and path.endswith("3.bin") else None

    proxy.rule = rule
    more = ["--training.steps=2000", "--fault.max_restarts=0"]
    code, out = train(url, tmp_path / "run", proxy.port, *more)
    assert code not in (0, 2) and f"{url}/shard-000003.bin" in out
