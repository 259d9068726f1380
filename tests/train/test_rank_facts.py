"""Before the model is built: what differs between ranks is named, and what is slow."""

import logging
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import TINY, job, trainer
from tests.lanes import sample
from titanlite.errors import UserError
from titanlite.parallel.mesh import build_mesh
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.runtime.rank_files import ATTEMPT
from titanlite.train import network
from titanlite.train.network import Timed, _always_slow, check_network, slow_parts
from titanlite.train.rank_facts import (
    Facts,
    facts_of,
    gpu_complaints,
    notable,
    require_equal,
)
from titanlite.verify.pool import Pool

CPU = torch.device("cpu")
PAIRS = ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=2"]
REVISION = "0123456789" * 4


def facts(argv: list[str], folder: str) -> Facts:
    """Return those of this rank, two of which are on a host."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = RankInfo(rank, world, rank % 2, f"host{rank // 2}")
    return facts_of(job([*argv, f"--job.dump_folder={folder}"], world), own, CPU, REVISION)


def refusals(folder: str, others: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return for each case why ranks are refused of which ranks 2 and 3 have other facts."""
    found, world, own = {}, dist.get_world_size(), facts(TINY, folder)
    for case, changes in others.items():
        try:
            require_equal(
                gather_on_rank_0(replace(own, **changes) if dist.get_rank() > 1 else own), world
            )
        except UserError as error:
            found[case] = str(error)
    return found


def test_each_differing_fact_is_named_with_its_ranks_and_hosts_on_all_ranks(pool, tmp_path):
    others = {
        "same": {},
        "order": {"order": "1F1B"},
        "device": {"device": "cuda"},
        "software": {"software": "titanlite 0, torch 2"},
        "revision": {"revision": f"f{REVISION[1:]}"},
        "changes": {"revision": f"{REVISION} with changes"},
        "unknown": {"revision": ""},
        "two": {"device": "cuda", "software": "other"},
    }
    found = pool.run(refusals, str(tmp_path), others, world=4)
    assert all(own == found[0] for own in found) and found[0].keys() == others.keys() - {
        "same",
        "changes",
        "unknown",
    }
    there = "ranks 2-3 on host1 have"
    assert (
        found[0]["device"]
        == f"the kind of device differs between ranks: rank 0 has cpu, {there} cuda"
    )
    assert (
        found[0]["order"].startswith("the order of the pipeline differs")
        and f"{there} 1F1B" in found[0]["order"]
    )
    assert found[0]["software"].endswith(f", {there} titanlite 0, torch 2")
    assert found[0]["revision"].startswith(
        f"the code's revision differs between ranks: rank 0 has {REVISION}, {there} f"
    )
    assert len(found[0]["two"].splitlines()) == 2


def refusal_of_configs(folder: str) -> str:
    """Return why ranks are refused that have other learning rates, and other folders, which may
    differ.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    with pytest.raises(UserError) as error:
        require_equal(
            gather_on_rank_0(facts([*TINY, f"--optimizer.lr=0.{rank + 1}"], f"{folder}/{rank}")),
            world,
        )
    return str(error.value)


def test_of_configs_that_differ_the_key_and_both_values_are_named(pool, tmp_path):
    for message in pool.run(refusal_of_configs, str(tmp_path), world=2):
        assert message.startswith("the config differs between ranks: rank 0 has ")
        assert message.endswith(" (optimizer.lr: 0.1 -> 0.2)") and "rank 1 on host0 has " in message


def some(rank: int, **changes: Any) -> Facts:
    own = Facts(
        rank, f"host{rank // 2}", "", "", "cpu", "", "", "3.11", "", [], "", 1 << 40, "a", 100.0
    )
    return replace(own, **changes)


def test_what_may_differ_is_told():
    assert not notable([some(rank) for rank in range(4)])
    assert not notable([some(0), some(1, clock=104.0)]), "one host has one clock"
    late = [some(0), some(2, clock=103.5)]
    assert notable(late) == [
        "the clock of host1 is 3.5 s ahead of that of host0, as times in their logs will be"
    ]
    (line,) = notable([some(0), some(1), some(2, folder="b")])
    assert line == (
        "job.dump_folder is not shared: each of these has its own: "
        "ranks 0-1 on host0; rank 2 on host1"
    )
    assert notable([some(0), some(2, free_bytes=5 << 20)]) == [
        "job.dump_folder has only 5.0 MiB free on host1"
    ]
    assert notable([some(0), some(1, gpu="H100")]) == [
        "ranks have different GPUs: rank 0 on host0: none; rank 1 on host0: H100"
    ]
    assert notable([some(0, complaints=["GPU 1 has hw_slowdown"])]) == [
        "GPU 1 has hw_slowdown on host0"
    ]


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
    assert line.startswith("GPU 00000000:3B:00.0 has dram_uncorrectable=3 since its driver started")
    assert line.endswith(", hw_thermal_slowdown, remapped_row_pending=Yes")
    assert gpu_complaints(OLD_DRIVER) == [
        "GPU 1 has total=2 since its driver started, hw_power_brake_slowdown"
    ]
    assert (
        not gpu_complaints("")
        and not gpu_complaints("NVIDIA-SMI has failed")
        and not gpu_complaints("<a></a>")
    )


def rounds(world: int, seconds: Callable[[int, int], float]) -> list[list[Timed]]:
    """Return what ranks see of exchanges that take so long between two of them."""
    found: list[list[Timed]] = []
    for bit in range((world - 1).bit_length()):
        pairs = [(rank, rank ^ (1 << bit)) for rank in range(world)]
        pairs = [(one, other) for one, other in pairs if one < other < world]
        found.append([Timed(pair, 8_000_000, seconds(*pair)) for pair in pairs])
    return found


@pytest.mark.parametrize("world", [4, 6, 8, 16, 64])
def test_a_rank_a_host_or_a_link_that_is_slow_is_told_from_the_others(world):
    ranks = [some(rank) for rank in range(world)]  # two on a host

    def slow(is_slow: Callable[[int, int], bool]) -> list[str]:
        lines = slow_parts({}, rounds(world, lambda a, b: 0.4 if is_slow(a, b) else 0.1), ranks)
        return [line.partition(" on ")[0] for line in lines]

    assert not slow(lambda a, b: False) and not slow(lambda a, b: True)
    assert not slow_parts({}, rounds(world, lambda a, b: 0.19 if (a + b) % 3 else 0.1), ranks), (
        "not twice as slow"
    )
    for one in range(4):  # of 6 ranks, 4 and 5 meet too few to tell a rank from its links
        assert slow(lambda a, b, one=one: one in (a, b)) == [
            f"slow with each rank tried: rank {one}"
        ]
        link = {one, one ^ 1}
        assert slow(lambda a, b, link=link: {a, b} == link) == [
            f"slow with each other: ranks {min(link)}-{max(link)}"
        ]
    if world > 6:  # of three hosts, each round has but one pair
        host_0 = slow(lambda a, b: a // 2 != b // 2 and 0 in (a // 2, b // 2))
        assert host_0 == ["slow with each host tried: ranks 0-1"]


def test_who_met_only_one_partner_is_not_told_from_the_link():
    assert _always_slow([("a", "b", True)]) == []
    assert _always_slow([("a", "b", True), ("a", "c", True), ("b", "c", False)]) == ["a"]


def test_a_slow_group_is_named_where_no_rank_or_link_explains_it():
    ranks = [some(rank) for rank in range(4)]
    groups = {"tp": [Timed((0, 1), 8_000_000, 0.1), Timed((2, 3), 8_000_000, 0.5)]}
    (line,) = slow_parts(groups, [], ranks)
    assert line == "slow group of tp: ranks 2-3 on host1, 500 ms for 8 MB, peers 100 ms"
    crossing = {"dp_shard": [Timed((0, 2), 100_000, 0.5)]}
    (line,) = slow_parts(crossing, [], ranks)
    assert line.startswith("slow network between hosts (0.0002 GB/s): ranks 0, 2 on host0, host1")


def sent_to_rank_0(argv: list[str], folder: str) -> tuple[int, dict[str, list[Timed]]]:
    """Return the bytes that this rank sends of what it measured, and on rank 0 the groups."""
    found, sent = job([*TINY, *argv], dist.get_world_size()), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            network,
            "gather_on_rank_0",
            lambda value: [sent.append(value), gather_on_rank_0(value)][1],
        )
        groups, _ = network.measure(build_mesh(found.layout, "cpu").world, CPU)
    return len(pickle.dumps(sent)), groups


def test_a_rank_sends_what_it_measured_and_no_list_of_ranks(pool, tmp_path):
    """As much on 4 ranks as on 2, but for a round; rank 0 knows who was in each group."""
    (two, _), *_ = pool.run(sent_to_rank_0, [], str(tmp_path), world=2)
    (four, groups), *others = pool.run(sent_to_rank_0, [], str(tmp_path), world=4)
    assert four - two < 40
    assert [one.ranks for one in groups["dp_shard"]] == [(0, 1, 2, 3)]
    assert not any(others_groups for _, others_groups in others)
    _, groups = pool.run(sent_to_rank_0, PAIRS, str(tmp_path), world=4)[0]
    assert [one.ranks for one in groups["dp_shard"]] == [(0, 2), (1, 3)]
    assert [one.ranks for one in groups["tp"]] == [(0, 1), (2, 3)]


def lines_with_a_slow_rank(argv: list[str], folder: str, slow: int) -> list[str]:
    """Return the lines of a preflight in which a rank is late to every transfer."""
    found, everyone = (
        job([*TINY, *argv], dist.get_world_size()),
        gather_on_rank_0(facts(TINY, folder)),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "batch_isend_irecv") if dist.get_rank() == slow else ():
            original = getattr(dist, name)
            patch.setattr(
                dist,
                name,
                lambda *a, original=original, **k: [time.sleep(0.4), original(*a, **k)][1],
            )
        return check_network(build_mesh(found.layout, "cpu").world, CPU, everyone)


@pytest.mark.parametrize(
    ("world", "argv"), sample([(4, PAIRS), (8, []), (4, []), (8, PAIRS)], every=2)
)
def test_a_rank_that_is_late_is_named(pool, tmp_path, world, argv):
    ranks = pool if world == 4 else Pool(world)
    try:
        found = ranks.run(lines_with_a_slow_rank, argv, str(tmp_path), 3, world=world)
    finally:
        if ranks is not pool:
            ranks.close()
    assert not any(found[1:]), "rank 0 has the log"
    warnings = [line for line in found[0] if line.startswith("warning: slow with each")]
    assert [line.partition(",")[0] for line in warnings] == [
        "warning: slow with each rank tried: rank 3 on host1"
    ]


def log_of_start(argv: list[str], folder: str) -> list[str]:
    lines: list[str] = []
    log, handler = logging.Logger("captured"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    trainer(argv, folder, log)
    return lines


def log_of_attempt(number: str, argv: list[str], folder: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ATTEMPT, number)
        return log_of_start(argv, folder)


def test_the_network_is_timed_unless_switched_off_or_a_launcher_did_before(pool, tmp_path):
    on, elsewhere = pool.run(log_of_start, [*TINY, "--fault.preflight"], str(tmp_path), world=2)
    assert on[0].startswith("preflight  2 ranks on 2 hosts agree: config ") and not any(
        "network" in x for x in elsewhere
    )
    assert on[1].startswith("network    all-reduce over dp_shard 2: ") and on[1].endswith(" GB/s")
    assert not any(
        line.startswith(("preflight", "network"))
        for line in pool.run(log_of_start, TINY, str(tmp_path), world=2)[0]
    )
    again = [*TINY, "--fault.preflight"]
    first, *rest = pool.run(log_of_attempt, "2", again, str(tmp_path), world=2)[0]
    assert first.startswith("preflight  2 ranks") and not any("network" in line for line in rest)
    assert any(
        "network" in line
        for line in pool.run(log_of_attempt, "1", again, str(tmp_path), world=2)[0]
    )
    alone = pool.run(log_of_start, [*TINY, "--fault.preflight"], str(tmp_path), world=1)[0]
    assert not any(line.startswith(("preflight", "network")) for line in alone)
