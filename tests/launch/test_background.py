"""What the launcher computes while the workers start: at the lowest priority, waited for by
nothing, in silence.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.runs import ROOT, environment, left_over, start
from titanlite.launch.background import BackgroundLines


def wait_for(lines, seconds: float = 20) -> list[str]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := lines():
            return found
        time.sleep(0.01)
    return []


def test_lines_come_once_from_a_process_of_the_lowest_priority():
    """Also among sessions: where Linux weighs these first, a worker's is another one."""

    def niceness() -> list[str]:
        session = Path("/proc/self/autogroup")
        found = session.read_text().split()[-1] if session.exists() else "19"
        return ["one", f"niceness {os.nice(0)}, of its session {found}"]

    with BackgroundLines(niceness) as lines:
        assert wait_for(lines) == ["one", "niceness 19, of its session 19"]
        assert lines() == [] and lines() == []


def test_a_failure_says_nothing(capfd):
    def fail():
        os.write(2, b"said by the child")
        os.system("echo said by its child")
        raise ValueError("a fault was put in here")

    with BackgroundLines(fail) as lines:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT) is None:
            time.sleep(0.01)
        assert lines() == []
    assert capfd.readouterr() == ("", "")


def test_the_end_of_the_run_ends_the_computation():
    start = time.monotonic()
    with BackgroundLines(lambda: time.sleep(60) or ["too late"]) as lines:
        assert lines() == []
    assert time.monotonic() - start < 20


def test_a_killed_launcher_takes_the_computation_with_it():
    code = (
        "import os, time; from titanlite.launch.background import BackgroundLines\n"
        "with BackgroundLines(lambda: time.sleep(60) or []):\n    time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    family, deadline = [], time.monotonic() + 20
    while not family and time.monotonic() < deadline:
        family = [int(pid) for pid in children.read_text().split()]
    time.sleep(0.5)
    launcher.kill()
    launcher.wait()
    assert family and left_over(family) == []


@pytest.mark.exhaustive
def test_a_run_prints_two_lines_of_its_plan_unless_switched_off(tmp_path):
    process = start([*TINY, "--job.plan", "--training.steps=1000000"], tmp_path, NGPU="2")
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if "planned" in line and "communication" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and not any("Traceback" in line for line in lines)
    (memory,) = (line for line in lines if "planned peak" in line)
    assert " a rank, in " in memory and "; a rank has " in memory
    (communication,) = (line for line in lines if "planned communication" in line)
    assert "dp_shard 7 all-gather" in communication and communication.endswith(
        "no speed bound on a CPU\n"
    )
    assert lines.index(memory) + 1 == lines.index(communication)
