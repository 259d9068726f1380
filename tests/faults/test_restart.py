"""A run that loses a rank, a process or a node goes on by itself, or says why it does not."""

import json
import os
import re
import signal
import time

import pytest

from tests.jobs import TINY, run_to_end
from tests.launch.test_nodes import free_port
from tests.runs import descendants, finish, records, start, train
from titanlite.checkpoint.manifest import committed
from titanlite.errors import FAILED, GIVEN_UP

SAVING = [
    *TINY,
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.async_mode=disabled",
]
SAVING += [
    "--metrics.log_freq=1",
    "--training.steps=8",
    "--debug.seed=5",
    "--lr_scheduler.warmup_steps=0",
]
INJURED = [*SAVING, "--model.package=injured"]


def losses(folder) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder) if "loss" in record}


def test_a_killed_rank_is_replaced_and_the_run_equals_one_that_was_never_disturbed(pool, tmp_path):
    pool.run(run_to_end, SAVING, str(tmp_path / "whole"), world=2)
    code, out = train(INJURED, tmp_path / "killed", NGPU="2", INJURY="kill:backward:1:6")
    assert code == 0 and losses(tmp_path / "killed") == losses(tmp_path / "whole"), out
    assert (
        "exited without a traceback (SIGKILL, by hand or by the kernel when memory ran out)\n"
        in out
    )
    assert re.search(
        rf"restart 1 of 3, from {tmp_path}/killed/checkpoint/step-4; \d steps? lost\n", out
    ), out
    assert out.index("restart 1 of 3") < out.index("resumed step 4 from")
    assert re.search(r"titanlite: step 5 is done, \d+ s after the failure\n", out)
    logs = tmp_path / "killed/logs"
    names = {"attempt-1", "rank-0.log", "rank-1.log", "ranks.json"}
    assert {path.name for path in logs.iterdir()} == names
    assert "injured: kill" in (logs / "attempt-1/rank-1.log").read_text()


@pytest.mark.long
def test_a_spent_budget_of_restarts_ends_the_run(tmp_path):
    kills = "kill:backward:1:6, kill:backward:0:5:2"
    code, out = train(INJURED, tmp_path, NGPU="2", INJURY=kills, MAX_RESTARTS="1")
    assert code == GIVEN_UP and out.rstrip().endswith("given up: fault.max_restarts = 1"), out
    assert "restart 1 of 1" in out


@pytest.mark.exhaustive
def test_a_run_that_saves_between_its_failures_goes_on(tmp_path):
    kills = "kill:backward:1:4, kill:backward:0:7:2"
    code, out = train(INJURED, tmp_path, NGPU="2", INJURY=kills, MAX_RESTARTS="1")
    assert code == 0 and out.count("restart 1 of 1, from ") == 2, out


@pytest.mark.exhaustive
def test_two_quick_failures_in_a_row_are_both_survived(tmp_path):
    process = start(INJURED, tmp_path, NGPU="2", INJURY="kill:backward:1:6, kill:load:0:0:2")
    code, out = finish(process, 200)  # torch is loaded three times
    assert code == 0 and "restart 2 of 3" in out and [*losses(tmp_path)] == [*range(1, 9)], out


@pytest.mark.exhaustive
def test_what_a_user_can_correct_is_not_restarted(tmp_path):
    (tmp_path / "short.txt").write_text("abcdefgh" * 24)
    data = [
        "--training.dataset=text",
        f"--training.dataset_path={tmp_path}/short.txt",
        "--training.no_repeat",
    ]
    code, out = train([*INJURED, *data], tmp_path / "run", NGPU="2")
    assert code == FAILED and "the data ended after step 3 of 8" in out and "restart" not in out, (
        out
    )


# ---------------------------------------------------------------- several nodes


TWO = [*INJURED, "--training.global_batch_size=4"]


def several_nodes(folder, argv: list[str], count: int = 2, **environ: str):
    """Start launchers with a rank each; return them, and the variables that all have."""
    variables = {
        "NNODES": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "NGPU": "1",
        **environ,
    }
    nodes = [
        start([*TWO, *argv], folder, NODE_RANK=str(rank), **variables) for rank in range(count)
    ]
    return nodes, variables


def wait_for(path, process) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.long
def test_a_rank_that_is_killed_on_another_node_is_replaced(tmp_path):
    nodes, _ = several_nodes(tmp_path, [], INJURY="kill:backward:1:6")
    results = [finish(node, 200) for node in nodes]
    assert [code for code, _ in results] == [0, 0] and [*losses(tmp_path)] == [*range(1, 9)], (
        results
    )
    for _, out in results:
        assert (
            "titanlite: rank 1 on " in out and "SIGKILL" in out and "restart 1 of 3, from " in out
        ), out


@pytest.mark.exhaustive
def test_a_request_to_a_rank_that_only_starts_stops_every_node(tmp_path):
    nodes, _ = several_nodes(tmp_path, [], INJURY="term:start:1:0")
    results = [finish(node, 200) for node in nodes]
    assert [code for code, _ in results] == [75, 75], results
    for _, out in results:
        assert "SIGTERM to a rank that was starting" in out and "restart" not in out, out


SLOW = [
    "--training.steps=100000",
    "--lr_scheduler.total_steps=100000",
    "--checkpoint.keep_latest_k=2",
]


@pytest.mark.exhaustive
def test_a_lost_node_is_left_behind_where_fewer_are_enough(tmp_path):
    (first, second), _ = several_nodes(
        tmp_path, [*SLOW, "--fault.min_nodes=1", "--fault.rejoin_seconds=3"]
    )
    wait_for(tmp_path / "checkpoint/step-10", first)
    family = descendants(second.pid)
    for pid in (second.pid, *family):
        os.kill(pid, signal.SIGKILL)
    wait_for(tmp_path / "logs/attempt-1", first)
    newest = committed(tmp_path / "checkpoint")[-1]
    wait_for(tmp_path / f"checkpoint/step-{newest + 6}", first)
    first.send_signal(signal.SIGINT)
    code, out = finish(first)
    assert (
        code == 130
        and "the launcher of NODE_RANK=1 does not answer" in out
        and "restart 1 of 3" in out
    ), out
    assert json.loads((tmp_path / "environment.json").read_text())["world_size"] == 1
    finish(second)


@pytest.mark.long
def test_a_spare_node_takes_the_place_of_a_lost_one(pool, tmp_path):
    pool.run(run_to_end, SAVING, str(tmp_path / "whole"), world=2)
    folder = tmp_path / "run"
    nodes, _ = several_nodes(folder, ["--fault.spare_nodes=1"], 3, INJURY="sleep:backward:1:6")
    wait_for(folder / "checkpoint/step-4", nodes[0])
    spare = next(node for node in nodes[1:] if len(descendants(node.pid)) == 0)
    (lost,) = {*nodes[1:]} - {spare}
    for pid in (lost.pid, *descendants(lost.pid)):
        os.kill(pid, signal.SIGKILL)
    results = [finish(node, 200) for node in (nodes[0], spare)]
    assert [code for code, _ in results] == [0, 0], results
    assert "waits as a spare, for attempt 2" in results[1][1], results
    assert "node 0 of 3 (1 spare), from NNODES" in results[0][1]
    assert losses(folder) == losses(tmp_path / "whole")
    finish(lost)


@pytest.mark.exhaustive
def test_a_request_to_a_spare_that_never_had_workers_ends_all_nodes_at_one_step(tmp_path):
    nodes, _ = several_nodes(tmp_path, [*SLOW, "--fault.spare_nodes=1"], 3)
    wait_for(tmp_path / "checkpoint/step-6", nodes[0])
    spare = next(node for node in nodes[1:] if len(descendants(node.pid)) == 0)
    spare.send_signal(signal.SIGTERM)
    results = [finish(node, 200) for node in nodes]
    assert [code for code, _ in results] == [75] * 3, results
    steps = {re.findall(r"stopped at step (\d+)", out)[-1] for _, out in results}
    assert len(steps) == 1 and int(*steps) >= 6, results


@pytest.mark.exhaustive
def test_a_launcher_that_is_started_again_joins_the_next_attempt(tmp_path):
    (first, second), variables = several_nodes(tmp_path, SLOW)
    wait_for(tmp_path / "checkpoint/step-4", first)
    second.kill()
    finish(second)
    again = start([*TWO, *SLOW], tmp_path, NODE_RANK="1", **variables)
    wait_for(tmp_path / "logs/attempt-1", first)
    newest = committed(tmp_path / "checkpoint")[-1]
    wait_for(tmp_path / f"checkpoint/step-{newest + 6}", first)
    third = start([*TWO, *SLOW], tmp_path, NODE_RANK="1", **variables)
    code, out = finish(third)
    assert code == 2 and "two launchers use NODE_RANK=1; every node needs its own" in out, out
    again.send_signal(signal.SIGINT)
    results = [finish(node) for node in (first, again)]
    assert [code for code, _ in results] == [130, 130], results
    assert all("on request (Ctrl-C)" in out for _, out in results)


@pytest.mark.exhaustive
def test_a_launcher_that_is_started_again_ends_the_attempt_that_it_replaces(tmp_path):
    """No rank notices that it has lost a peer: this one sleeps, as one may that waits for NCCL."""
    (first, second), variables = several_nodes(tmp_path, [], INJURY="sleep:optimizer:0:6")
    wait_for(tmp_path / "checkpoint/step-4", first)
    time.sleep(2)  # step 6 is reached
    second.kill()
    finish(second)
    again = start(TWO, tmp_path, NODE_RANK="1", **variables)
    results = [finish(node, 200) for node in (first, again)]
    assert [code for code, _ in results] == [0, 0] and [*losses(tmp_path)] == [*range(1, 9)], (
        results
    )
    assert "the launcher of NODE_RANK=1 ended, and another has taken its place" in results[0][1], (
        results
    )
    assert (tmp_path / "logs/attempt-1/rank-1.log").exists(), (
        "which the lost launcher could not move"
    )


@pytest.mark.exhaustive
def test_a_lost_node_0_ends_the_others(tmp_path):
    (first, second), _ = several_nodes(tmp_path, SLOW)
    wait_for(tmp_path / "checkpoint/step-4", first)
    first.kill()
    code, out = finish(second)
    assert (
        code == FAILED and "node 0's launcher, which hosts the store of the run, has ended" in out
    ), out
    finish(first)
