"""A launcher forks its ranks from itself: each is like a new process, without the imports; where a
fork is not safe, ranks are new interpreters, and the launcher says why.
"""

import json
import sys
from pathlib import Path
from signal import SIG_DFL, SIG_IGN

import pytest

from tests.jobs import TINY
from tests.messages import says
from tests.runs import children, python, run, start, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")
WHY = "what its launcher imports is the point"
SERVER = """
import json, os, random, signal, sys
import numpy
from titanlite.runtime.forks import ForkServer

def task():
    if sys.argv[1] == "exit":
        sys.exit(7)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raise":
        raise ValueError("a fault")
    facts = {
        "random": [random.random(), numpy.random.rand()],
        "parent": os.getppid() == int(os.environ["PARENT"]),
        "leads": os.getsid(0) == os.getpid(),
        "rank": os.environ["RANK"],
        "inherited": os.environ.get("OWN"),
        "handlers": [int(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGHUP)],
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    }
    print(json.dumps(facts))

signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("printed once", end="")
os.environ["OWN"] = "of the launcher"
server = ForkServer(task)
null = os.open(os.devnull, os.O_RDWR)
codes = []
for rank, word in enumerate(("tell", "tell", "exit", "kill", "raise")):
    with open(f"{rank}.log", "wb") as log:
        environ = {"RANK": str(rank), "PARENT": str(os.getpid())}
        child = server.start([word], environ, [null, log.fileno(), log.fileno()])
    codes.append(child.wait(60))
print(json.dumps(codes))
"""


def test_a_fork_is_like_a_new_process(tmp_path):
    done = python("-c", SERVER, folder=tmp_path)
    assert done.stdout.startswith("printed once[") and not done.stderr, done
    assert json.loads(done.stdout.removeprefix("printed once")) == [0, 0, 7, -9, 1]
    first, second = (json.loads((tmp_path / f"{rank}.log").read_text()) for rank in (0, 1))
    for drawn, other in zip(first.pop("random"), second.pop("random"), strict=True):
        assert drawn != other
    assert first == {
        "parent": True,
        "leads": True,
        "rank": "0",
        "inherited": None,
        "handlers": [SIG_DFL, SIG_IGN],
        "files": [0, 1, 2],
    }
    assert second == {**first, "rank": "1"}
    assert "ValueError: a fault" in (tmp_path / "4.log").read_text()


def test_ranks_are_forks_of_their_launcher_and_its_checks_are_not_repeated(tmp_path):
    launcher = start([*TINY, "--training.steps=1000"], tmp_path, NGPU="2")
    wait_for(tmp_path / "metrics.jsonl", launcher)
    command = Path(f"/proc/{launcher.pid}/cmdline").read_bytes()
    below = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(launcher.pid)]
    assert below == [command] * 3, "the server and two ranks"


@pytest.mark.long
def test_a_launcher_with_threads_starts_interpreters_and_says_why(tmp_path):
    done = run([*TINY, "--model.package=threaded"], tmp_path, ranks=2)
    says(done.out, "2 threads")
    assert len(done.losses) == 3


@pytest.mark.long
def test_a_start_and_a_restart_of_ranks_import_nothing(tmp_path):
    argv = [word for word in TINY if word != "--checkpoint.no_enable"]
    argv += ["--checkpoint.enable", "--checkpoint.interval=1", "--model.package=importing"]
    done = run(
        [*argv, "--training.steps=6"], tmp_path, ranks=2, real=WHY, INJURY="kill:backward:1:4"
    )
    says(done.out, "restart 1 of 3")
    imported = {
        name
        for log in tmp_path.glob("logs/**/rank-*.log")
        for line in log.read_text().splitlines()
        if line.startswith("imported: ")
        for name in line.split()[1:]
    }
    assert not {name for name in imported if name.startswith(("torch.", "titanlite."))}, imported
