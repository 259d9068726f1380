"""One pool of ranks for each process of the suite, and two lanes: tests marked `long` run with
--all, those marked `nightly` with --nightly, and both when they are named.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(
    0, str(Path(__file__).parent / "outside")
)  # packages that register models and converters
os.environ.setdefault("OMP_NUM_THREADS", "1")
with suppress(
    ImportError
):  # it writes the width of its terminal, or 80, into the environment of subprocesses
    import readline  # noqa: F401
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)  # readline tells the C library only
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints when it starts and stops
# A background job inherits an ignored one, and gives it to all that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import runs  # noqa: E402
from tests.spent import processor_seconds  # noqa: E402
from tests.worker import PRELOAD, fork_workers  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402

LEFT_OUT = pytest.StashKey[int]()
SPENT = pytest.StashKey[Counter[str]]()
"""Processor seconds by file, of all processes."""
BEGAN = pytest.StashKey[float]()
LANES = pytest.StashKey[tuple[bool, bool, bool]]()
"""Whether --all, --nightly, or names of tests were given."""
NAME = "titanlite's lanes"
COLLECTION = "imports and collection"
DEAREST = 10
SLOW_FILES = {"test_tutorials", "test_first_light", "test_slurm", "test_restart", "test_container"}
SLOW_FILES |= {"test_torchtitan_runs"}
"""Of few tests. They come first: the last file of a run keeps one of its processes busy alone."""


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool(4, PRELOAD)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: Any) -> Any:
    """Makes folders, also those of tmp_path, that checkpoints can be written into."""
    mktemp = tmp_path_factory.mktemp
    tmp_path_factory.mktemp = lambda *args, **options: LocalPath(mktemp(*args, **options))
    return tmp_path_factory


@pytest.fixture(autouse=True)
def _leaves_no_run() -> Iterator[None]:
    since = len(runs.STARTED)
    yield
    runs.kill_started(since)
    assert not dist.is_initialized(), "it leaves a process group to the tests that follow"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked long")
    parser.addoption("--nightly", action="store_true", help="run only those marked nightly")
    parser.addoption(
        "--most-seconds", type=int, default=0, help="fail above this many processor seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0
    config.stash[SPENT] = Counter()
    config.stash[BEGAN] = time.monotonic()
    option = config.option
    named = config.args and all("::" in argument for argument in config.args)
    lanes = option.all, option.nightly, bool(named)
    worker = getattr(config, "workerinput", {})
    config.stash[LANES] = worker.get(NAME, lanes)
    if getattr(option, "tx", None) and not worker and sys.platform == "linux":
        fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give an xdist worker the lanes: its arguments do not say whether tests are named."""
    node.workerinput[NAME] = node.config.stash[LANES]


def runs_here(item: pytest.Item) -> bool:
    """Return whether a test is in the lane that was asked for."""
    all_of_ci, only_nightly, named = item.config.stash[LANES]
    if named or item.get_closest_marker("nightly"):
        return named or only_nightly
    return not only_nightly and (all_of_ci or not item.get_closest_marker("long"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not runs_here(item)]
    items[:] = filter(runs_here, items)
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in SLOW_FILES, -tests[item.path]))
    config.stash[SPENT][COLLECTION] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    result = yield
    if nextitem is None or nextitem.path != item.path:  # the last one of its file
        spent = item.config.stash[SPENT]
        file = str(item.path.relative_to(runs.ROOT / "tests"))
        spent[file] += processor_seconds() - spent.total()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    spent, most = config.stash[SPENT], config.option.most_seconds
    if hasattr(config, "workeroutput"):
        config.workeroutput |= {"left out": config.stash[LEFT_OUT], "spent": dict(spent)}
    elif most and spent.total() > most:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts from an xdist worker: every worker collects all tests."""
    output, stash = getattr(node, "workeroutput", {}), node.config.stash
    stash[LEFT_OUT] = output.get("left out", 0)
    stash[SPENT].update(output.get("spent", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[LEFT_OUT]:
        terminalreporter.line(
            f"left out: {config.stash[LEFT_OUT]} tests; ./scripts/test.sh --all runs the long "
            "ones, ./scripts/nightly.sh the others"
        )
    spent, minutes = config.stash[SPENT], (time.monotonic() - config.stash[BEGAN]) / 60
    if len(spent) > DEAREST:
        terminalreporter.line(f"the {DEAREST} dearest files, in processor seconds:")
        for file, seconds in spent.most_common(DEAREST):
            terminalreporter.line(f"  {seconds:6.1f}  {file}")
    most = config.option.most_seconds
    limit = f", of at most {most}" if most else ""
    terminalreporter.line(f"{spent.total():.0f} processor seconds{limit}, in {minutes:.1f} minutes")
