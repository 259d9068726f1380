"""Before the model is built: what differs between ranks is named, and the network is timed."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.jobs import TINY, keeping_log, trainer
from tests.messages import refused, says
from titanlite.runtime.rank_files import ATTEMPT
from titanlite.train.rank_facts import RankFacts, differences, notable
from titanlite.verify.pool import RankFailed

REVISION = "0123456789" * 4


def some(rank: int, **changes: Any) -> RankFacts:
    """Return facts of a rank, two of which are on a host."""
    host = f"host{rank // 2}"
    own = RankFacts(rank, host, "", "cpu", "", "", "3.11", REVISION, "", 1 << 40, "a", 100.0)
    return replace(own, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda"),
        ("software", "titanlite 0, torch 2"),
        ("revision", f"f{REVISION[1:]}"),
    ],
)
def test_a_fact_that_differs_is_named_with_its_ranks_and_hosts(name, value):
    own = getattr(some(0), name) or "other"
    facts = [some(rank, **{name: own if rank < 2 else value}) for rank in range(4)]
    (line,) = differences(facts)
    says(line, name, f"rank 0 has {own}", f"ranks 2-3 on host1 have {value}")


def test_files_that_a_rank_changed_and_an_unknown_revision_are_no_difference():
    assert not differences([some(0), some(1, revision=f"{REVISION} with changes")])
    assert not differences([some(0), some(1, revision="")])


def start_with_another_rate(folder: str) -> None:
    """Start with another learning rate on each rank, and another folder, which may differ."""
    rank = dist.get_rank()
    trainer([*TINY, f"--optimizer.lr=0.{rank + 1}"], f"{folder}/{rank}")


def test_of_configs_that_differ_the_key_and_both_values_are_named(pool, tmp_path):
    with refused("config", "rank 1 on host1", "(optimizer.lr: 0.1 -> 0.2)", kind=RankFailed):
        pool.run(start_with_another_rate, str(tmp_path), world=2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clock": 103.5}, ["clock", "host1", "3.5 s", "host0"]),
        ({"folder": "b"}, ["job.dump_folder", "ranks 0-1 on host0", "rank 2 on host1"]),
        ({"free_bytes": 5 << 20}, ["job.dump_folder", "5.0 MiB", "host1"]),
        ({"gpu": "H100"}, ["GPUs", "ranks 0-1 on host0: none", "rank 2 on host1: H100"]),
    ],
)
def test_what_may_differ_is_told(changes, named):
    (line,) = notable([some(0), some(1), some(2, **changes)])
    says(line, *named)


def test_equal_facts_are_not_told_and_one_host_has_one_clock():
    assert not notable([some(rank) for rank in range(4)])
    assert not notable([some(0), some(1, clock=104.0)])


def log_of_start(argv: list[str], folder: str, attempt: str = "") -> list[str]:
    log, lines = keeping_log()
    with pytest.MonkeyPatch.context() as patch:
        if attempt:
            patch.setenv(ATTEMPT, attempt)
        trainer(argv, folder, log)
    return lines


def test_the_network_is_timed_unless_switched_off_or_a_launcher_did_before(pool, tmp_path):
    def lines(world: int = 2, attempt: str = "", flag: str = "preflight") -> list[str]:
        argv = [*TINY, f"--fault.{flag}"]
        first, *others = pool.run(log_of_start, argv, str(tmp_path), attempt, world=world)
        assert not any(
            line.startswith(("preflight", "network")) for each in others for line in each
        )
        return [line for line in first if line.startswith(("preflight", "network"))]

    for attempt in ("", "1"):
        agreed, timed = lines(attempt=attempt)
        says(agreed, "preflight", "2 ranks on 2 hosts", "config ")
        says(timed, "network", "dp_shard 2: ", " GB/s")
    (agreed,) = lines(attempt="2")
    says(agreed, "preflight", "2 ranks")
    assert lines(flag="no_preflight") == lines(world=1) == []
