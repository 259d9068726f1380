"""A stopped run says what is saved, resumes from it, and knows when it is finished."""

import shutil
import signal
import time

import pytest

from tests.jobs import TINY
from tests.messages import says
from tests.observe.test_sinks import tensorboard
from tests.runs import descendants, finish, left_over, records, run, start, wait_for
from titanlite.checkpoint.manifest import committed

SAVING = [*TINY, "--checkpoint.enable", "--metrics.log_freq=1"]
LONG = [*SAVING, "--checkpoint.interval=4", "--training.steps=100000"]


@pytest.mark.long
def test_a_run_survives_a_hangup_under_nohup_and_when_stopped_says_what_is_saved_and_resumes(
    tmp_path,
):
    steps = tmp_path / "checkpoint"
    # as nohup does; what is started inherits it
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = start(LONG, tmp_path, NGPU="2")
    signal.signal(signal.SIGHUP, handler)
    wait_for(steps / "step-4", process)
    process.send_signal(signal.SIGHUP)
    wait_for(steps / "step-12", process)
    family = descendants(process.pid)
    assert len(family) >= 2
    (refusal,) = run([*LONG, "--debug.seed=7"], tmp_path, code=2).out.splitlines()
    says(refusal, f"pid {process.pid}", tmp_path)  # before anything is started or moved
    wait_for(steps / f"step-{committed(steps)[-1] + 4}", process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and time.monotonic() - began < 5 and "Traceback" not in out
    assert left_over(family, until=began + 5) == []
    newest = committed(steps)[-1]
    says(out.splitlines()[-1], f"step {newest} of 100000", f"{steps}/step-{newest}")

    target = newest + 3
    argv = [*LONG, f"--training.steps={target}", "--lr_scheduler.total_steps=100000"]
    resumed = run(argv, tmp_path)
    says(resumed.out, f"resumed step {newest}", "--training.global_batch_size 4\n")
    order = ["titanlite: resuming", "resumed step", f"step: {target:2}"]
    places = [resumed.out.index(each) for each in order]
    assert places == sorted(places)
    logged = [record["step"] for record in resumed.records if "loss" in record]
    assert logged == [*range(1, target + 1)], "no step twice"

    (line,) = run(argv, tmp_path, ranks=2).out.splitlines()
    says(line, f"step {target} of {target}", "--training.steps", "--job.dump_folder")


@pytest.mark.long
@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
def test_metrics_before_a_resumed_step_are_those_of_the_checkpoints_run(tmp_path, deleted):
    argv = [*SAVING, "--checkpoint.interval=2", "--optimizer.lr=1e-3"]
    argv += ["--metrics.enable_tensorboard", "--lr_scheduler.total_steps=9"]
    first = run([*argv, "--training.steps=4"], tmp_path)
    rates = [record["lr"] for record in first.records if "loss" in record]
    other = [*argv, "--training.steps=3", "--optimizer.lr=2e-3", "--checkpoint.folder=elsewhere"]
    run(other, tmp_path)
    if deleted:
        shutil.rmtree(tmp_path / "previous")
    resumed = run([*argv, "--training.steps=6"], tmp_path)
    found = [(record["step"], record["lr"]) for record in resumed.records if "loss" in record]
    if deleted:
        assert [step for step, _ in found] == [5, 6]
        says(resumed.out, "metrics.jsonl has nothing")
    else:
        assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
        assert [rate for _, rate in found[:4]] == rates
        says(resumed.out, "metrics.jsonl continues")
    assert sorted(tensorboard(tmp_path / "tb")["lr"]) == [step for step, _ in found]
    files = tmp_path.glob("previous/*/metrics.jsonl")
    kept = (record for file in files for record in records(file.parent))
    assert any(record.get("lr") == 2 * rates[0] for record in kept), "the other run's record"
