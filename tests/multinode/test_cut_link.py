"""A run whose nodes lose sight of each other for a while goes on by itself."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs import run_to_end
from tests.multinode.hosts import ARGV, Hosts
from tests.runs import finish, records

pytestmark = pytest.mark.long
SAVING = [
    *ARGV,
    "--checkpoint.enable",
    "--checkpoint.interval=5",
    "--checkpoint.async_mode=disabled",
]
SAVING += ["--training.steps=60", "--debug.seed=5"]


def saved_once(nodes: list[subprocess.Popen], folder: Path) -> None:
    """Return when the run of these launchers has its first checkpoint."""
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint/step-5").exists():
        assert time.monotonic() < deadline and nodes[0].poll() is None
        time.sleep(0.02)


def test_a_cable_that_was_pulled_for_20_seconds_changes_no_loss(pool, hosts: Hosts, tmp_path):
    nodes = [hosts.start(node, SAVING, tmp_path / "two", processes=1) for node in (0, 1)]
    saved_once(nodes, tmp_path / "two")
    hosts.do("cut", "node1")
    time.sleep(20)
    hosts.do("heal", "node1")
    results = [finish(node, 300) for node in nodes]
    assert [code for code, _ in results] == [0, 0], results
    assert "restart 1 of 3" in results[0][1] and "restart 1 of 3" in results[1][1], results
    pool.run(run_to_end, SAVING, str(tmp_path / "one"), world=1)
    two, one = (
        {r["step"]: r["loss"] for r in records(tmp_path / name) if "loss" in r}
        for name in ("two", "one")
    )
    assert two == pytest.approx(one, rel=1e-9)


@pytest.mark.exhaustive
def test_a_node_that_is_cut_off_for_good_ends_also_if_it_is_asked_to(hosts: Hosts, tmp_path):
    """Its launcher does not wait for an answer of the store that never comes."""
    argv = [
        *SAVING,
        "--training.steps=100000",
        "--fault.rejoin_seconds=5",
        "--fault.grace_seconds=5",
    ]
    nodes = [hosts.start(node, argv, tmp_path, processes=1) for node in (0, 1)]
    saved_once(nodes, tmp_path)
    hosts.do("cut", "node1")
    nodes[1].send_signal(signal.SIGTERM)
    (_, kept), (code, out) = (finish(node, 60) for node in nodes)
    assert "missing: NODE_RANK 1" in kept, kept
    assert code in (75, 76) and "on request (SIGTERM to the launcher" in out, out
