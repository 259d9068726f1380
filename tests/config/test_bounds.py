"""Every number of a config has bounds: a value is refused by name, read as it is, or named as
without effect.
"""

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import pytest

from titanlite.config.job import Job, job_from
from titanlite.config.legal import legal
from titanlite.config.load import CommandLine, ConfigError
from titanlite.config.schema import KEYS, Mixture, value_of
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
    try:
        return job_from(
            CommandLine(files=["debug.toml"], overrides=overrides), world=None, training=True
        ), ""
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
    assert [
        name for name, info in Mixture.model_fields.items() if info.annotation in (int, float)
    ] == ["weight"]
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


FIELDS = [
    (name, flavor, field, is_whole)
    for name, flavor in (("llama3", "debugmodel"), ("gpt2", "debugmodel"), ("qwen3", "debugmodel"))
    + (("qwen3", "debugmodel_moe"), ("llama3", "8B"))
    for field, is_whole in numbers_in(type(get_model(name).flavors[flavor])).items()
]


def test_the_walk_of_models_has_the_fields_of_their_tables():
    assert ("llama3", "8B", "rope_scaling.factor", False) in FIELDS


@pytest.mark.parametrize(("model", "flavor", "field", "is_whole"), FIELDS)
def test_a_field_of_a_model_refuses_numbers_outside_of_its_bounds_by_name(
    model, flavor, field, is_whole
):
    for value in VALUES:
        job, message = attempt(
            {"model.name": model, "model.flavor": flavor, f"model.overrides.{field}": value}
        )
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or value < 0 or (is_whole and value in (1e-300, 1_000_000_000_000)):
            assert "model.overrides" in message and field in message, f"{value} is accepted"
        elif job:
            found = job.model
            for name in field.split("."):
                found = getattr(found, name)
            assert found == value, f"{value} is ignored"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"model.overrides.rope_theta": 0},
            "rope_theta: must be greater than or equal to 0.000001",
        ),
        (
            {"model.overrides.rope_scaling.factor": -1.0},
            "factor: must be greater than or equal to 0.000001",
        ),
        ({"model.name": "qwen3", "model.overrides.top_k": 2}, "top_k: no effect without experts"),
        (
            {"fault.spike_sigma": 3.0, "fault.spike_window": 300},
            "and the run has 300; legal: 2 to 299",
        ),
        (
            {"lr_scheduler.decay_ratio": 1e-9},
            "rounds to no steps of decay, of 300; legal: 0.0 for no decay, or",
        ),
        ({"optimizer.eps": 1e-300}, "must be a number >= 1e-30"),
        (
            {"model.name": "llama4", "training.foo": 0},
            "2 configuration errors; nothing was started\n  training.foo = 0",
        ),
        ({"model.name": "llama4"}, 'registered as "llama4"; known: '),
        ({"comm.train_timeout_seconds": 15, "training.dataset": "c4_test"}, ""),
        ({"debug.seed": 2**64}, ""),
    ],
)
def test_a_value_that_could_never_act_is_refused_and_a_default_is_not(overrides, says):
    _, message = attempt(overrides)
    assert says in message and bool(says) == bool(message), message


MOE = {"model.name": "qwen3", "model.flavor": "debugmodel_moe"}
PP = "parallelism.pipeline_parallel_"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            MOE | {"model.overrides.hidden_dim": 64},
            "where all layers have experts: model.overrides.hidden_dim",
        ),
        (MOE, ""),
        ({"model.name": "qwen3", "model.overrides.hidden_dim": 64}, ""),
        (
            {"fault.spike_sigma": 4.0, "training.steps": 128},
            "no effect: fault.spike_sigma, since a step is judged af",
        ),
        ({"fault.spike_sigma": 4.0, "training.steps": 129}, ""),
        ({f"{PP}degree": 6}, "stages 0, 5 of 6 have none of the 4 layers"),
        ({f"{PP}degree": 2}, ""),
    ],
)
def test_what_is_legal_and_has_no_effect_or_no_use_is_named_at_the_start(overrides, says):
    job, message = attempt({"validation.enable": True, "generate.at_end": True, **overrides})
    assert job, message
    assert says in "\n".join(job.remarks) and bool(says) == bool(job.remarks), job.remarks
