"""`titanlite doctor`: what it prints, what it never shows, and what it makes of flight recorder
dumps.
"""

import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.jobs import TINY
from tests.launch.nodes import cluster, outputs
from tests.messages import says
from tests.runs import command, descendants, environment, finish, start
from titanlite.runtime.cluster import RankInfo
from titanlite.tools.doctor import shown_variables, strain

PLAIN = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "ib0",
    "NNODES": "2",
    "SLURM_JOB_ID": "7",
    "TORCH_LOGS": "recompiles",
}
SECRETS = {
    "NCCL_API_TOKEN": "hush-1",
    "SLURM_JWT": "hush-2",
    "TORCH_SECRET": "hush-3",
    "PET_PASSWORD": "hush-4",
    "WANDB_API_KEY": "hush-5",
    "HF_TOKEN": "hush-6",
    "TORCH_MIRROR": "https://me:hush-7@mirror/x",
}
INJURED = [*TINY, "--model.package=injured"]


def doctor(argv: list[str], folder: Path, **environ: str) -> tuple[int, str]:
    """Run it to the end, and require that it has left no file."""
    code, out = finish(start(argv, folder / "none", "titanlite doctor", **environ))
    assert not list(folder.iterdir()) and "Traceback" not in out, out
    return code, out


@pytest.mark.long
def test_the_doctor_prints_the_ranks_and_their_network_shows_no_secret_and_leaves_no_file(tmp_path):
    code, out = doctor(TINY, tmp_path, NGPU="2", NCCL_DEBUG="WARN", **SECRETS)
    assert code == 0 and "hush" not in out, out
    says(out, "\n  NCCL_DEBUG=WARN\n", "\n  OMP_NUM_THREADS=1\n", "C++ Version")
    says(out, f"torch {torch.__version__}", "\nmesh       dp_shard 2\n")
    for line in (
        r"0-1 +\S+ +cpu +titanlite .*",
        r"preflight  2 ranks on 1 host .*",
        r"network    .* dp_shard 2: \S+ MB in \S+ ms, \S+ GB/s",
        r".* cores, .*, load \d+\.\d of \d+ CPUs, .* free in /dev/shm, ulimit -n \d+ .*",
        r"nothing looks wrong|warning: .*",
    ):
        assert re.search(rf"(?m)^({line})$", out), line


def test_a_busy_host_is_named_once(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 71.2, 3.0))
    (line,) = strain(RankInfo(8, 16, 0, "node-b"))
    says(line, "node-b", "load", "71")
    assert not strain(RankInfo(9, 16, 1, "node-b"))
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 0.4, 0.1))
    assert not strain(RankInfo(8, 16, 0, "node-b"))


def test_variables_that_may_be_secret_are_not_shown():
    found = shown_variables({**PLAIN, **SECRETS, "HOME": "/root", "EDITOR": "vi"})
    expected = {**PLAIN, "TORCH_MIRROR": "https://…@mirror/x"}
    assert found == [f"{name}={value}" for name, value in expected.items()]


@pytest.mark.long
def test_a_rank_that_hangs_under_the_doctor_is_named_with_its_stack_and_no_file_is_left(tmp_path):
    argv = [*INJURED, "--comm.init_timeout_seconds=30"]
    code, out = doctor(argv, tmp_path, NGPU="2", INJURY="sleep:start:1:0")
    assert code == 1, out
    says(out, "hangs: ", "30 s (comm.init_timeout_seconds)", "in suffer")


@pytest.mark.long
def test_ctrl_c_ends_the_doctor_with_130_and_without_a_traceback(tmp_path):
    run = start(INJURED, tmp_path, "titanlite doctor", INJURY="sleep:start:0:0", NGPU="1")
    while not descendants(run.pid):
        time.sleep(0.1)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    code, out = finish(run)
    assert code == 130 and "Traceback" not in out, out


@pytest.mark.long
def test_of_nodes_that_differ_the_facts_are_printed_and_then_what_differs(tmp_path):
    nodes = cluster()
    started = [
        start([*TINY, *more], tmp_path, "titanlite doctor", NODE_RANK=str(node), **nodes)
        for node, more in enumerate(([], ["--optimizer.lr=0.5"]))
    ]
    outs = outputs(started, 2)
    for out in outs:
        says(out, "config differs", "rank 0", "optimizer.lr: 0.005 -> 0.5")
    says(outs[0], "environment of", "\n1 ")  # a row for the rank that differs


RECORDER = """
import os, pickle, sys, torch, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for number in range(3 if rank == 0 else 2):
    dist.all_reduce(torch.ones(4), async_op=number == 2)
dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}  # gloo's is empty
for entry in dump["entries"]:
    entry["profiling_name"] = entry["profiling_name"].replace("gloo", "nccl")
open(f"{folder}/rank_{rank}", "wb").write(pickle.dumps(dump))
os._exit(0)
"""


@pytest.mark.long
def test_torchs_verdict_on_dumps_is_printed_and_a_missing_one_is_named(tmp_path):
    """Of two ranks, of which rank 1 misses the last all-reduce."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip(f"torch {torch.__version__} does not record gloo")
    variables = environment(TORCH_FR_BUFFER_SIZE="100")
    recorder = [sys.executable, "-c", RECORDER]
    ranks = [
        subprocess.Popen([*recorder, str(rank), str(tmp_path)], env=variables) for rank in range(2)
    ]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    code, out = command("doctor", "--traces", tmp_path)
    assert code == 0
    says(out, "sequence number: 3", "missing ranks: {1}")
    (tmp_path / "rank_1").unlink()
    code, out = command("doctor", "--traces", tmp_path)
    assert code == 0
    says(out, "ranks {1}")


def test_a_folder_without_dumps_says_what_is_expected_there(tmp_path, tool):
    for folder, why in ((tmp_path, "no dumps"), (tmp_path / "none", "no such")):
        says(tool("doctor", "--traces", folder, code=2), f"--traces {folder}: {why}", "rank_0")
    (tmp_path / "rank_0").write_bytes(pickle.dumps("no dump"))
    says(tool("doctor", "--traces", tmp_path, code=1), f"--traces {tmp_path}: ", "rank_0")
