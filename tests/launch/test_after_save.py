"""checkpoint.after_save: a command after each save, apart from the ranks: only the end of a run
waits for it.
"""

import signal
from pathlib import Path

from tests.jobs import TINY
from tests.messages import says
from tests.runs import finish, records, run, start, wait_for

SAVES = [*TINY, "--training.steps=6", "--checkpoint.enable", "--checkpoint.interval=1"]
# The command of step 1 ends when step 5 is there, and that of the next one fails.
WAITS = """
case {checkpoint} in
*/step-1) while [ ! -d RUN/checkpoint/step-5 ]; do sleep 0.05; done; echo copied;;
*) echo away >&2; exit 3;;
esac"""


def test_saves_meanwhile_are_skipped_but_for_the_newest_and_a_failure_ends_nothing(tmp_path):
    command = WAITS.replace("RUN", str(tmp_path))
    done = run([*SAVES, f"--checkpoint.after_save={command}"], tmp_path, ranks=2)
    rows = [row for row in records(tmp_path) if "after_save_exit_code" in row]
    assert rows[0]["step"] == 1 and rows[0]["after_save_exit_code"] == 0
    assert rows[-1]["step"] == 6 and rows[-1]["after_save_exit_code"] == 3
    assert len(rows) + sum(row["after_save_skipped"] for row in rows) <= 6
    assert rows[0]["after_save_skipped"] > 0
    logs = tmp_path / "logs"
    assert (logs / "after-save-1.log").read_text() == "copied\n"
    assert (logs / "after-save-6.log").read_text() == "away\n"
    says(done.out, "checkpoint.after_save of step 6", "exit code 3", "after-save-6.log", "step 6")
    says((logs / "launcher.log").read_text(), "checkpoint.after_save of step 1", "skipped")


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
