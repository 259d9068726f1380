"""Timeouts of collectives reach every group but the excluded one; what a rank sets up before it
joins its job.
"""

import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.jobs import TINY, trainer
from titanlite.config.schema import Comm
from titanlite.runtime import distributed, torch_private
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import (
    WATCH_SECONDS,
    process_group,
    set_collective_timeout,
    stay_near,
)


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def timeouts_of_a_run(folder: str) -> tuple[set[timedelta], timedelta, list[tuple[Any, ...]]]:
    """Train; return the timeouts before the first step, and at each change whether rank 1 had taken
    that step, and the new timeouts. FSDP2 makes groups of its own to reshard to two of four ranks.
    """
    argv = "--comm.init_timeout_seconds=123 --fault.stall_seconds=150 --checkpoint.enable"
    argv += " --parallelism.fsdp_reshard_after_forward=2"
    run = trainer([*TINY, *argv.split()], folder)
    of_saves = run.checkpoints.group
    groups = [group for group in torch_private.process_groups() if group is not of_saves]
    initial = {timeout_of(group) for group in groups}
    run.step = 1  # so that, as after most resumes, the first step is not logged
    take_step, taken, changes = run.train_step, Path(folder) / "taken", []

    def slow_step() -> None:
        take_step()
        if run.step == 2 and run.rank_info.rank == 1:
            time.sleep(0.3)
            taken.touch()

    def change(seconds: float, excluded: dist.ProcessGroup) -> None:
        is_taken = taken.exists()
        set_collective_timeout(seconds, excluded)
        changes.append((is_taken, {timeout_of(group) for group in groups}, timeout_of(of_saves)))

    run.train_step = slow_step  # type: ignore[method-assign]
    before = timeout_of(of_saves)
    with mock.patch("titanlite.train.trainer.set_collective_timeout", change):
        run.train()
    return initial, before, changes


def test_all_groups_but_that_of_saves_change_their_timeout_when_every_rank_took_its_first_step(
    pool, tmp_path
):
    for initial, of_saves, changes in pool.run(timeouts_of_a_run, str(tmp_path), world=4):
        assert initial == {timedelta(seconds=123 + WATCH_SECONDS)}
        assert of_saves == timedelta(seconds=1800 + WATCH_SECONDS)
        # Only when rank 1 had taken the step too; 100 would be too soon.
        assert changes == [(True, {timedelta(seconds=150 + WATCH_SECONDS)}, of_saves)]


@pytest.fixture
def environ(monkeypatch, tmp_path):
    """Return a function that gives the variables and the limit of open files with which a rank
    joins its job.
    """

    def join(
        ranks_here: int = 2, settings: Comm | None = None, **variables: str
    ) -> tuple[dict[str, str], int]:
        found: list[tuple[dict[str, str], int]] = []

        def init(*_: Any, **__: Any) -> None:
            found.append((dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "set_device", lambda _: None)
            patch.setattr(distributed, "stay_near", lambda _: None)
            patch.setattr(dist, "init_process_group", init)
            patch.setattr(dist, "destroy_process_group", lambda: None)
            patch.setattr(os, "environ", {"PATH": "/bin", **variables})
            patch.setattr(distributed, "_store", lambda *_: dist.HashStore())
            here = {"LOCAL_WORLD_SIZE": str(ranks_here)}
            rank, gpu = RankInfo(0, 2, 0, "h"), torch.device("cuda", 0)
            with process_group(rank, gpu, settings or Comm(), tmp_path, here):
                pass
        return found[0]

    return join


def test_a_rank_on_a_gpu_records_what_nccl_did_when_a_collective_timed_out(environ, tmp_path):
    """With the names that torch 2.11 to 2.15 read first, and the error handling that a record
    needs.
    """
    settings = Comm(trace_buf_size=7, save_traces_folder="records")
    # As torch's elastic agent sets it.
    variables, _ = environ(settings=settings, TORCH_NCCL_ASYNC_ERROR_HANDLING="1")
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert variables["TORCH_FR_BUFFER_SIZE"] == "7"
    recorder = "FR" if torch.__version__ >= "2.15" else "NCCL"
    assert variables[f"TORCH_{recorder}_DUMP_ON_TIMEOUT"] == "1"
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "records" / "rank_")
    assert not [
        name for name in variables if name.startswith(("TORCH_NCCL_TRACE", "TORCH_NCCL_DEBUG"))
    ]
    own = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_FR_BUFFER_SIZE": "5",
        f"TORCH_{recorder}_DUMP_ON_TIMEOUT": "0",
    }
    own |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine", "PATH": "/bin"}
    assert environ(**own)[0] == own, "a newer name would replace what the older one says"


def test_ranks_on_several_hosts_connect_when_they_need_it_and_wait_a_second_for_a_name(environ):
    names = ("TORCH_GLOO_LAZY_INIT", "RES_OPTIONS")
    assert not {*names} & environ()[0].keys(), "one host"
    assert [environ(ranks_here=1)[0][name] for name in names] == ["1", "timeout:1 attempts:1"]
    own = dict(zip(names, ("0", "timeout:3"), strict=True))
    assert own.items() <= environ(ranks_here=1, **own)[0].items()


def test_a_rank_may_open_as_many_files_as_the_system_allows(environ):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 512), hard))
        assert environ()[1] == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("near", "allowed", "kept"),
    [
        ("2-3,6", {0, 1, 2, 6}, {2, 6}),
        ("4-7", {0, 1}, {0, 1}),  # somebody has chosen other cores
        ("", {0, 1}, {0, 1}),  # a virtual machine that does not say
    ],
)
def test_a_rank_stays_on_the_cores_near_its_gpu_that_it_may_use(
    tmp_path, monkeypatch, near, allowed, kept
):
    device = tmp_path / "0001:a1:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text(f"{near}\n")
    used = [allowed]

    def choose(_: int, cores: set[int]) -> None:
        if not cores:
            raise OSError("invalid argument")
        used.append(cores)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", choose)
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    stay_near(torch.device("cuda", 0), tmp_path)
    assert used[-1] == kept
