"""How far a long command is: one kind of bar, and lines where there is no terminal."""

from __future__ import annotations

import os
import pty
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.messages import says
from titanlite.cli import main
from titanlite.observe import progress
from titanlite.observe.progress import describe, track
from titanlite.planner import plan

MIB = 1 << 20


@pytest.mark.parametrize(
    ("done", "total", "added", "seconds", "unit", "text"),
    [
        (MIB, 4 * MIB, MIB, 10, "bytes", "1.0 MiB of 4.0 MiB, 102.4 KiB/s, 0:30 left"),
        (3, 50, 1, 30, "rows", "3 of 50 rows, 2/min, 23:30 left"),  # two were done before
        (0, 50, 0, 0, "rows", "0 of 50 rows"),
    ],
)
def test_a_line_has_the_amount_the_rate_and_the_time_left(done, total, added, seconds, unit, text):
    assert describe(done, total, added, seconds, unit) == text


def test_without_a_terminal_there_is_a_line_every_ten_seconds(capsys, monkeypatch):
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=now.__next__))
    assert list(track("abcdefg", 7, "rows")) == [*"abcdefg"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "titanlite: 2 of 7 rows, 10/min, 0:30 left",
        "titanlite: 5 of 7 rows, 12.5/min, 0:10 left",
    ]


def test_a_plan_says_that_it_goes_on(capsys, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "print_notice", lambda text: (print(text), goes_on.set()))
    monkeypatch.setattr(plan, "make_plan", lambda *_: goes_on.wait(30) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan", "--gpu", "h100-80g"])
    says(capsys.readouterr().out, "planning, 0:00 so far")


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(monkeypatch):
    master, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(track("ab", 2, "rows")) == ["a", "b"]
    shown = ""
    with suppress(OSError):  # the other end is closed
        while part := os.read(master, 65536):
            shown += part.decode(errors="replace")
    os.close(master)
    assert "1 of 2 rows" in shown and shown.endswith("\x1b[2K")
