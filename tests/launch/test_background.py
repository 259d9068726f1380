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
from tests.messages import says
from tests.runs import ROOT, children, environment, left_over, start
from titanlite.fault.inspection import wait_until
from titanlite.launch.background import BackgroundLines


def test_lines_come_once_from_a_process_of_the_lowest_priority():
    """Also among sessions: where Linux weighs these first, a worker's is another one."""

    def niceness() -> list[str]:
        session = Path("/proc/self/autogroup")
        found = session.read_text().split()[-1] if session.exists() else "19"
        return ["one", str(os.nice(0)), found]

    with BackgroundLines(niceness) as lines:
        found: list[str] = []
        wait_until(lambda: bool(found.extend(lines()) or found), 20)
        assert found == ["one", "19", "19"] and lines() == []


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
    wait_until(lambda: bool(children(launcher.pid)), 20)
    family = children(launcher.pid)
    time.sleep(0.5)
    launcher.kill()
    launcher.wait()
    assert family and left_over(family) == []


@pytest.mark.long
def test_a_run_prints_two_lines_of_its_plan_unless_switched_off(tmp_path):
    argv = [*TINY, "--job.plan", "--model.package=injured", "--comm.init_timeout_seconds=3000"]
    process = start(argv, tmp_path, NGPU="2", INJURY="sleep:start:0:0")  # and so it does not end
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if "planned communication" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and not any("Traceback" in line for line in lines)
    (at,) = [number for number, line in enumerate(lines) if "planned peak" in line]
    says(lines[at], " a rank, in ", "; a rank has ")
    says(lines[at + 1], "planned communication", "dp_shard 7 all-gather", "CPU\n")
