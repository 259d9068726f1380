"""checkpoint.after_save: a command after each save, apart from the ranks: only the end of a run
waits for it.
"""

import signal
from pathlib import Path

from tests.jobs import TINY
from tests.messages import says
from tests.runs import finish, records, run, start, wait_for

SAVES = [*TINY, "--training.steps=40", "--checkpoint.enable", "--checkpoint.interval=1"]
SAVES += ["--checkpoint.keep_latest_k=2"]
# The first one ends when the last step is there; the next one fails.
WAITS = """
if mkdir RUN/first 2>/dev/null; then
    while [ ! -d RUN/checkpoint/step-40 ]; do sleep 0.05; done; echo {checkpoint}
else
    echo away >&2; exit 3
fi"""


def test_saves_meanwhile_are_skipped_but_for_the_newest_and_a_failure_ends_nothing(tmp_path):
    command = WAITS.replace("RUN", str(tmp_path))
    done = run([*SAVES, f"--checkpoint.after_save={command}"], tmp_path)
    first, last = (row for row in records(tmp_path) if "after_save_exit_code" in row)
    assert (first["after_save_exit_code"], last["after_save_exit_code"]) == (0, 3)
    assert (last["step"], last["after_save_skipped"]) == (40, 0)
    assert 0 < first["after_save_skipped"] < 40 - first["step"]
    logs, step = tmp_path / "logs", first["step"]
    saved = tmp_path / "checkpoint" / f"step-{step}"
    assert (logs / f"after-save-{step}.log").read_text() == f"{saved}\n"
    assert (logs / "after-save-40.log").read_text() == "away\n"
    says(done.out, "checkpoint.after_save of step 40", "exit code 3", "after-save-40.log")
    says((logs / "launcher.log").read_text(), f"checkpoint.after_save of step {step}", "skipped")


def test_a_stop_waits_for_the_command_no_longer_than_the_grace(tmp_path):
    begun = tmp_path / "begun"
    options = [*SAVES, "--training.steps=100000", "--fault.grace_seconds=2"]
    process = start(
        [*options, f"--checkpoint.after_save=touch {begun}; sleep 1000"], tmp_path / "run"
    )
    wait_for(begun, process)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 75
    says(out, "checkpoint.after_save", "2 s", "saved: ")
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _sleeps(path)]


def _sleeps(path):
    try:
        return path.read_bytes() == b"sleep\x001000\x00"
    except OSError:
        return False
