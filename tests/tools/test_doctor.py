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
from tests.launch.test_nodes import free_port
from tests.runs import ROOT, descendants, environment, finish, start
from titanlite.tools.doctor import shown_variables

SECRETS = {
    "NCCL_API_TOKEN": "hush-1",
    "SLURM_JWT": "hush-2",
    "TORCH_SECRET": "hush-3",
    "PET_PASSWORD": "hush-4",
    "WANDB_API_KEY": "hush-5",
    "HF_TOKEN": "hush-6",
    "TORCH_MIRROR": "https://me:hush-7@mirror/x",
}


def test_the_doctor_prints_the_ranks_and_their_network_shows_no_secret_and_leaves_no_file(tmp_path):
    shown = {"NCCL_DEBUG": "WARN", "TORCH_LOGS": "recompiles", **SECRETS}
    code, out = finish(start(TINY, tmp_path / "none", "titanlite doctor", NGPU="2", **shown))
    assert code == 0 and "hush" not in out, out
    assert not list(tmp_path.iterdir())
    assert re.search(
        rf"\n0-1 +\S+ +cpu +titanlite \S+, torch {re.escape(torch.__version__)} +3\.\d+", out
    )
    assert (
        "\n  NCCL_DEBUG=WARN\n" in out and "\n  OMP_NUM_THREADS=1\n" in out and "C++ Version" in out
    )
    assert "\nmesh       dp_shard 2\npreflight  2 ranks on 1 host agree: config " in out
    assert re.search(r"\nnetwork    all-reduce over dp_shard 2: \S+ MB in \S+ ms, \S+ GB/s\n", out)
    assert out.endswith("nothing looks wrong\n") or "\nwarning: " in out


def test_variables_that_may_be_secret_are_not_shown():
    plain = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NNODES": "2",
        "SLURM_JOB_ID": "7",
    }
    found = shown_variables({**plain, **SECRETS, "HOME": "/root", "EDITOR": "vi"})
    assert found == sorted(
        [f"{name}={value}" for name, value in plain.items()] + ["TORCH_MIRROR=https://…@mirror/x"]
    )


def test_the_doctor_refuses_a_wrong_config_before_anything_starts(tmp_path):
    code, out = finish(start([*TINY, "--training.stepz=1"], tmp_path, "titanlite doctor", NGPU="2"))
    assert code == 2 and "did you mean training.steps?" in out
    assert "environment of rank 0" not in out and not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_rank_that_hangs_under_the_doctor_is_named_with_its_stack_and_no_file_is_left(tmp_path):
    options = [*TINY, "--model.package=injured", "--comm.init_timeout_seconds=12"]
    run = start(options, tmp_path / "none", "titanlite doctor", NGPU="2", INJURY="sleep:start:1:0")
    code, out = finish(run)
    assert (
        code == 1 and "the run hangs: no rank moved for 12 s (comm.init_timeout_seconds). " in out
    ), out
    assert "in suffer" in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_ctrl_c_ends_the_doctor_with_130_and_without_a_traceback(tmp_path):
    run = start(
        [*TINY, "--model.package=injured"],
        tmp_path,
        "titanlite doctor",
        INJURY="sleep:start:0:0",
        NGPU="1",
    )
    while len(descendants(run.pid)) < 1:
        time.sleep(0.1)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    code, out = finish(run)
    assert code == 130 and "Traceback" not in out, out


@pytest.mark.exhaustive
def test_of_nodes_that_differ_the_facts_are_printed_and_then_what_differs(tmp_path):
    port, codes, outs = free_port(), [], []
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NGPU": "1"}
    more = [[], ["--optimizer.lr=0.5"]]
    found = [
        start([*TINY, *more[n]], tmp_path, "titanlite doctor", NODE_RANK=f"{n}", **nodes)
        for n in range(2)
    ]
    for process in found:
        code, out = finish(process)
        codes.append(code)
        outs.append(out)
    assert codes == [2, 2], outs
    assert "environment of rank 0" in outs[0] and "\n1 " in outs[0], (
        "a row for the rank that differs"
    )
    for out in outs:
        assert (
            "the config differs between ranks: rank 0 has" in out
            and "optimizer.lr: 0.005 -> 0.5" in out
        )


RECORDER = """
import os, pickle, sys, torch, torch.distributed as dist
rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
for number in range(3 if rank == 0 else 2):
    dist.all_reduce(torch.ones(4), async_op=number == 2)
dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}  # gloo's is empty
for entry in dump["entries"]:
    entry["profiling_name"] = entry["profiling_name"].replace("gloo", "nccl")
open(f"{folder}/rank_{rank}", "wb").write(pickle.dumps(dump))
os._exit(0)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of two ranks, of which rank 1 misses the last all-reduce."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip(f"torch {torch.__version__} does not record gloo")
    folder, port = tmp_path_factory.mktemp("dumps"), free_port()
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCH_FR_BUFFER_SIZE": "100",
    }
    command = [sys.executable, "-c", RECORDER, str(folder)]
    ranks = [
        subprocess.Popen(command, env=environment(RANK=f"{rank}", **variables)) for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    return folder


def doctor(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "titanlite", "doctor", "--traces", str(folder)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_torchs_verdict_on_dumps_is_printed(dumps):
    code, out = doctor(dumps)
    assert (
        code == 0
        and "Not all ranks joining collective, sequence number: 3" in out
        and "missing ranks: {1}" in out
    )


@pytest.mark.long
def test_a_missing_dump_is_named_and_the_others_are_read(dumps, tmp_path):
    (tmp_path / "rank_0").write_bytes((dumps / "rank_0").read_bytes())
    code, out = doctor(tmp_path)
    assert code == 0 and "Missing dump files from ranks {1}" in out


@pytest.mark.long
def test_a_folder_without_dumps_says_what_is_expected_there(tmp_path):
    for folder, why in ((tmp_path, "no dumps there"), (tmp_path / "none", "no such folder")):
        code, out = doctor(folder)
        assert (
            code == 2 and f"--traces {folder}: {why}; expected are files rank_0, rank_1, …" in out
        )
    (tmp_path / "rank_0").write_bytes(pickle.dumps("no dump"))
    code, out = doctor(tmp_path)
    assert code == 1 and "torch cannot read rank_0" in out and "Traceback" not in out
