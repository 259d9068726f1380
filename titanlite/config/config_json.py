"""A Hugging Face folder's config.json: the flavor it describes, and where it contradicts a model.

No tensor's shape shows heads, epsilons or wavelengths.

A key that the file lacks counts as transformers' default, which the model declares. A key that the
model lacks is refused unless it is switched off or is listed as one that changes no value."""

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
"""Patterns of keys that change no value which the weights compute: metadata, training, and how text
is generated.
"""


def read_flavor(config: JobConfig, name_is_given: bool) -> tuple[str, dict[str, Any]]:
    """Return the config.json that `model.flavor hf` reads, and the tables of keys that its folder
    gives.

    The fields of a flavor; the model's name, unless one is given, which must then be the same; the
    tokenizer, if the folder has one. If it is checkpoint.initial_load_path, its weights are loaded.
    Nothing if the config has all fields already, as that of an earlier run."""
    try:
        spec = get_model(config.model.name, config.model.package)
    except UserError:
        return "", {}  # a rule names it
    if "hf" in spec.flavors:
        return "", {}
    paths = {"checkpoint.initial_load_path": config.checkpoint.initial_load_path}
    paths["model.hf_assets_path"] = config.model.hf_assets_path
    with_config = [
        key for key, path in paths.items() if path and (Path(path) / "config.json").is_file()
    ]
    folder = Path(paths[with_config[0]]) if with_config else None
    if folder and not name_is_given:
        spec = get_model(model_of(folder))
    if not (spec.hf and (spec.hf.fields or spec.hf.conversions)):
        return "", {}
    if folder is None and spec.hf.conversions and config.model.overrides:
        return "", {}
    if folder is None:
        fields = dataclasses.fields(type(next(iter(spec.flavors.values()))))
        if {
            f.name for f in fields if f.default is dataclasses.MISSING
        } <= config.model.overrides.keys():
            return "", {}
        given = "; ".join(
            f'{key} = "{path}" {"has none" if os.path.exists(path) else "does not exist"}'
            for key, path in paths.items()
            if path
        )
        raise UserError(
            f"needs a folder with config.json in {' or '.join(paths)}{given and f'; {given}'}"
        )
    found: dict[str, Any] = {"model": {"name": spec.name, "overrides": _fields(folder, spec)}}
    if (folder / "tokenizer.json").is_file():
        found["model"]["hf_assets_path"] = str(folder)
    if with_config[0] == "checkpoint.initial_load_path":
        found["checkpoint"] = {"initial_load_in_hf": True}
    return str(folder / "config.json"), found


def _fields(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a flavor that a folder's config.json describes; refuse features that the
    model lacks.
    """
    assert spec.hf
    given = read_config(folder)
    path = folder / "config.json"
    if spec.hf.conversions:
        return given
    if given.get("model_type") not in _model_types(spec):
        name = model_of(folder)
        raise UserError(
            f'{path} is of a {name}, and model.name is "{spec.name}"; use --model.name {name}'
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
        raise UserError(f"{path} is of a model that {spec.name} does not compute:{some_of(faults)}")
    return fields


def model_of(folder: Path) -> str:
    """Return the name of the registered model that a folder's config.json is of."""
    kind = read_config(folder).get("model_type")
    kinds = list[str]()
    for name in model_names():
        with suppress(UserError):  # of another package, which may be broken
            known = _model_types(get_model(name))
            kinds += known
            if kind in known:
                return name
    legal = ", ".join(kinds)
    what = f"{folder / 'config.json'}: model_type {json.dumps(kind)}, which no registered model has"
    raise UserError(f"{what}; legal: {legal}")


def _model_types(spec: ModelSpec) -> list[str]:
    """Return every model_type that this model's flavors can have, such as qwen3 and qwen3_moe."""
    if not spec.hf or spec.hf.conversions:  # not to import all of transformers
        return []
    configs = map(spec.hf.config, spec.flavors.values())
    return [*dict.fromkeys(config["model_type"] for config in configs if "model_type" in config)]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None without one."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _overrides(
    key: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], hf: HuggingFace
) -> str:
    """Return the overrides that give the model the value of a key of config.json, if there are
    any.
    """
    options = [
        shlex.join([f"--model.overrides.{field}", json.dumps(_value(theirs, dotted))])
        for field, dotted in hf.fields.items()
        if f"{dotted}.".startswith(f"{key}.")
        and _value(theirs, dotted) not in (None, _value(ours, dotted))
    ]
    return f"; {' '.join(options)}" if options else ""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    if not path.exists():
        hint = ""
        if (folder / "config.toml").exists():
            hint = " (a folder of titanlite's, for checkpoint.initial_load_path as it is)"
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
    """Return a config.json with transformers' defaults for the keys that it lacks or that are
    null.
    """
    given = {key: value for key, value in _one_form_of_rope(config).items() if value is not None}
    try:
        defaults = hf.defaults(given)
    # A value of another type, which the comparison names.
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
