"""Hosts, each with its own network, name and launcher, train as one machine does, whatever happens
to them.
"""

import re
from pathlib import Path

import pytest

from tests.multinode.hosts import ARGV, Hosts
from tests.multinode.slurm import wait_until
from tests.runs import finish, records, start

pytestmark = pytest.mark.long
LIMIT = 300
"""Seconds: eight ranks that start together on two cores load torch for long."""


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if "loss" in record]


@pytest.mark.exhaustive
def test_hsdp_with_tensor_parallel_on_two_hosts_has_the_losses_of_one_process(
    hosts: Hosts, tmp_path
):
    mesh = [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.tensor_parallel_degree=2",
    ]
    nodes = [hosts.start(node, [*ARGV, *mesh], tmp_path / "two", processes=4) for node in (0, 1)]
    results = [finish(node, LIMIT) for node in nodes]
    assert [code for code, _ in results] == [0, 0], results
    out = results[0][1]
    assert "8 ranks on 2 hosts" in out and "dp_replicate 2 x dp_shard 2 x tp 2" in out
    code, out = finish(start(ARGV, tmp_path / "one", NGPU="1"), LIMIT)
    assert code == 0, out
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)


@pytest.mark.parametrize("hosts", [4], indirect=True)
@pytest.mark.exhaustive
def test_the_preflight_names_the_host_with_a_slow_link(hosts: Hosts, tmp_path):
    hosts.do("slow", "node2", "20mbit")
    nodes = [hosts.start(node, ARGV, tmp_path, processes=1, verb="doctor") for node in range(4)]
    results = [finish(node, LIMIT) for node in nodes]
    assert [code for code, _ in results] == [0] * 4, results
    named = re.findall("^warning: slow with each host tried: (.*?),", results[0][1], re.MULTILINE)
    assert named == ["rank 2 on node2"], results[0][1]


def test_a_run_goes_on_without_a_host_that_lost_its_power_and_no_loss_changes(
    hosts: Hosts, tmp_path
):
    saving = [
        *ARGV,
        "--checkpoint.enable",
        "--checkpoint.interval=5",
        "--checkpoint.async_mode=disabled",
    ]
    saving += ["--training.steps=60", "--fault.min_nodes=1", "--fault.rejoin_seconds=5"]
    nodes = [hosts.start(node, saving, tmp_path / "two", processes=1) for node in (0, 1)]
    wait_until((tmp_path / "two/checkpoint/step-5").exists, "the first checkpoint", LIMIT)
    hosts.do("kill", "node1")
    code, out = finish(nodes[0], LIMIT)
    finish(nodes[1])
    assert code == 0 and "NODE_RANK=1 does not answer" in out and "restart 1 of 3" in out, out
    code, out = finish(start(saving, tmp_path / "one", NGPU="1"), LIMIT)
    assert code == 0, out
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
