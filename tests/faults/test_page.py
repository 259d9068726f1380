"""A rank's page, as its launcher reads it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from titanlite.runtime.page import HALF_BYTES, EarlyExit, OwnPage, read_page, read_pages

WRITER = """
import sys
from pathlib import Path
from titanlite.runtime.page import OwnPage
page = OwnPage()
page.share(Path(sys.argv[1]))
while True:
    page.step += 1
    page.completed = page.step
    page.enter("forward" if page.step % 2 else "gradient norm")
"""


def test_a_page_is_never_read_half_written_and_stays_when_its_process_is_stopped_or_killed(
    tmp_path,
):
    file = tmp_path / "3.page"
    assert read_page(file) is None
    writer = subprocess.Popen([sys.executable, "-c", WRITER, file])
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and read_page(file)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2_000):
            page = read_page(file)
            assert page and page.step - page.completed <= 1
            assert (page.phase, page.step % 2) in (
                ("start", 0),
                ("forward", 1),
                ("gradient norm", 0),
            )
        writer.send_signal(signal.SIGSTOP)
        assert (page := read_page(file)) and page.pid == writer.pid
    finally:
        writer.kill()
        writer.wait()
    assert list(read_pages(tmp_path)) == [3]


def test_a_half_that_is_partly_written_is_not_read(tmp_path):
    """A copy of memory has no order: any part may be new, its ends too."""
    page, file = OwnPage(), tmp_path / "0.page"
    page.share(file)
    for step, phase in ((6, "log"), (7, "forward"), (8, "backward")):
        older = file.read_bytes()
        page.step = step
        page.enter(phase)
    newest = file.read_bytes()
    changed = [at for at in range(len(newest)) if newest[at] != older[at]]
    assert len(changed) > 5
    for at in changed:
        torn = bytearray(newest)
        torn[at] = older[at]
        file.write_bytes(torn)
        read = read_page(file)
        assert read and (read.step, read.phase) == (7, "forward"), at


def test_a_page_holds_an_early_exit_and_any_reason(tmp_path: Path):
    page = OwnPage()
    page.share(tmp_path / "0.page")
    page.end(EarlyExit(76, 7, "SIGTERM to ränk 0; " + "ü" * 4000, 2))
    read = read_page(tmp_path / "0.page")
    assert read and read.pid == os.getpid() and read.ending
    assert (read.ending.code, read.ending.step, read.ending.lost) == (76, 7, 2)
    assert read.ending.reason.startswith("SIGTERM to ränk 0; üüü")
    assert (tmp_path / "0.page").stat().st_size == 2 * HALF_BYTES
