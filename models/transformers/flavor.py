"""The flavors of transformers' models: the content of a config.json."""

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any


def flavor_of(values: Mapping[str, Any]) -> Any:
    """Return a config.json's content as a flavor, whose fields are its keys."""
    cls = make_dataclass("Flavor", [(key, Any) for key in values], frozen=True)
    return cls(**values)
