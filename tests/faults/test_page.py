"""A rank's page, as its launcher reads it."""

import os
from pathlib import Path

from titanlite.runtime.page import HALF_BYTES, EarlyExit, OwnPage, read_page


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
