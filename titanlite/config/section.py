"""What a section of the config is, and the types that its keys share."""

from typing import Annotated, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titanlite.config.stages import Schedule

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
OrNone = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
OrEmpty = BeforeValidator(lambda value: [] if value == "none" else value)  # TorchTitan's default
AnyCase = BeforeValidator(
    lambda value: next((x for x in get_args(Schedule) if x.lower() == str(value).lower()), value)
)


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
