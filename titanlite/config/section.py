"""What a section of the config is, and the types that its keys share."""

from typing import Annotated, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titanlite.config.stages import Schedule

MOST = 2**31 - 1
"""The largest whole number of any key: libraries in C take no larger one."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""At most a year; a clock in C++ overflows at more."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
OrNone = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
OrEmpty = BeforeValidator(lambda value: [] if value == "none" else value)  # TorchTitan's default
AnyCase = BeforeValidator(
    lambda value: next((x for x in get_args(Schedule) if x.lower() == str(value).lower()), value)
)


class Only:
    """The keys (true, not 0, not empty) and conditions of needs.py without which a key has no
    effect.
    """

    def __init__(self, *needs: str) -> None:
        self.needs = needs


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable, docstrings as
    descriptions.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    only: ClassVar[Only] = Only()
    """Of all keys that do not declare their own."""
