"""A known fault: a mistake as a patch, put into the trainer on every rank, never into the reference."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from titanlite.parallel import parallelize
from titanlite.parallel.build import Context
from titanlite.verify.table import Row

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Fault:
    """A mistake: its description, the rows that show it, and the patch that puts it in."""

    summary: str
    rows: tuple[Row, ...]
    put_in: Callable[[], Patch]


FAULTS: dict[str, Fault] = {}


def fault(summary: str, *rows: Row) -> Callable[[Callable[[], Patch]], None]:
    """Register the decorated patch under its own name."""

    def register(put_in: Callable[[], Patch]) -> None:
        FAULTS[put_in.__name__.strip("_").replace("_", "-")] = Fault(summary, rows, put_in)

    return register


def followed_by(owner: Any, name: str, more: Callable[..., Any]) -> Patch:
    """Let each call of the function `name` be followed by `more(result, *arguments)`."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        more(result, *args)
        return result

    return patch.object(owner, name, both)


def after(technique: parallelize.Technique, change: Callable[[torch.nn.Module, Context], Any]) -> Patch:
    """Change a model part after a technique of the fixed order is applied to it."""

    def both(model: torch.nn.Module, context: Context) -> list[str]:
        notes = technique(model, context)
        change(model, context)
        return notes

    return patch.multiple(parallelize, ORDER=[both if each is technique else each for each in parallelize.ORDER])
