"""Several nodes: they connect or name the missing ones; the cluster's variables are understood."""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.runs import environment, finish, records, start, train
from titanlite.cli import main
from titanlite.errors import UserError
from titanlite.fault.board import ANSWER_SECONDS
from titanlite.launch.nodes import Nodes, count_gpus, count_processes, find_nodes, gpu_bytes
from titanlite.runtime import cluster
from titanlite.runtime.cluster import rank_info, store_address
from titanlite.train import rank_facts


def free_port() -> str:
    """Return a port below those that the system gives to connections: one of them could take it in
    the meantime.
    """
    while True:
        port = random.SystemRandom().randint(15_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return str(port)


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


def test_a_signal_to_a_launcher_that_exits_ends_it_in_silence(tmp_path):
    command = [sys.executable, "-c", EXIT]
    process = subprocess.Popen(
        command,
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


def node(rank: int, port: str, argv: list[str], folder, **extra: str):
    variables = {
        "NNODES": "2",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return start([*TINY, *argv], folder, NGPU="1", **variables, **extra)


def test_two_launchers_train_together_and_rank_0_is_on_node_0(tmp_path):
    port = free_port()
    second = node(1, port, [], tmp_path)
    first = node(0, port, [], tmp_path)
    results = [finish(first), finish(second)]
    assert [code for code, _ in results] == [0, 0], results
    assert "node 0 of 2, from NNODES" in results[0][1] and "dp_shard 2" in results[0][1]
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    assert "step:  3" in results[1][1], "node 1 shows its own first rank"


@pytest.mark.long
def test_nodes_with_different_configs_are_refused(tmp_path):
    port = free_port()
    second = node(1, port, ["--optimizer.lr=0.1"], tmp_path)
    first = node(0, port, [], tmp_path)
    results = [finish(first), finish(second)]
    assert {code for code, _ in results} <= {1, 2}
    assert any("the config differs between ranks: rank 0 has" in out for _, out in results), results


@pytest.mark.parametrize("present", sample([0, 1], 1))
def test_one_of_two_nodes_names_the_missing_one(tmp_path, present):
    code, out = finish(node(present, free_port(), ["--comm.init_timeout_seconds=3"], tmp_path))
    assert code == 1 and "Traceback" not in out
    expected = [
        "only 1 of 2 nodes connected within 3 s (comm.init_timeout_seconds); missing: NODE_RANK 1"
    ]
    expected.append("node 0 did not answer at 127.0.0.1")
    assert expected[present] in out


def test_several_nodes_without_an_address_are_refused_at_once(tmp_path):
    code, out = train(TINY, tmp_path, NNODES="2", NODE_RANK="0")
    assert code == 2 and "MASTER_ADDR is not set" in out and not list(tmp_path.iterdir())


def test_as_many_spare_nodes_as_there_are_nodes_are_refused(tmp_path):
    argv, plain = ["--checkpoint.enable", "--fault.spare_nodes=2"], {"MASTER_ADDR": "127.0.0.1"}
    code, out = train([*TINY, *argv], tmp_path, NNODES="2", NODE_RANK="0", **plain)
    assert code == 2 and out == (
        "titanlite: fault.spare_nodes = 2 leaves no node to train: the run has 2 (NNODES)\n"
    ), out


PLAIN = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "head"}
SLURM = {
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[07-10,15],login",
    "SLURM_JOB_ID": "123",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Nodes(1, 0, "127.0.0.1", 0, "no cluster variables")),
        ({"SLURM_NNODES": "1"}, Nodes(1, 0, "127.0.0.1", 0, "no cluster variables")),
        (PLAIN, Nodes(3, 1, "head", 29500, "NNODES, NODE_RANK, MASTER_ADDR")),
        ({**PLAIN, "MASTER_PORT": "5"}, Nodes(3, 1, "head", 5, "NNODES, NODE_RANK, MASTER_ADDR")),
        ({**SLURM, **PLAIN}, Nodes(3, 1, "head", 29500, "NNODES, NODE_RANK, MASTER_ADDR")),
        ({**SLURM, "NNODES": "1"}, Nodes(1, 0, "127.0.0.1", 0, "NNODES, NODE_RANK, MASTER_ADDR")),
        (SLURM, Nodes(4, 2, "gpu07", 20123, "SLURM_*")),
        ({**SLURM, "SLURM_JOB_NODELIST": "a1,b2"}, Nodes(4, 2, "a1", 20123, "SLURM_*")),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "m-0",
                "PET_MASTER_PORT": "9",
            },
            Nodes(2, 1, "m-0", 9, "PET_*"),
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "m-0:77"},
            Nodes(2, 0, "m-0", 77, "PET_*"),
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "0",
                "PET_RDZV_ENDPOINT": "[fe80::1]:77",
                "NNODES": "",
            },
            Nodes(2, 0, "fe80::1", 77, "PET_*"),
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "0",
                "PET_RDZV_ENDPOINT": "fe80::1",
                "MASTER_PORT": "8",
            },
            Nodes(2, 0, "fe80::1", 8, "PET_*"),
        ),
        (
            {**PLAIN, "MASTER_ADDR": "[::1]"},
            Nodes(3, 1, "::1", 29500, "NNODES, NODE_RANK, MASTER_ADDR"),
        ),
        ({**SLURM, "NNODES": "", "PET_NNODES": ""}, Nodes(4, 2, "gpu07", 20123, "SLURM_*")),
    ],
)
def test_the_nodes_that_variables_announce(environ, expected):
    assert find_nodes(environ) == expected


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "MASTER_ADDR": "x"}, "NODE_RANK is not set: 0 to 1"),
        ({"NNODES": "2", "MASTER_ADDR": "x", "NODE_RANK": ""}, "NODE_RANK is not set: 0 to 1"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "m-0:http"},
            "the port of PET_RDZV_ENDPOINT=http must be a whole number",
        ),
        ({**PLAIN, "NODE_RANK": "3"}, "must be from 0 to 2"),
        ({**PLAIN, "NNODES": "two"}, "NNODES=two must be a whole number"),
        ({"PET_NNODES": "2:4"}, "PET_NNODES=2:4 must be a whole number"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "32"}, "srun started 32 launchers on 4 nodes"),
        ({"SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 launchers on 1 node:"),
        (
            {**PLAIN, "MASTER_PORT": "99999"},
            "MASTER_PORT=99999 must be a whole number from 1 to 65535",
        ),
        ({**PLAIN, "MASTER_PORT": "0"}, "MASTER_PORT=0 must be a whole number from 1 to 65535"),
        (
            {**SLURM, "MASTER_PORT": "99999"},
            "MASTER_PORT=99999 must be a whole number from 1 to 65535",
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "m-0:99999"},
            "the port of PET_RDZV_ENDPOINT=99999 must be a whole number from 1 to 65535",
        ),
        ({"SLURM_NNODES": "2"}, "neither SLURM_JOB_NODELIST nor MASTER_ADDR"),
    ],
)
def test_incomplete_variables_are_an_error_that_names_the_missing_one(environ, says):
    with pytest.raises(UserError) as caught:
        find_nodes(environ)
    assert says in str(caught.value)


def test_a_workers_rank_and_store():
    run = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
    }
    info = rank_info(run)
    assert (info.rank, info.world, info.local_rank) == (3, 8, 1)
    assert store_address(run, 8) == ("h", 29500)
    task = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    info = rank_info(task)
    assert (info.rank, info.world, info.local_rank) == (5, 8, 1)
    assert store_address(task, 8) == ("gpu07", 20123)
    assert rank_info({**task, "RANK": "", "WORLD_SIZE": ""}) == info and store_address(
        {**task, "RANK": ""}, 8
    )
    single = rank_info({})
    assert (single.rank, single.world) == (0, 1) and store_address({}, 1) is None
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        store_address({"RANK": "0", "MASTER_ADDR": ""}, 2)


def test_processes_on_a_node():
    assert count_processes({"NGPU": "3"}, "cpu", 0) == 3
    assert count_processes({}, "cuda", 8) == count_processes({"NGPU": ""}, "cuda", 8) == 8
    assert count_processes({"PET_NPROC_PER_NODE": "4"}, "cpu", 0) == 4
    assert count_processes({}, "cpu", 0) in (1, 2)
    assert (
        count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
        and count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    )
    with pytest.raises(UserError, match="NGPU=0 must be a whole number >= 1"):
        count_processes({"NGPU": "0"}, "cpu", 0)


def test_a_driver_that_does_not_answer_is_named_and_not_waited_for(tmp_path, monkeypatch, capsys):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nexec sleep 60\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(cluster, "DRIVER_SECONDS", 0.1)
    assert gpu_bytes() is None
    assert (
        "nvidia-smi did not answer in 0.1 s: memory.total of the GPUs is unknown"
        in capsys.readouterr().out
    )
    assert rank_facts.own_gpu_complaints() == [
        "nvidia-smi did not answer in 0.1 s: GPUs are not checked"
    ]


@pytest.mark.parametrize("name", ["MAX_RESTARTS", "OMP_NUM_THREADS"])
def test_a_wrong_variable_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path / 'run'}"]) == 2
    assert (
        f"{name}=abc must be a whole number" in capsys.readouterr().err
        and not (tmp_path / "run").exists()
    )
