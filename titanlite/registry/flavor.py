"""The config of a flavor with some fields replaced; all faults are reported."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from titanlite.errors import UserError, nearest


def configured(
    model: str,
    flavors: Mapping[str, Any],
    flavor: str,
    overrides: Mapping[str, Any],
    reads_folders: bool,
) -> Any:
    """Return the config of a model's flavor with some fields replaced; an error names all that do
    not fit.

    A model that reads Hugging Face folders has the flavor "hf".
    """
    from pydantic import ValidationError

    legal = [*flavors]
    if reads_folders:  # with flavor hf, the overrides have all fields
        legal.append("hf")
    if flavor not in legal:
        close = nearest(flavor, legal)
        hint = f'did you mean "{close}"? ' if close else ""
        raise UserError(f'unknown flavor "{flavor}" of {model}; {hint}legal: {", ".join(legal)}')
    base = flavors.get(flavor)
    unknown = list[str]()
    cls = type(base or next(iter(flavors.values())))
    values = _merged(cls, base and dataclasses.asdict(base), overrides, "", unknown)
    if unknown:
        raise UserError(f"{model} has no field {', '.join(unknown)}")
    try:
        return _adapter(cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        messages = []
        for each in error.errors():
            message = each["msg"]
            if each["loc"]:
                message = f"{'.'.join(map(str, each['loc']))}: {message}"
            messages.append(message)
        faults = "; ".join(messages)
        faults = faults.replace("Value error, ", "").replace("Input should be", "must be")
        # pydantic prints 1e-30 with thirty digits.
        faults = re.sub(r"0\.0{9,}\d+", lambda number: f"{float(number[0]):g}", faults)
        raise UserError(faults) from None


@cache
def _adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _merged(
    cls: Any, base: Any, overrides: Mapping[str, Any], path: str, unknown: list[str]
) -> dict[str, Any]:
    """Return a dataclass's fields with some replaced, individually in nested dataclasses."""
    known = [field.name for field in dataclasses.fields(cls)]
    types = get_type_hints(cls)
    values = dict(base or {})
    for name, value in overrides.items():
        nested = []
        for t in (types.get(name), *get_args(types.get(name))):
            if dataclasses.is_dataclass(t):
                nested.append(t)
        if name not in known:
            hint = f"nearest: {nearest(name, known) or 'none'}; known: {', '.join(known)}"
            unknown.append(f"{path}{name} ({hint})")
        elif nested and isinstance(value, Mapping):
            values[name] = _merged(nested[0], values.get(name), value, f"{path}{name}.", unknown)
        else:
            values[name] = value
    return values
