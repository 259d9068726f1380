"""Several nodes: they connect or name the missing ones; the cluster's variables are understood."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from tests.jobs import TINY
from tests.launch.nodes import cluster, free_port, outputs, start_nodes, trained
from tests.messages import refused, says
from tests.runs import children, environment, put_driver, records, start, wait_for
from titanlite.config.schema import Comm
from titanlite.errors import CUT_SHORT
from titanlite.fault.board import ANSWER_SECONDS
from titanlite.launch import node
from titanlite.launch.nodes import Nodes, count_gpus, count_processes, find_nodes, gpu_bytes
from titanlite.runtime import cluster as machine
from titanlite.runtime.cluster import RankInfo, rank_info, store_address
from titanlite.runtime.distributed import process_group
from titanlite.runtime.rank_files import attempt_prefix

SILENT = """
ip link set lo up
echo 'nameserver 127.0.0.1' > resolv.conf && mount --bind resolv.conf /etc/resolv.conf
: > hosts && mount --bind hosts /etc/hosts
"$PYTHON" -c 'import socket, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
open("answers-nothing", "w")
time.sleep(100)' &
trap "kill $!" EXIT
while [ ! -e answers-nothing ]; do sleep 0.1; done
"$PYTHON" -c "$CODE"
"""
"""A machine of its own, but for the files, whose name server does not answer."""
LISTEN = """
import os, time
from pathlib import Path
from titanlite.config.schema import JobConfig
from titanlite.launch.node import Node
from titanlite.launch.nodes import Nodes
began = time.monotonic()
node = Node(Nodes(2, 0, "127.0.0.1", 0, ""), 1, JobConfig(), Path("."))
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


EXIT = """
import os, sys, time
from pathlib import Path
from titanlite.config.schema import JobConfig
from titanlite.launch.node import Node
from titanlite.launch.nodes import Nodes
from titanlite.launch.workers import _raise_on_signals
_raise_on_signals()
node = Node(Nodes(1, 0, "127.0.0.1", 0, ""), 1, JobConfig(), Path("."))
node._board._look = lambda own: time.sleep(60)
time.sleep(1)
print("exits", flush=True)
"""


@pytest.mark.long
def test_a_signal_to_a_launcher_that_exits_ends_it_in_silence(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT],
        env=environment(),
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stdout.readline() == "exits\n"
    time.sleep(0.5)
    assert process.poll() is None, "it waits for its last exchange"
    process.terminate()
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def seconds_to_listen(folder: Path, **extra: str) -> float:
    """Return the seconds in which a launcher makes the store, where no name server answers."""
    folder.mkdir()
    environ = environment(PYTHON=sys.executable, CODE=LISTEN, **extra)
    command = ["unshare", "--net", "--mount", "bash", "-ec", SILENT]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() > 0, reason="needs namespaces")
def test_a_name_server_that_does_not_answer_holds_up_the_store_for_less_than_launchers_wait(
    tmp_path,
):
    assert seconds_to_listen(tmp_path / "own") < ANSWER_SECONDS
    assert seconds_to_listen(tmp_path / "given", RES_OPTIONS="timeout:5 attempts:1") > 5


# ---------------------------------------------------------------- launchers that meet


def test_two_launchers_train_together_and_rank_0_is_on_node_0(tmp_path):
    first, second = outputs(start_nodes(TINY, tmp_path))
    says(first, "NODE_RANK 0 (2 nodes; from NNODES", "dp_shard 2")
    (line,) = second.splitlines()
    says(line, "NODE_RANK 1 (2 nodes")
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_node_0_names_the_missing_nodes_while_it_waits_and_at_its_end(tmp_path):
    argv, limit = [*TINY, "--comm.init_timeout_seconds=6"], "6 s (comm.init_timeout_seconds)"
    (out,) = outputs([start(argv, tmp_path, NODE_RANK="0", **cluster())], CUT_SHORT)
    says(out, f"for NODE_RANK 1, at most {limit}\n", f"{limit}; missing: NODE_RANK 1\n")
    assert "Traceback" not in out


def test_a_node_without_node_0_names_its_address_while_it_waits_and_at_its_end(monkeypatch, capsys):
    monkeypatch.setattr(node, "SAY_SECONDS", 0.1, raising=False)
    missing = Nodes(2, 1, "127.0.0.1", int(free_port()), "")
    where = f"127.0.0.1:{missing.master_port}"
    with refused(where, "1 s (comm.init_timeout_seconds)", "MASTER_ADDR", kind=node.NoNode0) as end:
        node._connect(missing, 1)
    assert end.value.code == CUT_SHORT, "as of any missing node: another start may find it"
    says(capsys.readouterr().out, f"node 0 at {where} (connection refused), at most 1 s")


@pytest.mark.nightly
def test_ranks_below_two_agents_of_torchrun_meet_again_though_only_one_agent_counts_the_restart(
    tmp_path,
):
    """As with NCCL, rank 0 does not notice that rank 1 was killed; agent 0 restarts it all the
    same, and does not count that. The report of the hang that follows has the beats of both.
    """
    module = "torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=1 "
    module += f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --local-addr=127.0.0.1 "
    argv = [*TINY, "--training.steps=9", "--fault.stall_seconds=10", "--metrics.log_freq=1"]
    environ = {"INJURY": "sleep:forward:1:3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    argv += ["--model.package=injured"]
    agents = [
        start(argv, tmp_path, f"{module} --rdzv-conf=is_host={host} -m titanlite.train", **environ)
        for host in (1, 0)
    ]
    trained(tmp_path, agents[0], 2)
    (unaware,), (killed,) = (children(agent.pid) for agent in agents)
    os.kill(unaware, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    while not is_pending(signal.SIGTERM, unaware):
        time.sleep(0.1)
    os.kill(unaware, signal.SIGKILL)
    wait_for(tmp_path / "logs/hang-0.txt", agents[0], 200)
    says((tmp_path / "logs/hang-0.txt").read_text(), "rank 1 on", "forward of step 3")


def is_pending(number: int, pid: int) -> bool:
    """Return whether a process that is stopped has a signal that waits for it."""
    (pending,) = re.findall(r"ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) >> (number - 1) & 1)


def test_ranks_below_torchrun_share_a_prefix_only_in_a_store_that_outlives_an_attempt():
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    own, agents = ({"TORCHELASTIC_USE_AGENT_STORE": word} for word in ("False", "True"))
    assert attempt_prefix({**own, **restarted}) == attempt_prefix(own)
    assert attempt_prefix({**agents, **restarted}) != attempt_prefix(agents)


@pytest.mark.parametrize(("shared", "told"), [("True", True), ("False", False)])
def test_the_variable_that_torchrun_needs_on_several_nodes_is_named(shared, told, tmp_path, capsys):
    several = {"LOCAL_WORLD_SIZE": "0", "TORCHELASTIC_USE_AGENT_STORE": shared}
    alone = RankInfo(0, 1, 0, "here")
    with process_group(alone, torch.device("cpu"), Comm(), tmp_path, several):
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err) == told


# ---------------------------------------------------------------- variables


def environ_of(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


PLAIN = "NNODES=3 NODE_RANK=1 MASTER_ADDR=head"
SLURM = "SLURM_NNODES=4 SLURM_NODEID=2 SLURM_JOB_NODELIST=gpu[07-10,15],login SLURM_JOB_ID=123"
PET = "PET_NNODES=2 PET_NODE_RANK=0"
BY_NAME = "NNODES, NODE_RANK, MASTER_ADDR"
ALONE = (1, 0, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("text", "expected", "source"),
    [
        ("", ALONE, "no cluster variables"),
        ("SLURM_NNODES=1", ALONE, "no cluster variables"),
        (PLAIN, (3, 1, "head", 29500), BY_NAME),
        (f"{PLAIN} MASTER_PORT=5", (3, 1, "head", 5), BY_NAME),
        (f"{PLAIN} MASTER_ADDR=[::1]", (3, 1, "::1", 29500), BY_NAME),
        (f"{SLURM} {PLAIN}", (3, 1, "head", 29500), BY_NAME),
        (f"{SLURM} NNODES=1", ALONE, BY_NAME),
        (f"{SLURM} NNODES= PET_NNODES=", (4, 2, "gpu07", 20123), "SLURM_*"),
        (f"{SLURM} SLURM_JOB_NODELIST=a1,b2", (4, 2, "a1", 20123), "SLURM_*"),
        (f"{PET} PET_MASTER_ADDR=m-0 PET_MASTER_PORT=9", (2, 0, "m-0", 9), "PET_*"),
        (f"{PET} PET_NODE_RANK=1 PET_RDZV_ENDPOINT=m-0:77", (2, 1, "m-0", 77), "PET_*"),
        (f"{PET} PET_RDZV_ENDPOINT=[fe80::1]:77 NNODES=", (2, 0, "fe80::1", 77), "PET_*"),
        (f"{PET} PET_RDZV_ENDPOINT=fe80::1 MASTER_PORT=8", (2, 0, "fe80::1", 8), "PET_*"),
    ],
)
def test_the_nodes_that_variables_announce(text, expected, source):
    assert astuple(find_nodes(environ_of(text))) == (*expected, source, 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("NNODES=2", "MASTER_ADDR"),
        ("NNODES=2 MASTER_ADDR=x", "NODE_RANK is not set: 0 to 1"),
        ("NNODES=2 MASTER_ADDR=x NODE_RANK=", "NODE_RANK is not set: 0 to 1"),
        (f"{PLAIN} NODE_RANK=3", "0 to 2"),
        (f"{PLAIN} NNODES=two", "NNODES=two"),
        (f"{PLAIN} MASTER_PORT=99999", "MASTER_PORT=99999"),
        (f"{PLAIN} MASTER_PORT=0", "1 to 65535"),
        ("PET_NNODES=2:4", "PET_NNODES=2:4"),
        (f"{PET} PET_RDZV_ENDPOINT=m-0:http", "PET_RDZV_ENDPOINT=http"),
        (f"{PET} PET_RDZV_ENDPOINT=m-0:99999", "PET_RDZV_ENDPOINT=99999"),
        (f"{SLURM} MASTER_PORT=99999", "MASTER_PORT=99999"),
        (f"{SLURM} SLURM_STEP_NUM_TASKS=32", "32 launchers on 4 nodes"),
        ("SLURM_NNODES=1 SLURM_STEP_NUM_TASKS=8", "8 launchers on 1 node:"),
        ("SLURM_NNODES=2", "SLURM_JOB_NODELIST"),
    ],
)
def test_incomplete_variables_are_an_error_that_names_the_missing_one(text, names):
    with refused(names):
        find_nodes(environ_of(text))


def test_a_workers_rank_and_store():
    run = environ_of("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h")
    info = rank_info(run)
    assert (info.rank, info.world, info.local_rank) == (3, 8, 1)
    assert store_address(run, 8) == ("h", 29500)
    task = environ_of(f"{SLURM} SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=5 SLURM_LOCALID=1")
    info = rank_info(task)
    assert (info.rank, info.world, info.local_rank) == (5, 8, 1)
    assert store_address(task, 8) == ("gpu07", 20123)
    assert rank_info({**task, "RANK": "", "WORLD_SIZE": ""}) == info
    assert store_address({**task, "RANK": ""}, 8)
    single = rank_info({})
    assert (single.rank, single.world) == (0, 1) and store_address({}, 1) is None
    with refused("MASTER_ADDR"):
        store_address({"RANK": "0", "MASTER_ADDR": ""}, 2)


def test_processes_on_a_node():
    assert count_processes({"NGPU": "3"}, "cpu", 0) == 3
    assert count_processes({}, "cuda", 8) == count_processes({"NGPU": ""}, "cuda", 8) == 8
    assert count_processes({"PET_NPROC_PER_NODE": "4"}, "cpu", 0) == 4
    assert count_processes({}, "cpu", 0) in (1, 2)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    with refused("NGPU=0"):
        count_processes({"NGPU": "0"}, "cpu", 0)


def test_a_driver_that_does_not_answer_is_named_and_not_waited_for(tmp_path, monkeypatch, capsys):
    put_driver(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(machine, "DRIVER_SECONDS", 0.1)
    assert gpu_bytes() is None
    says(capsys.readouterr().out, "nvidia-smi", "0.1 s", "memory.total")
