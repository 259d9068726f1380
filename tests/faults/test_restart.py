"""A run that loses a rank, a process or a node continues without help, or says why it does not."""

import re
import signal
import subprocess
import time

import pytest

from tests.jobs import TINY, run_to_end
from tests.launch.nodes import cluster, outputs, start_nodes
from tests.messages import says
from tests.runs import losses, rank_pids, run, signal_all, start, wait_for
from titanlite.checkpoint.manifest import committed
from titanlite.errors import FAILED, GIVEN_UP, REFUSED, STOPPED
from titanlite.observe.events import read_events
from titanlite.runtime.store import LocalPath

SAVING = [
    *TINY,
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.async_mode=disabled",
    "--metrics.log_freq=1",
    "--training.steps=8",
    "--debug.seed=5",
    "--lr_scheduler.warmup_steps=0",
]
INJURED = [*SAVING, "--model.package=injured"]
ALL_STEPS = [*range(1, 9)]


@pytest.mark.long
def test_a_killed_rank_is_replaced_and_the_run_equals_one_that_was_never_disturbed(pool, tmp_path):
    pool.run(run_to_end, SAVING, str(tmp_path / "whole"), world=2)
    killed = run(INJURED, tmp_path / "killed", 2, INJURY="kill:backward:1:6")
    assert killed.losses == losses(tmp_path / "whole")
    says(killed.out, "rank 1 on ", "SIGKILL", "step 5 is done")
    says(killed.out, f"restart 1 of 3, from {tmp_path}/killed/checkpoint/step-4; ")
    assert killed.out.index("restart 1 of 3") < killed.out.index("resumed step 4")
    logs = tmp_path / "killed/logs"
    names = {"attempt-1", "rank-0.log", "rank-1.log", "ranks.json"}
    assert {path.name for path in logs.iterdir()} == names
    assert "injured: kill" in (logs / "attempt-1/rank-1.log").read_text()
    first, _, restart, second, begin, stop = read_events(killed.folder)
    assert [each["event"] for each in (first, restart, second)] == ["start", "restart", "start"]
    says(restart["why"], "rank 1 on ", "SIGKILL", "restart 1 of 3")
    assert (begin["mesh"], begin["step"], stop["how"]) == ("dp_shard 2", 4, "done")
    assert first["time"] < restart["time"] < stop["time"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "most", "code", "says_last"),
    [
        ("kill:backward:1:6, kill:backward:0:5:2", 1, GIVEN_UP, "fault.max_restarts = 1"),
        ("kill:backward:1:6, kill:load:0:0:2", 3, 0, "restart 2 of 3"),
    ],
    ids=["without a save between", "while it loads"],
)
def test_two_failures_end_a_run_only_if_they_spend_its_restarts(
    tmp_path, kills, most, code, says_last
):
    """It has them all again after a save."""
    ended = run(INJURED, tmp_path, 2, code, INJURY=kills, MAX_RESTARTS=str(most))
    assert ended.out.count(f" of {most}, from ") == (1 if code else 2)
    says(ended.out.partition("restart 1")[2], says_last)
    assert code or [*ended.losses] == ALL_STEPS


# ---------------------------------------------------------------- several nodes

TWO = [*INJURED, "--training.global_batch_size=4"]
SLOW = [
    *TWO,
    "--training.steps=100000",
    "--lr_scheduler.total_steps=100000",
    "--checkpoint.keep_latest_k=2",
]


def saved(folder: LocalPath, step: int, launcher: subprocess.Popen) -> None:
    wait_for(folder / f"checkpoint/step-{step}", launcher, 200)


def split(nodes: list[subprocess.Popen]) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Return the node with rank 1, and the spare one."""
    first, second = sorted(nodes[1:], key=lambda node: 1 not in rank_pids(node))
    assert [*rank_pids(first)] == [1] and not rank_pids(second)
    return first, second


@pytest.mark.long
def test_a_rank_that_is_killed_on_another_node_is_replaced(tmp_path):
    nodes = start_nodes(TWO, tmp_path, INJURY="kill:backward:1:6")
    first, second = outputs(nodes)
    for out in (first, second):
        says(out, "rank 1 on ", "SIGKILL")
    says(first, "restart 1 of 3, from ")
    assert [*losses(tmp_path)] == ALL_STEPS


@pytest.mark.long
def test_a_request_to_a_rank_that_only_starts_stops_every_node(tmp_path):
    nodes = start_nodes(TWO, tmp_path, INJURY="term:start:1:0")
    for out in outputs(nodes, STOPPED):
        says(out, "SIGTERM", "starting")
        assert "restart" not in out and "Traceback" not in out


@pytest.mark.long
def test_a_spare_node_takes_the_place_of_a_lost_one(pool, tmp_path):
    pool.run(run_to_end, SAVING, str(tmp_path / "whole"), world=2)
    folder = tmp_path / "run"
    nodes = start_nodes([*TWO, "--fault.spare_nodes=1"], folder, 3, INJURY="sleep:backward:1:6")
    saved(folder, 4, nodes[0])
    lost, spare = split(nodes)
    signal_all(lost)
    first, second = outputs([nodes[0], spare])
    says(first, "NODE_RANK 0 (3 nodes, 1 spare;")
    says(second, "spare", "attempt 2")
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.long
def test_a_request_to_a_spare_that_never_had_workers_ends_all_nodes_at_one_step(tmp_path):
    nodes = start_nodes([*SLOW, "--fault.spare_nodes=1"], tmp_path, 3)
    saved(tmp_path, 6, nodes[0])
    _, spare = split(nodes)
    spare.send_signal(signal.SIGTERM)
    ends = outputs(nodes, STOPPED)
    steps = {re.findall(r"step (\d+) of 100000 on request", out)[-1] for out in ends}
    assert len(steps) == 1 and int(*steps) >= 6, ends


@pytest.mark.long
def test_a_launcher_that_is_started_again_joins_the_next_attempt(tmp_path):
    variables = cluster()
    first, second = start_nodes(SLOW, tmp_path, 2, **variables)
    saved(tmp_path, 4, first)
    second.kill()
    second.wait()
    again = start(SLOW, tmp_path, NODE_RANK="1", **variables)
    wait_for(tmp_path / "logs/attempt-1", first, 200)
    saved(tmp_path, committed(tmp_path / "checkpoint")[-1] + 6, first)
    third = start(SLOW, tmp_path, NODE_RANK="1", **variables)
    (out,) = outputs([third], REFUSED)
    says(out, "two launchers", "NODE_RANK=1")
    again.send_signal(signal.SIGINT)
    for out in outputs([first, again], 130):
        says(out, "on request", "Ctrl-C")


@pytest.mark.long
def test_a_launcher_that_is_started_again_ends_the_attempt_that_it_replaces(tmp_path):
    """No rank notices that it has lost a peer: this one sleeps, as one may that waits for NCCL."""
    variables = cluster()
    first, second = start_nodes(TWO, tmp_path, 2, INJURY="sleep:optimizer:0:6", **variables)
    saved(tmp_path, 4, first)
    time.sleep(2)  # step 6 is reached
    second.kill()
    second.wait()
    again = start(TWO, tmp_path, NODE_RANK="1", **variables)
    out, _ = outputs([first, again])
    says(out, "NODE_RANK=1", "another")
    assert [*losses(tmp_path)] == ALL_STEPS
    log = tmp_path / "logs/attempt-1/rank-1.log"
    assert log.exists(), "which the lost launcher could not move"


@pytest.mark.long
def test_a_lost_node_0_ends_the_others(tmp_path):
    first, second = start_nodes(SLOW, tmp_path)
    saved(tmp_path, 4, first)
    first.kill()
    (out,) = outputs([second], FAILED)
    says(out, "node 0's launcher", "store")
