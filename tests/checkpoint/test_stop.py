"""A stopped run says what is saved, resumes from it, and knows when it is finished."""

import re
import signal
import time
from pathlib import Path

from tests.jobs import TINY
from tests.launch.run import descendants, finish, left_over, records, start, train
from titanlite.checkpoint.manifest import committed

LONG = [*TINY, "--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.async_mode=async"]
LONG += ["--metrics.log_freq=1", "--training.steps=100000"]


def wait_for(path: Path, process) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_a_run_survives_a_hangup_under_nohup_and_when_stopped_says_what_is_saved_and_resumes(tmp_path):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; what is started inherits it
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
    assert re.search(r"stopped at step \d+ of 100000 on request .*; saved: .*/checkpoint/step-\d+$", out.rstrip())
    newest = int(re.search(r"step-(\d+)$", out.rstrip())[1])

    target = newest + 3
    argv = [*LONG, f"--training.steps={target}", "--lr_scheduler.total_steps=100000"]
    code, out = train(argv, tmp_path, NGPU="1")
    assert code == 0 and f"resumed step {newest} from" in out and "titanlite: resuming from the newest of" in out
    assert "is 2 sequences, and was 4; to keep it: --training.global_batch_size 4\n" in out
    assert out.index("titanlite: resuming") < out.index("resumed step") < out.index(f"step: {target:2}")
    steps = [r["step"] for r in records(tmp_path) if "loss" in r]
    assert steps == list(range(1, target + 1)), "no step twice"

    code, out = train(argv, tmp_path, NGPU="2")
    assert code == 0
    assert out == (
        f"titanlite: already at step {target} of {target}: raise --training.steps, or give --job.dump_folder\n"
    )
