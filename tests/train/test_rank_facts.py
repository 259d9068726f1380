"""Before the model is built: what differs between ranks is named, and what is slow."""

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saved import keeping_log
from tests.jobs import TINY, job, trainer
from tests.messages import refused, says
from titanlite.parallel.mesh import build_mesh
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.runtime.rank_files import ATTEMPT
from titanlite.train import network
from titanlite.train.network import Timed, check_network, slow_parts
from titanlite.train.rank_facts import Facts, differences, gpu_complaints, notable
from titanlite.verify.pool import RankFailed

CPU = torch.device("cpu")
PAIRS = ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=2"]
REVISION = "0123456789" * 4


def some(rank: int, **changes: Any) -> Facts:
    """Return facts of a rank, two of which are on a host."""
    host = f"host{rank // 2}"
    own = Facts(rank, host, "", "cpu", "", "", "3.11", REVISION, [], "", 1 << 40, "a", 100.0)
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
        ({"complaints": ["GPU 1 has hw_slowdown"]}, ["GPU 1 has hw_slowdown", "host1"]),
    ],
)
def test_what_may_differ_is_told(changes, named):
    (line,) = notable([some(0), some(1), some(2, **changes)])
    says(line, *named)


def test_equal_facts_are_not_told_and_one_host_has_one_clock():
    assert not notable([some(rank) for rank in range(4)])
    assert not notable([some(0), some(1, clock=104.0)])


NEW_DRIVER = """<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.105.08</driver_version><attached_gpus>2</attached_gpus>
<gpu id="00000000:19:00.0"><clocks_event_reasons>
<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons><ecc_errors><volatile><sram_correctable>4</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity><dram_uncorrectable>N/A</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors></gpu>
<gpu id="00000000:3B:00.0"><clocks_event_reasons>
<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<ecc_errors><volatile><dram_uncorrectable>3</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows></gpu></nvidia_smi_log>"""
OLD_DRIVER = """<nvidia_smi_log><gpu id="1"><clocks_throttle_reasons>
<clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown>
</clocks_throttle_reasons><ecc_errors><volatile><single_bit><total>9</total></single_bit>
<double_bit><total>2</total></double_bit></volatile></ecc_errors></gpu></nvidia_smi_log>"""


def test_memory_errors_and_slowdowns_are_read_from_old_and_new_drivers():
    (line,) = gpu_complaints(NEW_DRIVER)
    remapped = "remapped_row_pending=Yes"
    says(line, "GPU 00000000:3B:00.0", " dram_uncorrectable=3 ", "hw_thermal_slowdown", remapped)
    (line,) = gpu_complaints(OLD_DRIVER)
    says(line, "GPU 1 ", " total=2 ", "hw_power_brake_slowdown")
    for text in ("", "NVIDIA-SMI has failed", "<a></a>"):
        assert gpu_complaints(text) == []


def rounds(world: int, seconds: Callable[[int, int], float]) -> list[list[Timed]]:
    """Return what ranks see of exchanges that take so long between two of them."""
    found: list[list[Timed]] = []
    for bit in range((world - 1).bit_length()):
        pairs = [(rank, rank ^ (1 << bit)) for rank in range(world)]
        pairs = [(one, other) for one, other in pairs if one < other < world]
        found.append([Timed(pair, 8_000_000, seconds(*pair)) for pair in pairs])
    return found


@pytest.mark.parametrize("world", [4, 6, 64])
def test_a_rank_a_host_or_a_link_that_is_slow_is_told_from_the_others(world):
    ranks = [some(rank) for rank in range(world)]

    def slow(seconds: Callable[[int, int], float]) -> list[tuple[str, str]]:
        """Return what is slow: with each of what, and which ranks."""
        lines = [
            line.partition(" on ")[0] for line in slow_parts({}, rounds(world, seconds), ranks)
        ]
        return [(line.split()[3], line.split()[-1]) for line in lines]

    def where(is_slow: Callable[[int, int], bool]) -> list[tuple[str, str]]:
        return slow(lambda a, b: 0.4 if is_slow(a, b) else 0.1)

    assert not where(lambda a, b: False) and not where(lambda a, b: True)
    assert not slow(lambda a, b: 0.19 if (a + b) % 3 else 0.1), "not twice as slow"
    for one in range(4):  # of 6 ranks, 4 and 5 meet too few to tell a rank from its links
        assert where(lambda a, b, one=one: one in (a, b)) == [("rank", f"{one}")]
        link = {one, one ^ 1}
        ends = f"{min(link)}-{max(link)}"
        assert where(lambda a, b, link=link: {a, b} == link) == [("other:", ends)]
    if world > 6:  # of three hosts, each round has but one pair
        found = where(lambda a, b: a // 2 != b // 2 and 0 in (a // 2, b // 2))
        assert found == [("host", "0-1")]


def test_a_slow_group_is_named_where_no_rank_or_link_explains_it():
    ranks = [some(rank) for rank in range(4)]
    groups = {"tp": [Timed((0, 1), 8_000_000, 0.1), Timed((2, 3), 8_000_000, 0.5)]}
    (line,) = slow_parts(groups, [], ranks)
    says(line, " tp: ", "ranks 2-3 on host1", "500 ms", "8 MB", "100 ms")
    crossing = {"dp_shard": [Timed((0, 2), 100_000, 0.5)]}
    (line,) = slow_parts(crossing, [], ranks)
    says(line, "network", "0.0002 GB/s", "ranks 0, 2 on host0, host1")


def sent_to_rank_0() -> tuple[int, dict[str, list[Timed]]]:
    """Return the bytes that this rank sends of what it measured, and on rank 0 the groups."""
    sent: list[Any] = []

    def gather(value: Any) -> list[Any]:
        sent.append(value)
        return gather_on_rank_0(value)

    with patch.object(network, "gather_on_rank_0", gather):
        mesh = build_mesh(job(TINY, dist.get_world_size()).layout, "cpu").world
        groups, _ = network.measure(mesh, CPU)
    return len(pickle.dumps(sent)), groups


def test_a_rank_sends_what_it_measured_and_no_list_of_ranks(pool):
    """As much on 4 ranks as on 2, but for a round; rank 0 knows who was in each group."""
    (two, _), *_ = pool.run(sent_to_rank_0, world=2)
    (four, groups), *others = pool.run(sent_to_rank_0, world=4)
    assert four - two < 40
    assert [one.ranks for one in groups["dp_shard"]] == [(0, 1, 2, 3)]
    assert not any(theirs for _, theirs in others)


def lines_with_a_slow_rank(argv: list[str], slow: int) -> list[str]:
    """Return the lines of a preflight in which a rank is late to every transfer."""
    world = dist.get_world_size()
    mesh = build_mesh(job([*TINY, *argv], world).layout, "cpu").world

    def late(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(0.4)
            return original(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "batch_isend_irecv") if dist.get_rank() == slow else ():
            patch.setattr(dist, name, late(getattr(dist, name)))
        return check_network(mesh, CPU, [some(rank) for rank in range(world)])


def test_a_rank_that_is_late_is_named(pool):
    found = pool.run(lines_with_a_slow_rank, PAIRS, 3, world=4)
    assert not any(found[1:]), "rank 0 has the log"
    (line,) = [line for line in found[0] if "slow with each" in line]
    says(line, "warning: ", "rank 3 on host1")


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
