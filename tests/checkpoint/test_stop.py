"""A stopped run says what is saved, resumes from it, and knows when it is finished."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.observe.test_sinks import tensorboard
from tests.runs import descendants, finish, left_over, records, start, train
from titanlite.checkpoint.manifest import committed

LONG = [*TINY, "--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.async_mode=async"]
LONG += ["--metrics.log_freq=1", "--training.steps=100000"]


def wait_for(path: Path, process) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


@pytest.mark.exhaustive
def test_a_run_survives_a_hangup_under_nohup_and_when_stopped_says_what_is_saved_and_resumes(
    tmp_path,
):
    handler = signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # as nohup does; what is started inherits it
    process = start(LONG, tmp_path, NGPU="2")
    signal.signal(signal.SIGHUP, handler)
    wait_for(tmp_path / "checkpoint/step-4", process)
    process.send_signal(signal.SIGHUP)
    wait_for(tmp_path / "checkpoint/step-12", process)
    family = descendants(process.pid)
    assert len(family) >= 2
    code, out = train([*LONG, "--debug.seed=7"], tmp_path, NGPU="1")
    assert code == 2 and f'{tmp_path}" is in use by another run: pid {process.pid} on ' in out
    assert len(out.splitlines()) == 1, "before anything is started or moved"
    wait_for(tmp_path / f"checkpoint/step-{committed(tmp_path / 'checkpoint')[-1] + 4}", process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and time.monotonic() - began < 5 and "Traceback" not in out
    assert left_over(family, until=began + 5) == []
    assert re.search(
        r"stopped at step \d+ of 100000 on request .*; saved: .*/checkpoint/step-\d+"
        "; the same command goes on from there$",
        out.rstrip(),
    )
    newest = int(re.search(r"step-(\d+); the same", out)[1])

    target = newest + 3
    argv = [*LONG, f"--training.steps={target}", "--lr_scheduler.total_steps=100000"]
    code, out = train(argv, tmp_path, NGPU="1")
    assert (
        code == 0
        and f"resumed step {newest} from" in out
        and "titanlite: resuming from the newest of" in out
    )
    assert "is 2 sequences, and was 4; to keep it: --training.global_batch_size 4\n" in out
    assert (
        out.index("titanlite: resuming")
        < out.index("resumed step")
        < out.index(f"step: {target:2}")
    )
    steps = [r["step"] for r in records(tmp_path) if "loss" in r]
    assert steps == list(range(1, target + 1)), "no step twice"

    code, out = train(argv, tmp_path, NGPU="2")
    assert code == 0
    assert out == (
        f"titanlite: already at step {target} of {target}: raise --training.steps, "
        "or give --job.dump_folder\n"
    )


@pytest.mark.parametrize(
    "other", sample(["in another folder", "whose record was deleted"], every=2)
)
def test_metrics_before_a_resumed_step_are_those_of_the_checkpoints_run(tmp_path, other):
    argv = [
        *TINY,
        "--checkpoint.enable",
        "--checkpoint.interval=2",
        "--metrics.log_freq=1",
        "--optimizer.lr=1e-3",
    ]
    argv += ["--metrics.enable_tensorboard", "--lr_scheduler.total_steps=9"]
    first = [*argv, "--training.steps=4"]
    assert train(first, tmp_path, NGPU="1")[0] == 0
    rates = [record["lr"] for record in records(tmp_path) if "loss" in record]
    words = (
        ["--checkpoint.folder=elsewhere"]
        if other == "in another folder"
        else ["--checkpoint.no_enable"]
    )
    assert (
        train([*argv, "--training.steps=3", "--optimizer.lr=2e-3", *words], tmp_path, NGPU="1")[0]
        == 0
    )
    if other == "whose record was deleted":
        shutil.rmtree(tmp_path / "previous")
    code, out = train([*argv, "--training.steps=6"], tmp_path, NGPU="1")
    assert code == 0, out
    found = [(record["step"], record["lr"]) for record in records(tmp_path) if "loss" in record]
    traced = tensorboard(tmp_path / "tb")["lr"]
    if other == "whose record was deleted":
        assert [step for step, _ in found] == [5, 6]
        assert (
            "metrics.jsonl has nothing of the steps before" in out
            and "another run's record is now in" in out
        )
    else:
        assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6] and [
            rate for _, rate in found[:4]
        ] == rates
        assert "metrics.jsonl continues the record of the checkpoint's run, from" in out
    others = [
        json.loads(line)
        for path in tmp_path.glob("previous/*/metrics.jsonl")
        for line in path.open()
    ]
    assert any(record.get("lr") == 2e-3 * rates[0] / 1e-3 for record in others), (
        "the other run's record is kept"
    )
    assert sorted(traced) == [step for step, _ in found]
