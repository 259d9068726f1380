"""Weights between titanlite's names and those of a Hugging Face folder, as the model's table says; no files here.

What is wanted here is a box of a tensor, a rank's shard; `read_box` asks for no more over there than the steps need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError
from titanlite.parallel.build import build_meta_model
from titanlite.registry import Box, HuggingFace, ModelSpec, WeightTransform

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Output:
    """A tensor over there, and how it is made of what is here."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    via: tuple[WeightTransform, ...] = ()
    dim: int = 0

    def made_of(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return make(weights, self.via, self.dim).to(self.dtype).contiguous()


def make(weights: Sequence[torch.Tensor], via: Sequence[WeightTransform], dim: int) -> torch.Tensor:
    """Weights after the steps to their form over there, joined where there are several."""
    for step in via:
        weights = [step.to_hf(weight) for weight in weights]
    return torch.cat(list(weights), dim) if len(weights) > 1 else weights[0]


def require_hf_spec(spec: ModelSpec) -> HuggingFace:
    """The model's form over there; an error where it has none."""
    if spec.hf is None:
        raise UserError(
            f"{spec.name} has no Hugging Face names: its ModelSpec has no hf. To write plain safetensors by its own "
            "names: titanlite checkpoint export --format safetensors"
        )
    return spec.hf


class Translation:
    """Names, shapes and steps of a model here and over there. An error where the model has no form there."""

    def __init__(self, spec: ModelSpec, flavor: Any) -> None:
        self.hf = require_hf_spec(spec)
        self.config = self.hf.config(flavor)
        model, self.table = build_meta_model(spec, flavor)
        parameters = dict(model.named_parameters())
        kept = model.state_dict().keys()
        faults = [f"{name}: the table has no name for it" for name, rule in self.table.items() if not rule.hf]
        faults += [f"{name}: no table names a buffer" for name, _ in model.named_buffers() if name in kept]
        if faults:
            raise UserError(f"{spec.name} can't be written for Hugging Face:\n  " + "\n  ".join(faults))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    def outputs(self, dtype: torch.dtype) -> list[Output]:
        """Every tensor over there, in the model's order."""
        parts: dict[str, dict[int, str]] = {}
        for name, rule in self.table.items():
            parts.setdefault(rule.hf_name(name), {})[rule.part.index if rule.part else 0] = name
        found = []
        for there, names in parts.items():
            rule, ordered = self.table[names[0]], tuple(names[i] for i in range(len(names)))
            assert len(names) == (rule.part.of if rule.part else 1), f"the table lacks parts of {there}"
            dim = rule.part.dim if rule.part else 0
            example = make([torch.empty(self.shapes[n], device="meta") for n in ordered], rule.via, dim)
            found.append(Output(there, ordered, tuple(example.shape), dtype, rule.via, dim))
        return found

    def read(self, name: str, box: Box | None, read: Read) -> torch.Tensor:
        """A box of the tensor `name`, or all of it."""
        rule, shape = self.table[name], self.shapes[name]
        there, part = rule.hf_name(name), rule.part

        def read_part(wanted: Box, size: Sequence[int]) -> torch.Tensor:
            if part:
                first = part.index * size[part.dim]
                moved = slice(first + wanted[part.dim].start, first + wanted[part.dim].stop)
                wanted = (*wanted[: part.dim], moved, *wanted[part.dim + 1 :])
            return read(there, wanted)

        return read_box(read_part, rule.via, box or tuple(slice(0, size) for size in shape), shape)


Read = Callable[[str, Box], torch.Tensor]
"""Reads a box of a tensor over there, by its name."""


def read_box(
    read: Callable[[Box, Sequence[int]], torch.Tensor], via: Sequence[WeightTransform], box: Box, shape: Sequence[int]
) -> torch.Tensor:
    """A box of a tensor of this shape here, by reading what its steps need over there.

    `read` is given the box there, and the shape of all of it.
    """
    if not via:
        return read(box, shape)
    there, here, step = via[0].source_region(box, shape)
    shape_there = via[0].to_hf(torch.empty(tuple(shape), device="meta")).shape
    found = step.from_hf(read_box(read, via[1:], there, shape_there))
    return found[tuple(slice(b.start - h.start, b.stop - h.start) for b, h in zip(box, here, strict=True))]


def documents(config: Mapping[str, Any], dtype: torch.dtype, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files beside the tensors: config.json, generation_config.json, and what the tokenizer has."""
    end = tokenizer.end if tokenizer else None
    ids = {"bos_token_id": end, "eos_token_id": end}  # here a document begins after the end of another
    found: dict[str, Any] = {
        "config.json": {**config, **ids, "torch_dtype": str(dtype).removeprefix("torch.")},
        "generation_config.json": ids,
    }
    files = {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in found.items()}
    if tokenizer and tokenizer.assets:
        assets = [Path(tokenizer.assets) / name for name in TOKENIZER_FILES]
        files |= {path.name: path.read_bytes() for path in assets if path.is_file()}
    return files


def config_faults(config: Mapping[str, Any], translation: Translation) -> list[str]:
    """What a config.json says otherwise than the model: shapes do not show heads, epsilons or wavelengths."""
    theirs, found = _in_old_words(config), []
    for key, value in translation.config.items():
        if key in ("architectures", *translation.hf.unchecked_config_keys) or key not in theirs:
            continue
        if theirs[key] != value:
            found.append(f"config.json: {key} {json.dumps(theirs[key])}, {json.dumps(value)} here")
    return found


def _in_old_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes the wavelengths' numbers as one table."""
    found = dict(config)
    if isinstance(rope := found.pop("rope_parameters", None), dict):
        rope = dict(rope)
        found["rope_theta"] = rope.pop("rope_theta", found.get("rope_theta"))
        found["rope_scaling"] = rope
    if isinstance(scaling := found.get("rope_scaling"), dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        values = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
        found["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **values}
    return found
