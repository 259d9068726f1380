"""On GPUs, a rank that hangs and a device that stops are reported; another file kills a rank."""

from __future__ import annotations

import pytest

from tests import runs
from tests.messages import says
from titanlite.errors import FAILED

QUICK = (
    "--training.seq_len=64 --training.local_batch_size=2 --training.steps=8 --fault.stall_seconds=8"
).split()


@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_every_rank_leaves_its_record_of_collectives(
    train_on_gpus, tmp_path
):
    ran = train_on_gpus(tmp_path, 2, QUICK, code=FAILED, INJURY="sleep:backward:1:3")
    records = ran.folder / "comm_traces"
    says(ran.out, "(fault.stall_seconds). rank 1: ", f"titanlite doctor --traces {records}")
    assert {path.name for path in records.iterdir()} == {"rank_0", "rank_1"}
    code, verdict = runs.command("doctor", f"--traces={records}")
    assert code == 0 and "missing ranks: {1}" in verdict, verdict


@pytest.mark.nightly
def test_of_a_device_that_stops_the_hang_is_reported(train_on_gpus, tmp_path):
    """Both hosts wait alike: no rank is named, least of all the one that waits for the other."""
    ran = train_on_gpus(tmp_path, 2, QUICK, code=FAILED, FAKE_GPU_STUCK="1:60")
    says(ran.out, "(fault.stall_seconds). no rank")
    records = ran.folder / "comm_traces"
    assert {path.name for path in records.iterdir()} == {"rank_0", "rank_1"}
