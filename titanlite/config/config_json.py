"""A Hugging Face folder's config.json: the flavor it describes, and where it contradicts a model.

It matters because tensor shapes reveal neither heads nor epsilons nor wavelengths.

A key missing from the file has transformers' default, which the model declares. A key that the
model does not know is refused unless it is switched off or listed as harmless."""

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titanlite.config.schema import JobConfig, nested
from titanlite.errors import UserError, first_line, some_of
from titanlite.registry import HuggingFace, ModelSpec, get_model, model_names

_NEUTRAL = {"is_causal": True, "partial_rotary_factor": 1.0}
"""Keys of any model, with the only value that our models compute."""
_HARMLESS = """
    _* *_implementation *_token_id architectures auto_map torch_dtype dtype *transformers* unsloth*
    is_llama_config *_name_or_path *dropout* *_pdrop initializer_range init_std pretraining_tp
    gradient_checkpointing use_cache n_ctx chunk_size_feed_forward *return_dict* output_* id2label
    label2id num_labels problem_type finetuning_task summary_* task_specific_params
    predict_special_tokens tokenizer_class model_max_length max_sequence_length seq_length
    reorder_and_upcast_attn max_length min_length do_sample early_stopping num_beams
    num_beam_groups temperature top_k top_p typical_p repetition_penalty length_penalty
    num_return_sequences
""".split()
"""Patterns of keys that do not change what the weights compute: metadata, and settings of training
and generation.
"""


def read_flavor(config: JobConfig, name_is_given: bool) -> tuple[str, dict[str, Any]]:
    """Return the config.json that `model.flavor hf` reads, and the keys that its folder sets, as
    tables.

    These are the fields of a flavor, the model's name (if one is given, it must match), and the
    tokenizer if the folder has one. If the folder is checkpoint.initial_load_path, its weights are
    loaded. Both are empty if the config has all fields already, like that of an earlier run."""
    try:
        spec = get_model(config.model.name, config.model.package)
    except UserError:
        return "", {}  # a rule reports it
    if "hf" in spec.flavors:
        return "", {}
    paths = {"checkpoint.initial_load_path": config.checkpoint.initial_load_path}
    paths["model.hf_assets_path"] = config.model.hf_assets_path
    with_config = []
    for key, path in paths.items():
        if path and (Path(path) / "config.json").is_file():
            with_config.append(key)
    folder = Path(paths[with_config[0]]) if with_config else None
    if folder and not name_is_given:
        spec = get_model(model_of(folder))
    if not (spec.hf and (spec.hf.fields or spec.hf.conversions)):
        return "", {}
    if folder is None and spec.hf.conversions and config.model.overrides:
        return "", {}
    if folder is None:
        fields = dataclasses.fields(type(next(iter(spec.flavors.values()))))
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if required <= config.model.overrides.keys():
            return "", {}
        why = f"needs a folder with config.json in {' or '.join(paths)}"
        for key, path in paths.items():
            if path:
                has = "has none" if os.path.exists(path) else "does not exist"
                why += f'; {key} = "{path}" {has}'
        raise UserError(why)
    found: dict[str, Any] = {"model": {"name": spec.name, "overrides": _fields(folder, spec)}}
    if (folder / "tokenizer.json").is_file():
        found["model"]["hf_assets_path"] = str(folder)
    if with_config[0] == "checkpoint.initial_load_path":
        found["checkpoint"] = {"initial_load_in_hf": True}
    return str(folder / "config.json"), found


def _fields(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of the flavor that a folder's config.json describes; refuse features that
    the model lacks.
    """
    assert spec.hf
    given = read_config(folder)
    path = folder / "config.json"
    if spec.hf.conversions:
        return given
    if given.get("model_type") not in _model_types(spec):
        name = model_of(folder)
        raise UserError(
            f'{path} describes a {name}, but model.name is "{spec.name}"; use --model.name {name}'
        )
    theirs = complete(given, spec.hf)
    found = {field: _value(theirs, key) for field, key in spec.hf.fields.items()}
    fields = nested({field: value for field, value in found.items() if value is not None})
    try:
        faults = config_faults(given, spec.hf, spec.hf.config(spec.configure("hf", fields)))
    except UserError as error:
        words = ", ".join(
            f"{field} is {key}" for field, key in spec.hf.fields.items() if field in str(error)
        )
        faults = [f"{error} ({words} there)" if words else str(error)]
    if faults:
        raise UserError(f"{path} has features that {spec.name} does not compute:{some_of(faults)}")
    return fields


def model_of(folder: Path) -> str:
    """Return the name of the registered model that a folder's config.json describes."""
    kind = read_config(folder).get("model_type")
    kinds = list[str]()
    for name in model_names():
        with suppress(UserError):  # another package's model may be broken
            known = _model_types(get_model(name))
            kinds += known
            if kind in known:
                return name
    legal = ", ".join(kinds)
    what = f"{folder / 'config.json'}: model_type {json.dumps(kind)}, which no registered model has"
    raise UserError(f"{what}; legal: {legal}")


def _model_types(spec: ModelSpec) -> list[str]:
    """Return every model_type that this model's flavors can have, such as qwen3 and qwen3_moe."""
    if not spec.hf or spec.hf.conversions:  # would import all of transformers
        return []
    configs = map(spec.hf.config, spec.flavors.values())
    return [*dict.fromkeys(config["model_type"] for config in configs if "model_type" in config)]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _overrides(
    key: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], hf: HuggingFace
) -> str:
    """Return the overrides that give the model the values of a config.json key, as a hint."""
    options = []
    for field, dotted in hf.fields.items():
        value = _value(theirs, dotted)
        is_inside = f"{dotted}.".startswith(f"{key}.")
        if is_inside and value not in (None, _value(ours, dotted)):
            options.append(shlex.join([f"--model.overrides.{field}", json.dumps(value)]))
    return f"; {' '.join(options)}" if options else ""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    if not path.exists():
        hint = ""
        if (folder / "config.toml").exists():
            hint = " (it is titanlite's: use it as checkpoint.initial_load_path)"
        raise UserError(
            f"{folder} has no config.json{hint}: nothing says which heads, "
            "epsilon or wavelengths its weights need"
        )
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a valid config.json: {first_line(error)}") from None
    return config


def complete(config: Mapping[str, Any], hf: HuggingFace) -> dict[str, Any]:
    """Return a config.json with transformers' defaults for keys that are missing or null."""
    given = {}
    for key, value in _one_form_of_rope(config).items():
        if value is not None:
            given[key] = value
    try:
        defaults = hf.defaults(given)
    # A value has the wrong type, which the comparison reports.
    except (TypeError, ValueError, ZeroDivisionError):
        defaults = hf.defaults({})
    return {**_NEUTRAL, **defaults, **given}


def config_faults(
    config: Mapping[str, Any], hf: HuggingFace, model: Mapping[str, Any]
) -> list[str]:
    """Return where a config.json contradicts the one that the model would have."""
    theirs = complete(config, hf)
    ours = complete(model, hf)
    faults = []
    given = _one_form_of_rope(config)
    known = (theirs.keys() | ours.keys()) - {"architectures", *hf.unchecked_config_keys}
    for key in sorted(known):
        is_harmless = any(fnmatchcase(key, pattern) for pattern in _HARMLESS)
        if hf.conversions and is_harmless:
            continue
        value = json.dumps(theirs.get(key))
        if key in ours or key in model:
            if theirs.get(key) != ours.get(key):
                lacks = ""
                if given.get(key) is None and key in theirs:
                    lacks = " (absent, so transformers' default)"
                remedy = _overrides(key, theirs, ours, hf)
                faults.append(
                    f"config.json: {key} {value}{lacks}, "
                    f"but the model has {json.dumps(ours.get(key))}{remedy}"
                )
        elif theirs[key] and not is_harmless:
            faults.append(
                f"config.json: {key} {value}, which the model does not know; "
                "remove it if no value needs it"
            )
    return faults


def _one_form_of_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys as transformers 4 writes them; transformers 5 has one table."""
    config = dict(config)
    scaling = config.pop("rope_scaling", None)
    parameters = config.pop("rope_parameters", None)
    rope = scaling or parameters or {}
    if not isinstance(rope, dict):
        return {**config, "rope_scaling": rope}
    rope = dict(rope)
    kind = rope.pop("rope_type", rope.pop("type", None))
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if kind != "default" and (kind or rope):
        config["rope_scaling"] = {"rope_type": kind, **rope}
    return config
