"""At the end of a rank, prints the large modules that it imported after its fork."""

import sys
from typing import Any
from unittest import mock

import injured  # noqa: F401

from titanlite.runtime.page import OwnPage

share, enter = OwnPage.share, OwnPage.enter
before: set[str] = set()


def sharing(self: Any, *arguments: Any) -> None:
    before.update(sys.modules)
    share(self, *arguments)


def entering(self: Any, phase: str) -> None:
    enter(self, phase)
    if phase == "step":
        print("imported:", *sorted(sys.modules.keys() - before), flush=True)


mock.patch.object(OwnPage, "share", sharing).start()
mock.patch.object(OwnPage, "enter", entering).start()
