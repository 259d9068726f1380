"""Compare a folder's config.json with a model: no tensor's shape shows heads, epsilons or wavelengths.

A key that the file lacks counts as transformers' default, which the model declares. A key that the model does not
know is refused unless it is switched off or known to change no value.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titanlite.errors import UserError, first_line
from titanlite.registry import HuggingFace
from titanlite.runtime import store

_NEUTRAL = {"is_causal": True, "partial_rotary_factor": 1.0}
"""Keys of any model, with the only value that our models compute."""
_HARMLESS = """
    _* *_implementation *_token_id architectures auto_map torch_dtype dtype *transformers* unsloth* is_llama_config
    *_name_or_path *dropout* *_pdrop initializer_range init_std pretraining_tp gradient_checkpointing use_cache n_ctx
    chunk_size_feed_forward *return_dict* output_* id2label label2id num_labels problem_type finetuning_task summary_*
    task_specific_params predict_special_tokens tokenizer_class model_max_length max_sequence_length seq_length
    reorder_and_upcast_attn max_length min_length do_sample early_stopping num_beams num_beam_groups temperature top_k
    top_p typical_p repetition_penalty length_penalty num_return_sequences
""".split()
"""Patterns of keys that change no value which the weights compute: metadata, training, and how text is generated."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    path = folder / "config.json"
    if not store.exists(path):
        raise UserError(
            f"{folder} has no config.json: nothing says which heads, epsilon or wavelengths its weights need"
        )
    try:
        config = json.loads(store.read(path))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a valid config.json: {first_line(error)}") from None
    return config


def complete(config: Mapping[str, Any], hf: HuggingFace) -> dict[str, Any]:
    """Return a config.json with transformers' defaults for the keys that it lacks or that are null."""
    given = {key: value for key, value in _one_form_of_rope(config).items() if value is not None}
    try:
        defaults = hf.defaults(given)
    except (TypeError, ValueError, ZeroDivisionError):  # a value of another type, which the comparison names
        defaults = hf.defaults({})
    return {**_NEUTRAL, **defaults, **given}


def config_faults(config: Mapping[str, Any], hf: HuggingFace, model: Mapping[str, Any]) -> list[str]:
    """Return where a config.json contradicts the one that the model would have."""
    theirs, ours, faults = complete(config, hf), complete(model, hf), []
    given = _one_form_of_rope(config)
    known = (theirs.keys() | ours.keys()) - {"architectures", *hf.unchecked_config_keys}
    for key in sorted(known):
        value = json.dumps(theirs.get(key))
        if key in ours or key in model:
            if theirs.get(key) != ours.get(key):
                lacks = " (absent, so transformers' default)" if given.get(key) is None and key in theirs else ""
                faults.append(f"config.json: {key} {value}{lacks}, but the model has {json.dumps(ours.get(key))}")
        elif theirs[key] and not any(fnmatchcase(key, pattern) for pattern in _HARMLESS):
            faults.append(
                f"config.json: {key} {value}, which the model does not know; remove it if no value needs it"
            )
    return faults


def _one_form_of_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys as transformers 4 writes them; transformers 5 has one table."""
    config = dict(config)
    tables = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    rope = tables[0] or tables[1] or {}
    if not isinstance(rope, dict):
        return {**config, "rope_scaling": rope}
    rope = dict(rope)
    kind = rope.pop("rope_type", rope.pop("type", None))
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if kind != "default" and (kind or rope):
        config["rope_scaling"] = {"rope_type": kind, **rope}
    return config
