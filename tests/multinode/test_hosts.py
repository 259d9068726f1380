"""Hosts, each with its own network, name and launcher, train as one machine does, whatever happens
to them.
"""

import json
import re

import pytest

from tests.launch.nodes import outputs
from tests.messages import says
from tests.multinode.hosts import ARGV, SAVING, Hosts
from tests.runs import finish, losses, run, wait_for

pytestmark = pytest.mark.long
LIMIT = 300
"""Seconds: eight ranks that start together on two cores load torch for long."""


@pytest.mark.nightly
def test_hsdp_with_tensor_parallel_on_two_hosts_has_the_losses_of_one_process(
    hosts: Hosts, tmp_path
):
    degrees = ["data_parallel_replicate_degree=2", "tensor_parallel_degree=2"]
    mesh = [f"--parallelism.{degree}" for degree in degrees]
    nodes = hosts.start_all([*ARGV, *mesh], tmp_path / "two", processes=4)
    first, _ = outputs(nodes, seconds=LIMIT)
    says(first, "8 ranks on 2 hosts", "dp_replicate 2 x dp_shard 2 x tp 2")
    one = run(ARGV, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(one.losses, rel=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_the_doctor_names_the_host_with_a_slow_link(hosts: Hosts, tmp_path):
    hosts.do("slow", "node2", "20mbit")
    nodes = hosts.start_all(ARGV, tmp_path, verb="doctor")
    first, *_ = outputs(nodes, seconds=LIMIT)
    (warning,) = re.findall("(?m)^warning: slow .*", first)
    assert re.findall(r"rank \d on node\d", warning.partition(",")[0]) == ["rank 2 on node2"]


def test_a_run_goes_on_without_a_host_that_lost_its_power_and_no_loss_changes(
    hosts: Hosts, tmp_path
):
    argv = [*SAVING, "--fault.min_nodes=1", "--fault.rejoin_seconds=5"]
    two = tmp_path / "two"
    nodes = hosts.start_all(argv, two)
    wait_for(two / "checkpoint/step-5", nodes[0], LIMIT)
    hosts.do("kill", "node1")
    code, out = finish(nodes[0], LIMIT)
    finish(nodes[1])
    assert code == 0, out
    says(out, "NODE_RANK=1", "restart 1 of 3")
    assert json.loads((two / "environment.json").read_text())["world_size"] == 1
    assert losses(two) == pytest.approx(run(argv, tmp_path / "one").losses, rel=1e-9)
