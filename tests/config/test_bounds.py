"""Every number of a config has bounds: a value is refused by name, read as it is, or named as
without effect.
"""

import dataclasses
import math
from operator import attrgetter
from typing import Any, get_args, get_type_hints

import pytest

from titanlite.config.job import Job, job_from
from titanlite.config.legal import legal
from titanlite.config.load import CommandLine, ConfigError
from titanlite.config.schema import KEYS, MixtureEntry
from titanlite.config.section import value_of
from titanlite.registry import get_model

VALUES = (-1, 0, 1e-300, 1_000_000_000_000, math.nan, math.inf, -math.inf, "word", [1], {"a": 1})
TAKES_ANY_WHOLE_NUMBER = {"debug.seed"}
MAY_BE_INFINITE = {"training.max_norm"}
WORDS = {key: legal(info.annotation, info.metadata) for key, info in KEYS.items()}
NUMBERS = {key: words for key, words in WORDS.items() if "number" in words and "list" not in words}


def attempt(overrides: dict[str, Any]) -> tuple[Job | None, str]:
    """Return the job of the debug config with these values, or the message with which it is
    refused.
    """
    line = CommandLine(files=["debug.toml"], overrides=overrides)
    try:
        return job_from(line, world=None, training=True), ""
    except ConfigError as error:
        return None, str(error)


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


def test_the_walk_has_every_key_that_is_no_switch_text_or_list():
    kinds = ("true or false", "text", "a list of ", "one of ", "a table")
    others = {
        key for key, words in WORDS.items() if words.startswith(kinds) and "number" not in words
    }
    assert NUMBERS.keys() == KEYS.keys() - others - {"training.mixture"}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_key_refuses_numbers_outside_of_its_bounds_by_name_and_ignores_none(key):
    for value in VALUES:
        job, message = attempt({key: value})
        if is_outside(NUMBERS[key], value, key in TAKES_ANY_WHOLE_NUMBER, key in MAY_BE_INFINITE):
            assert key in message, f"{value} is accepted"
        elif job:
            assert value_of(job.config, key) == value or key in "\n".join(job.remarks), (
                f"{value} is ignored"
            )
        else:
            assert message.count("\n  ") and "Traceback" not in message


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_weight_in_a_mixture_is_refused_outside_of_its_bounds(value):
    fields = MixtureEntry.model_fields.items()
    assert [name for name, info in fields if info.annotation in (int, float)] == ["weight"]
    _, message = attempt({"training.mixture": [{"dataset": "python-stdlib", "weight": value}]})
    assert "training.mixture" in message and ("weight" in message or "multiples" in message), (
        message
    )


def numbers_in(cls: type, path: str = "") -> dict[str, bool]:
    """Return the fields of a flavor that take a number, those of its tables too, and whether it is
    whole.
    """
    found = {}
    for name, kind in get_type_hints(cls).items():
        kinds = {kind, *get_args(kind)}
        tables = [each for each in kinds if dataclasses.is_dataclass(each)]
        if kinds & {int, float}:
            found[path + name] = int in kinds
        elif tables:
            found |= numbers_in(tables[0], f"{path}{name}.")
    return found


FLAVORS = [("llama3", "8B"), ("gpt2", "debugmodel"), ("qwen3", "debugmodel_moe")]
FIELDS = [
    (name, flavor, field, is_whole)
    for name, flavor in FLAVORS
    for field, is_whole in numbers_in(type(get_model(name).flavors[flavor])).items()
]


def test_the_walk_of_models_has_the_fields_of_their_tables():
    assert ("llama3", "8B", "rope_scaling.factor", False) in FIELDS


@pytest.mark.parametrize(("model", "flavor", "field", "is_whole"), FIELDS)
def test_a_field_of_a_model_refuses_numbers_outside_of_its_bounds_by_name(
    model, flavor, field, is_whole
):
    for value in VALUES:
        key = f"model.overrides.{field}"
        job, message = attempt({"model.name": model, "model.flavor": flavor, key: value})
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or value < 0 or (is_whole and value in (1e-300, 1_000_000_000_000)):
            assert "model.overrides" in message and field in message, f"{value} is accepted"
        elif job:
            assert attrgetter(field)(job.model_config) == value, f"{value} is ignored"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"model.overrides.rope_theta": 0}, "0.000001"),
        ({"model.name": "qwen3", "model.overrides.top_k": 2}, "top_k: no effect"),
        ({"lr_scheduler.decay_ratio": 1e-9}, "of 300; legal: 0.0"),
        ({"optimizer.eps": 1e-300}, "a number >= 1e-30"),
        ({"comm.train_timeout_seconds": 15, "training.dataset": "c4_test"}, ""),
        ({"debug.seed": 2**64}, ""),
    ],
)
def test_a_value_that_could_never_act_is_refused_and_a_default_is_not(overrides, part):
    _, message = attempt(overrides)
    assert part in message and bool(part) == bool(message), message


MOE = {"model.name": "qwen3", "model.flavor": "debugmodel_moe"}
HIDDEN = {"model.overrides.hidden_dim": 64}
STAGES = "parallelism.pipeline_parallel_degree"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (MOE | HIDDEN, "model.overrides.hidden_dim"),
        (MOE, ""),
        (HIDDEN | {"model.name": "qwen3"}, ""),
        ({"fault.spike_sigma": 4.0, "training.steps": 128}, "steps: fault.spike_sigma"),
        ({"fault.spike_sigma": 4.0, "training.steps": 129}, ""),
        ({STAGES: 6}, "stages 0, 5 of 6"),
        ({STAGES: 2}, ""),
    ],
)
def test_what_is_legal_and_has_no_effect_or_no_use_is_named_at_the_start(overrides, part):
    job, message = attempt({"validation.enable": True, "generate.at_end": True, **overrides})
    assert job, message
    assert part in "\n".join(job.remarks) and bool(part) == bool(job.remarks), job.remarks
