"""The base of the config's sections, types shared by keys, and how a key declares its needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titanlite.config.layout import Batch, Layout
from titanlite.config.stages import Schedule

MOST = 2**31 - 1
"""The largest whole number of any key, since C libraries accept no larger one."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""At most a year; longer times overflow a C++ clock."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
OrNone = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
OrEmpty = BeforeValidator(lambda value: [] if value == "none" else value)  # TorchTitan's default
AnyCase = BeforeValidator(
    lambda value: next((x for x in get_args(Schedule) if x.lower() == str(value).lower()), value)
)


@dataclass(frozen=True)
class Condition:
    """Something that a config has or lacks."""

    lack: str
    """Its absence, in words."""
    holds: Callable[[Section], bool]
    key: str = ""
    """The key that must be set (true, not 0 or not empty), if that is the condition."""


@dataclass(frozen=True)
class MeshCondition:
    """Something that a job has or lacks on its mesh."""

    lack: str
    """Its absence, in words."""
    holds: Callable[[Section, Layout, Batch], bool]
    by_ranks: bool = True
    """Whether it depends on the number of ranks."""
    key: str = ""


class Needs:
    """What a key needs to have an effect: other keys, and conditions of needs.py.

    If a key is set and a need is not met, the run reports the key and continues with its default.
    A key that asks for other numbers, or for a load or a save that would not happen, is refused
    instead; its need has a `why` that names what would be missing. --help and docs/config.md list
    all needs.
    """

    def __init__(self, *needs: str | Condition | MeshCondition, why: str = "") -> None:
        self.conditions = [_of_key(need) if isinstance(need, str) else need for need in needs]
        self.why = why


def value_of(config: Section, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def _of_key(key: str) -> Condition:
    return Condition(f"without {key}", lambda config: bool(value_of(config, key)), key)


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable, docstrings as
    descriptions.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    needs: ClassVar[Needs] = Needs()
    """The needs of all keys that do not declare their own."""
