"""A run whose nodes lose contact for a while continues without help."""

import signal
import time

import pytest

from tests.jobs import run_to_end
from tests.launch.nodes import outputs
from tests.messages import says
from tests.multinode.hosts import SAVING, Hosts
from tests.runs import finish, losses, wait_for
from titanlite.errors import CUT_SHORT, STOPPED

pytestmark = pytest.mark.long


def test_a_cable_that_was_pulled_for_20_seconds_changes_no_loss(pool, hosts: Hosts, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    nodes = hosts.start_all(SAVING, two)
    wait_for(two / "checkpoint/step-5", nodes[0], 200)
    hosts.do("cut", "node1")
    time.sleep(20)
    hosts.do("heal", "node1")
    first, _ = outputs(nodes, seconds=300)
    says(first, "restart 1 of 3")
    pool.run(run_to_end, SAVING, str(one), world=1)
    assert losses(two) == pytest.approx(losses(one), rel=1e-9)


def test_a_node_that_is_cut_off_for_good_ends_also_if_it_is_asked_to(hosts: Hosts, tmp_path):
    """Its launcher does not wait for an answer of the store that never comes."""
    limits = ["--fault.rejoin_seconds=5", "--fault.grace_seconds=5"]
    nodes = hosts.start_all([*SAVING, "--training.steps=100000", *limits], tmp_path)
    wait_for(tmp_path / "checkpoint/step-5", nodes[0], 200)
    hosts.do("cut", "node1")
    nodes[1].send_signal(signal.SIGTERM)
    (_, kept), (code, out) = (finish(node, 60) for node in nodes)
    says(kept, "NODE_RANK 1")
    assert code in (STOPPED, CUT_SHORT), out
    says(out, "on request (SIGTERM")
