"""Optimizer state on the host or a disk: the bits of state on the device, a tenth of what is on a
disk in memory, checkpoints of either for the other, and nothing left on the disk. Beside weights in
bfloat16 it may have float32.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.checkpoint.saved import SAVING, digests, joined, run_until
from tests.jobs import MOE, TINY, files_of_at_most, job, trainer
from tests.lanes import sample
from tests.messages import refused, says
from tests.optim.test_update import require_skips
from tests.runs import python
from titanlite.config.schema import config_of
from titanlite.errors import RunFailed
from titanlite.launch import preflight
from titanlite.launch.preflight import check_machine
from titanlite.optim import state_store, streamed
from titanlite.parallel.parallelize import parallelize
from titanlite.planner import rehearse

KEY = "optimizer.state_folder"
OFFLOAD = "--training.enable_cpu_offload"
UNEVEN = [
    *("--model.overrides.vocab_size=2049", "--model.overrides.hidden_dim=1"),
    "--training.steps=5",
]
"""On two ranks a matrix of several pieces, of which the last is small, and empty shards."""


def kind_of_disk(folder: Path | str) -> str:
    return subprocess.check_output(["stat", "-fc%T", folder], text=True).strip()


@pytest.fixture
def disk(tmp_path) -> str:
    folder = tmp_path / "nvme"
    folder.mkdir()
    if kind_of_disk(folder) == "tmpfs":
        pytest.skip("temporary files are in memory here")
    return str(folder)


def on(folder: str) -> list[str]:
    return ["--optimizer.state_on=disk", f"--{KEY}={folder}"]


def no_direct_writes() -> Any:
    return patch.object(state_store.fcntl, "fcntl", side_effect=OSError(22, "Invalid argument"))


def in_small_pieces(argv: list[str], folder: str, direct: bool = True) -> dict[str, Any]:
    """Train; return the digests of the state, and which file has it."""
    with patch.object(streamed, "_NUMEL", 4096):
        with nullcontext() if direct else no_direct_writes():
            run = trainer(argv, folder)
        run.train()
    found = {"state": digests(run), "file": "", "is direct": False}
    optimizer = run.runner.optimizer
    found["streams"] = isinstance(optimizer, streamed.Streamed)
    if isinstance(getattr(optimizer, "_store", None), state_store.OnDisk):
        descriptor = optimizer._store._file.fileno()
        found["file"] = os.readlink(f"/proc/self/fd/{descriptor}")
        found["is direct"] = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    return found


IN_FLOAT32 = ["--training.dtype=bfloat16", "--optimizer.state_dtype=float32"]
FLOAT8 = "--model.overrides.hidden_dim=32 --quantize.linear.float8.enable "
FLOAT8 += "--quantize.linear.float8.emulate "
FLOAT8 += "--quantize.linear.float8.enable_fsdp_float8_all_gather"
HOST = "--optimizer.state_on=host"
SAME_BITS = {  # ranks, the model with further options, and where the state is
    "host": (2, [*TINY, *UNEVEN], "host"),
    "host, one rank": (1, [*TINY, *UNEVEN], "host"),
    "host, experts": (2, [*MOE, "--parallelism.expert_parallel_degree=2"], "host"),
    "host, float8": (2, [*TINY, *UNEVEN, *FLOAT8.split()], "host"),
    "host, weights in bfloat16": (2, [*TINY, *UNEVEN, *IN_FLOAT32], "host"),
    "disk": (2, [*TINY, *UNEVEN], "disk"),
    "disk, one rank": (1, [*TINY, *UNEVEN], "disk"),
    "disk, offloaded": (2, [*TINY, *UNEVEN, OFFLOAD], "disk"),
    "disk, offloaded experts": (
        2,
        [*MOE, "--parallelism.expert_parallel_degree=2", OFFLOAD],
        "disk",
    ),
    "disk, no direct writes": (2, [*TINY, *UNEVEN, OFFLOAD], "disk"),
}


NIGHTLY = ["host, float8", "disk, one rank", "disk, offloaded experts"]


@pytest.mark.parametrize("case", sample(SAME_BITS, "host", "disk", nightly=NIGHTLY))
def test_training_has_the_bits_of_state_on_the_device(pool, tmp_path, disk, case):
    world, argv, place = SAME_BITS[case]
    direct = case != "disk, no direct writes"
    where = on(disk) if place == "disk" else [HOST]
    expected = pool.run(in_small_pieces, argv, str(tmp_path / "a"), world=world)
    found = pool.run(in_small_pieces, [*argv, *where], str(tmp_path / "b"), direct, world=world)
    assert [rank["state"] for rank in found] == [rank["state"] for rank in expected]
    is_wide = IN_FLOAT32[0] in argv  # streams on the device too
    assert {rank["streams"] for rank in found} == {True}
    assert {rank["streams"] for rank in expected} == {is_wide}
    for rank in found * (place == "disk"):
        assert rank["is direct"] == direct and rank["file"].startswith(disk), rank["file"]
        assert rank["file"].endswith(" (deleted)") and not os.listdir(disk)


def test_weights_in_bfloat16_are_updated_in_float32_and_rounded_once():
    config = config_of({"training.dtype": "bfloat16", "optimizer.state_dtype": "float32"})
    weights = [nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in (9001, 0, 5)]
    masters = [weight.detach().clone() for weight in weights]
    wide = [nn.Parameter(master.float()) for master in masters]
    with patch.object(streamed, "_NUMEL", 4096):
        optimizer = streamed.Streamed(torch.optim.AdamW(weights, lr=0.1, fused=True), config)
        plain = torch.optim.AdamW(wide, lr=0.1, fused=True)
        for _ in range(3):
            for weight, parameter, master in zip(weights, wide, masters, strict=True):
                weight.grad = torch.randn_like(weight)
                parameter.grad = weight.grad.float()
                parameter.data.copy_(master)
            optimizer.step()
            plain.step()
            for parameter, master in zip(wide, masters, strict=True):
                master.copy_(parameter.data)
    for weight, parameter, master in zip(weights, wide, masters, strict=True):
        assert torch.equal(weight, master)
        for key, value in plain.state[parameter].items():
            assert optimizer.state[weight][key].dtype == torch.float32
            assert torch.equal(optimizer.state[weight][key], value), key


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_step_that_is_not_finite_changes_no_bit_on_the_disk(pool, tmp_path, disk, implementation):
    argv = [*TINY, *UNEVEN, *on(disk), f"--optimizer.implementation={implementation}"]
    require_skips(pool, argv, str(tmp_path / "a"))


def test_a_disk_without_direct_writes_is_named_in_one_line(disk, capfd):
    with no_direct_writes():
        state_store.reserve(disk, 4096).close()
    (line,) = capfd.readouterr().err.splitlines()
    says(line, f'{KEY} = "{disk}"', "O_DIRECT")


RESUMED = [  # ranks and the place of the state, before and after
    ((2, "disk"), (1, "disk")),
    ((2, "disk"), (3, "device")),
    ((1, "device"), (2, "disk")),
    ((2, "host"), (1, "device")),
    ((1, "device"), (2, "host")),
    ((1, "host"), (2, "host")),
]


@pytest.mark.parametrize(
    ("before", "after"), sample(RESUMED, RESUMED[3], nightly=(RESUMED[1], RESUMED[5]))
)
def test_a_checkpoint_continues_with_the_same_bits_wherever_the_state_is(
    pool, tmp_path, disk, before, after
):
    argv = [*SAVING, *UNEVEN, "--checkpoint.async_mode=disabled"]
    states = []
    where = {"disk": on(disk), "host": [HOST], "device": []}
    for folder in ("on the device", "streamed"):
        parts: Any = None
        for (world, place), stop in ((before, 3), (after, None)):
            more = where[place if folder == "streamed" else "device"]
            batch = [f"--training.local_batch_size={6 // world}"]
            given = [*argv, *more, *batch]
            parts = pool.run(run_until, given, str(tmp_path / folder), stop, world=world)
        assert parts[0]["begun"] == 3
        states.append(joined([part["state"] for part in parts]))
    assert states[0] == states[1]


MEASURED = """
import sys, threading
import torch
from torch import nn
from titanlite.config.schema import config_of
from titanlite.optim.streamed import Streamed

def now():
    return 1024 * int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])

def watch():
    while not ended.wait(0.002):
        most[0] = max(most[0], now())

parameters = [nn.Parameter(torch.zeros(4_000_001)) for _ in range(13)]
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
inner = torch.optim.AdamW(parameters, lr=0.1, fused=True)
where = {"optimizer.state_on": "disk", "optimizer.state_folder": sys.argv[1]}
optimizer = Streamed(inner, config_of(where))
most, before, ended = [0], now(), threading.Event()
threading.Thread(target=watch, daemon=True).start()
for _ in range(3):
    optimizer.step()
ended.set()
print((most[0] - before) / (8 * sum(parameter.numel() for parameter in parameters)))
"""


@pytest.mark.long
def test_a_tenth_of_the_state_is_in_memory(disk):
    """Of 416 MB."""
    found = python("-c", MEASURED, disk)
    assert found.returncode == 0, found.stderr
    assert 0 < float(found.stdout) <= 0.1


def in_memory(folder: str) -> int:
    """Return the kilobytes of maps of files in a folder that are in this process's memory."""
    maps = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    found = [re.search(r"^Rss: +(\d+)", each, re.M) for each in maps if folder in each]
    return sum(int(each[1]) for each in found if each)


def saved_and_loaded(argv: list[str], folder: str, disk: str) -> tuple[list[int], dict[str, Any]]:
    """Return what is in memory after a save, and after a load, of all maps."""
    run = trainer([*argv, "--training.steps=1"], folder)
    run.train()
    found = [in_memory(disk)]
    del run
    run = trainer([*argv, "--training.steps=2"], folder)
    assert run.step == 1
    return [*found, in_memory(disk)], digests(run)


@pytest.mark.long
def test_a_save_and_a_load_leave_no_state_in_memory(pool, tmp_path, disk):
    """Of 13 MB on each rank."""
    argv = [*LARGE, *SAVING, "--checkpoint.async_mode=disabled"]
    ranks = pool.run(saved_and_loaded, [*argv, *on(disk)], str(tmp_path / "disk"), disk, world=2)
    expected = pool.run(saved_and_loaded, argv, str(tmp_path / "memory"), disk, world=2)
    for (found, state), (_, same) in zip(ranks, expected, strict=True):
        assert state == same
        assert max(found) < 1000, found


@pytest.fixture
def small_disk(tmp_path) -> Iterator[str]:
    """Mount a disk of 16 MiB."""
    folder, image = tmp_path / "small", tmp_path / "image"
    folder.mkdir()
    image.write_bytes(bytes(16 << 20))
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True).returncode == 0
    mount = ["mount", "-o", "loop", str(image), str(folder)]
    if not made or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield str(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


LARGE = [*TINY, OFFLOAD, "--model.overrides.vocab_size=100000"]
"""26 MB of optimizer state."""


def test_a_disk_that_is_too_small_for_all_ranks_of_a_node_is_refused(small_disk, tmp_path):
    free = os.statvfs(small_disk).f_bfree
    argv = [*LARGE, f"--job.dump_folder={tmp_path}", *on(small_disk)]
    with refused(f'{KEY} = "{small_disk}"', " 24", " MiB"):
        check_machine(job(argv, 2), "cpu", 2)
    check_machine(job(argv, 4), "cpu", 2)  # of two nodes
    assert os.statvfs(small_disk).f_bfree == free and os.listdir(small_disk) == ["lost+found"]


def test_what_was_reserved_before_a_failure_is_given_back(small_disk):
    free = os.statvfs(small_disk).f_bfree
    too_large = refused(f'"{small_disk}"', "8.0 MiB", os.strerror(errno.EFBIG))
    with files_of_at_most(4 << 20), too_large:
        state_store.reserve(small_disk, 8 << 20)
    free_space = SimpleNamespace(free=1 << 40)
    lied = patch.object(state_store.shutil, "disk_usage", return_value=free_space)
    with lied, refused(f'"{small_disk}"', "64.0 MiB", os.strerror(errno.ENOSPC)):
        state_store.reserve(small_disk, 64 << 20)
    assert os.statvfs(small_disk).f_bfree == free
    assert os.listdir(small_disk) == ["lost+found"]


def fault_of_the_disk(argv: list[str], folder: str, fault: str) -> str:
    """Return how a step ends where nothing can be written, or where nothing can be read."""
    run = trainer(argv, folder)
    run.train()
    optimizer = run.runner.optimizer
    store = optimizer._store
    for parameter in run.runner.parameters:
        parameter.grad = torch.zeros_like(parameter)
    if fault == "read":
        os.ftruncate(store._file.fileno(), 0)
    limit = files_of_at_most(0) if fault == "write" else nullcontext()
    with limit, refused(kind=RunFailed) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(("fault", "why"), [("write", "File too large"), ("read", "0 of ")])
def test_a_fault_of_the_disk_ends_the_step_with_the_folders_name(pool, tmp_path, disk, fault, why):
    argv = [*TINY, *on(disk)]
    (error,) = pool.run(fault_of_the_disk, argv, str(tmp_path / "a"), fault, world=1)
    says(error, f'{KEY} = "{disk}": ', why)


DISK = "--optimizer.state_on=disk --optimizer.state_folder=/nvme "
REFUSED = {
    f"{HOST} --optimizer.name=Muon": ("optimizer.state_on", '"host"', "AdamW"),
    f"{DISK} --optimizer.name=Muon": ("optimizer.state_on", '"disk"', "AdamW"),
    f"{DISK} --optimizer.state_dtype=bfloat16": ("optimizer.state_dtype", '"like_parameters"'),
    f"{DISK} --checkpoint.enable --checkpoint.async_mode=async": ("async_mode", '"disabled"'),
    "--optimizer.state_on=disk": ("optimizer.state_folder", "disk"),
    "--training.dtype=float64 --optimizer.state_dtype=float32": (
        "optimizer.state_dtype",
        "float64",
        '"like_parameters"',
    ),
    "--training.dtype=bfloat16 --optimizer.state_dtype=float32 --optimizer.name=Muon": (
        "optimizer.state_dtype",
        '"float32"',
        "AdamW",
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_streamed_is_refused(words):
    with refused(*REFUSED[words]):
        job([*TINY, *words.split()], 2)


def test_state_for_which_the_host_has_no_room_is_refused_before_the_start(tmp_path, monkeypatch):
    argv = [*TINY, HOST, "--model.overrides.vocab_size=100000", f"--job.dump_folder={tmp_path}"]
    room = 2 * preflight._PYTHON_AND_TORCH + (20 << 20)
    monkeypatch.setattr("titanlite.observe.memory.machine_bytes", lambda: room)
    built = []

    def build(*arguments: Any) -> Any:
        built.append(arguments)
        return parallelize(*arguments)

    monkeypatch.setattr(rehearse, "parallelize", build)
    with refused('optimizer.state_on = "host"', "24", "20.0 MiB"):
        check_machine(job(argv, 2), "cpu", 2)
    assert len(built) == 1, "the checks of memory and of state share a model"


def test_a_folder_that_is_no_disk_is_refused(tmp_path):
    argv = [*TINY, f"--job.dump_folder={tmp_path}"]
    (tmp_path / "file").touch()
    cases = {tmp_path / "missing": "No such file", tmp_path / "file": "Not a directory"}
    cases |= {
        path: "memory"
        for path in map(Path, ("/dev/shm", "/run", "/tmp"))
        if path.exists() and kind_of_disk(path) in ("tmpfs", "ramfs")
    }
    for folder, why in cases.items():
        with refused(f'{KEY} = "{folder}": ', why):
            check_machine(job([*argv, *on(str(folder))], 1), "cpu", 1)
