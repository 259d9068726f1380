"""Every number of a config has bounds: a value outside of them is refused by name, never by a traceback or later."""

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from titanlite.config.job import job_from
from titanlite.config.legal import legal
from titanlite.config.load import CommandLine, ConfigError
from titanlite.config.schema import KEYS
from titanlite.registry import get_model

VALUES = (-1, 0, 1e-300, 1_000_000_000_000, math.nan, math.inf, -math.inf, "word", [1], {"a": 1})
TAKES_ANY_WHOLE_NUMBER = {"debug.seed"}
MAY_BE_INFINITE = {"training.max_norm"}
NUMBERS = {
    key: words
    for key, info in KEYS.items()
    if "number" in (words := legal(info.annotation, info.metadata)) and "list" not in words
}


def refusal(overrides: dict[str, Any]) -> str:
    """Return the message with which the debug config with these values is refused; an empty string if it is not."""
    try:
        job_from(CommandLine(files=["debug.toml"], overrides=overrides), world=None, training=True)
    except ConfigError as error:
        return str(error)
    return ""


def is_outside(words: str, value: Any, unbounded: bool, infinite: bool) -> bool:
    """Return whether no reading of a key's legal values allows a value."""
    if not isinstance(value, int | float):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return not (infinite and value > 0)
    is_whole = "a whole number" in words
    if value == 1_000_000_000_000:
        return is_whole and not unbounded
    if value == 1e-300:
        return is_whole
    return value < 0 and "-1" not in words


@pytest.mark.parametrize("key", NUMBERS)
def test_a_key_refuses_numbers_outside_of_its_bounds_by_name(key):
    for value in VALUES:
        message = refusal({key: value})
        if is_outside(NUMBERS[key], value, key in TAKES_ANY_WHOLE_NUMBER, key in MAY_BE_INFINITE):
            assert key in message, f"{value} is accepted"


def fields() -> list[tuple[str, str, bool]]:
    """Return every field of a model that takes a number: the model's name, the field, and whether it is whole."""
    found = []
    for name in ("llama3", "gpt2", "qwen3"):
        flavor = next(iter(get_model(name).flavors.values()))
        types = get_type_hints(type(flavor))
        numbers = [(each.name, types[each.name]) for each in dataclasses.fields(flavor)]
        found += [(name, field, kind is int) for field, kind in numbers if kind in (int, float)]
    return found


@pytest.mark.parametrize(("model", "field", "is_whole"), fields())
def test_a_field_of_a_model_refuses_numbers_outside_of_its_bounds_by_name(model, field, is_whole):
    for value in VALUES:
        message = refusal({"model.name": model, "model.flavor": "debugmodel", f"model.overrides.{field}": value})
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or value < 0 or (is_whole and value in (1e-300, 1_000_000_000_000)):
            assert "model.overrides" in message and field in message, f"{value} is accepted"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"model.overrides.rope_theta": 0}, "rope_theta: must be greater than 0"),
        ({"model.overrides.rope_scaling.factor": -1.0}, "factor: must be greater than 0"),
        ({"model.name": "qwen3", "model.overrides.top_k": 2}, "top_k: no effect without experts"),
        ({"fault.spike_sigma": 3.0, "fault.spike_window": 300}, "and the run has 300; legal: 2 to 299"),
        ({"lr_scheduler.decay_ratio": 1e-9}, "rounds to no steps of decay, of 300; legal: 0.0 for no decay, or"),
        ({"model.name": "llama4", "training.foo": 0}, "1 configuration error; nothing was started\n  model.name ="),
        ({"model.name": "llama4"}, 'registered as "llama4"; known: gpt2, llama3, qwen3'),
        ({"comm.train_timeout_seconds": 15, "training.dataset": "c4_test"}, ""),
    ],
)
def test_a_value_that_could_never_act_is_refused_and_a_default_is_not(overrides, says):
    message = refusal(overrides)
    assert says in message and bool(says) == bool(message), message
