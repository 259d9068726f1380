"""On GPUs, a killed rank, a hang and a device that stops are reported, and the run goes on where it
can.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.runs import environment
from titanlite.errors import FAILED

pytestmark = pytest.mark.long
QUICK = (
    "--training.seq_len=64 --training.local_batch_size=2 --training.steps=8 --fault.stall_seconds=8"
).split()


def verdict(folder) -> str:
    """Return torch's verdict on the records of collectives."""
    command = [sys.executable, "-m", "titanlite", "doctor", f"--traces={folder}/comm_traces"]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.exhaustive
def test_a_killed_rank_is_replaced_and_the_run_goes_on(train_on_gpus, tmp_path):
    saving = "--checkpoint.enable --checkpoint.interval=2 --checkpoint.async_mode=disabled"
    ran = train_on_gpus(tmp_path, 2, [*QUICK, *saving.split()], INJURY="kill:backward:1:4")
    assert ran.code == 0 and "restart 1 of 3, from" in ran.out, ran.out
    assert len([*(tmp_path / "traces").glob("rank-1.*.trace")]) == 2


def test_a_rank_that_hangs_is_named_and_every_rank_leaves_its_record_of_collectives(
    train_on_gpus, tmp_path
):
    ran = train_on_gpus(tmp_path, 2, QUICK, INJURY="sleep:backward:1:3")
    assert ran.code == FAILED
    assert re.search(
        r"the run hangs: no rank moved for 8 s \(fault.stall_seconds\). rank 1: ", ran.out
    ), ran.out
    assert f"collectives: titanlite doctor --traces {ran.folder}/comm_traces" in ran.out
    assert {path.name for path in (ran.folder / "comm_traces").iterdir()} == {"rank_0", "rank_1"}
    assert "missing ranks: {1}" in verdict(ran.folder)


@pytest.mark.exhaustive
def test_of_a_device_that_stops_the_hang_is_reported(train_on_gpus, tmp_path):
    """Both hosts wait alike: no rank is named, least of all the one that waits for the other."""
    ran = train_on_gpus(tmp_path, 2, QUICK, FAKE_GPU_STUCK="1:60")
    assert ran.code == FAILED
    assert "(fault.stall_seconds). no rank stands out" in ran.out, ran.out
    assert {path.name for path in (ran.folder / "comm_traces").iterdir()} == {"rank_0", "rank_1"}
