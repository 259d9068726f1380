"""A run whose nodes lose sight of each other for a while goes on by itself."""

import time

import pytest

from tests.jobs import run_to_end
from tests.launch.run import finish, records
from tests.multinode.hosts import ARGV, Hosts

pytestmark = pytest.mark.long
SAVING = [*ARGV, "--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.async_mode=disabled"]
SAVING += ["--training.steps=60", "--debug.seed=5"]


def test_a_cable_that_was_pulled_for_20_seconds_changes_no_loss(pool, hosts: Hosts, tmp_path):
    nodes = [hosts.start(node, SAVING, tmp_path / "two", processes=1) for node in (0, 1)]
    saved, deadline = tmp_path / "two/checkpoint/step-5", time.monotonic() + 200
    while not saved.exists():
        assert time.monotonic() < deadline and nodes[0].poll() is None
        time.sleep(0.02)
    hosts.do("cut", "node1")
    time.sleep(20)
    hosts.do("heal", "node1")
    results = [finish(node, 300) for node in nodes]
    assert [code for code, _ in results] == [0, 0], results
    assert "restart 1 of 3" in results[0][1] and "restart 1 of 3" in results[1][1], results
    pool.run(run_to_end, SAVING, str(tmp_path / "one"), world=1)
    two, one = ({r["step"]: r["loss"] for r in records(tmp_path / name) if "loss" in r} for name in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-9)
