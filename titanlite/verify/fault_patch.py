"""A known fault: a function of the trainer is replaced on every rank, and never in the reference."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from titanlite.train.step import StepRunner
from titanlite.verify.table import Row


@dataclass(frozen=True)
class Fault:
    """A mistake: its description, the function it replaces, the rows that show it, and the replacement."""

    summary: str
    owner: Any
    attribute: str
    rows: tuple[Row, ...]
    replacement: Callable[..., Any]
    """Takes the original function and its arguments."""

    def put_in(self) -> AbstractContextManager[Any]:
        original = getattr(self.owner, self.attribute)
        if isinstance(original, property):
            return patch.object(self.owner, self.attribute, property(partial(self.replacement, original.fget)))

        def faulty(*args: Any, **kwargs: Any) -> Any:  # binds to an object, as a partial does not
            return self.replacement(original, *args, **kwargs)

        return patch.object(self.owner, self.attribute, faulty)


FAULTS: dict[str, Fault] = {}


def fault(summary: str, owner: Any, attribute: str, *rows: Row) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated replacement of a function under its own name."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        name = replacement.__name__.replace("_", "-")
        FAULTS[name] = Fault(summary, owner, attribute, rows, replacement)
        return replacement

    return register


def one_at_a_time(
    before: Callable[[StepRunner], Any], run: Any, runner: StepRunner, step: int, batches: Any, valid_tokens: Tensor
) -> Tensor:
    """Run micro-batches one by one instead of all at once, with a change before each."""
    total = 0.0 * valid_tokens
    for batch in batches:
        before(runner)
        total = total + run(runner, step, [batch], valid_tokens)
    return total
