"""Translate weights between a model's names and those of its Hugging Face folder, according to the
model's table.

A rank reads only the region of a tensor that its shard needs, and of the folder's tensor only the
part that the transforms need for it. `files.py` reads the files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.data.shards import TOKENIZER_FILES
from titanlite.data.tokenizer import Tokenizer, byte_files
from titanlite.errors import UserError, some_of
from titanlite.parallel.build import build_meta_model, persistent_buffers
from titanlite.registry import Box, Conversion, ModelSpec, Rule, WeightTransform, zeros
from titanlite.registry.lora import is_adapter


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder, and the parameters that it is made from."""

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    transforms: tuple[WeightTransform, ...] = ()
    dim: int = 0
    """The dimension along which several parameters are joined."""
    slice: int | None = None
    """The index in dimension 0 of the parameters, if it is made from one slice of them."""
    conversion: Conversion | None = None
    """Makes the tensor instead of transforms."""

    def build(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, made from the weights of its parameters."""
        if self.conversion:
            return self.conversion.to_hf(weights, self.name).to(self.dtype).contiguous()
        if self.slice is not None:
            weights = [weight[self.slice] for weight in weights]
        return _transform(weights, self.transforms, self.dim).to(self.dtype).contiguous()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _transform(
    weights: Sequence[torch.Tensor], transforms: Sequence[WeightTransform], dim: int
) -> torch.Tensor:
    for transform in transforms:
        weights = [transform.to_hf(weight) for weight in weights]
    if len(weights) > 1:
        return torch.cat(list(weights), dim)
    return weights[0]


class Translation:
    """Names, shapes and transforms between a model and its Hugging Face folder; raises if the model
    has no Hugging Face names.
    """

    def __init__(self, spec: ModelSpec, flavor: Any) -> None:
        if spec.hf is None:
            raise UserError(
                f"{spec.name} has no Hugging Face names: its ModelSpec has no hf. To write plain "
                "safetensors by its own names: titanlite checkpoint export --format safetensors"
            )
        self.hf = spec.hf
        self.config = spec.hf.config(flavor)
        self.conversions = spec.hf.conversions(flavor) if spec.hf.conversions else {}
        self.adapters = spec.adapters
        """Adapters to add to the weights that are written."""
        model, table = build_meta_model(spec, flavor)
        self.table = {name: rule for name, rule in table.items() if not is_adapter(name)}
        faults = [name for name, rule in self.table.items() if not rule.hf]
        if faults:
            raise UserError(f"{spec.name}: the table has no Hugging Face name of{some_of(faults)}")
        self.buffers = persistent_buffers(model)
        """Buffers in checkpoints, on the meta device, for which the folder has no names."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.kept: dict[str, torch.dtype] = {}
        """The types of tensors that are written without a cast."""
        if spec.hf.conversions:  # the folder of a class has its buffers
            self.table |= {name: Rule(name, zeros, "replicated", name) for name in self.buffers}
            for name, buffer in self.buffers.items():
                self.shapes[name] = tuple(buffer.shape)
                self.kept[name] = buffer.dtype
            self.buffers = {}

    def refuse(self, buffers: Sequence[str]) -> None:
        """Raise if there are buffers that the folder cannot have."""
        if buffers:
            raise UserError(
                f"can't be written for Hugging Face, which has no such tensors:{some_of(buffers)}\n"
                'Routers have a bias with balance = "bias". Train with balance = "sequence" or '
                '"none" instead, or write plain safetensors: '
                "titanlite checkpoint export --format safetensors"
            )

    def hf_tensors(self, dtype: torch.dtype) -> list[HFTensor]:
        """Return every tensor of the folder, in the model's order."""
        slices: dict[str, dict[int, str]] = {}
        tensors = []
        for conversion in dict.fromkeys(self.conversions.values()):
            names = conversion.parameters
            weights = [torch.empty(self.shapes[name], device="meta") for name in names]
            kept = self.kept.get(names[0], dtype)
            for hf_name in conversion.names:
                shape = tuple(conversion.to_hf(weights, hf_name).shape)
                tensors.append(HFTensor(hf_name, names, shape, kept, conversion=conversion))
        for name, rule in self.table.items():
            if name in self.conversions:
                continue
            slices.setdefault(rule.hf_name(name), {})[rule.part.index] = name
        for hf_name, names in slices.items():
            rule = self.table[names[0]]
            parameters = tuple(names[i] for i in range(len(names)))
            assert len(names) == rule.part.of, f"the table lacks parts of {hf_name}"
            examples = [torch.empty(self.shapes[n], device="meta") for n in parameters]
            numbers: Sequence[int | None] = [None]
            if "#" in hf_name:
                numbers = range(len(examples[0]))
                examples = [example[0] for example in examples]
            example = _transform(examples, rule.via, rule.part.dim)
            shape = tuple(example.shape)
            kept = self.kept.get(hf_name, dtype)
            for i in numbers:
                name = hf_name.replace("#", str(i))
                tensors.append(HFTensor(name, parameters, shape, kept, rule.via, rule.part.dim, i))
        return tensors

    def read(
        self, name: str, region: Box | None, read_hf: Callable[[str, Box], torch.Tensor]
    ) -> torch.Tensor:
        """Read a region of the parameter `name`, or all of it; `read_hf` takes a name in the folder
        and a region of that tensor.
        """
        rule = self.table[name]
        shape = self.shapes[name]
        if name in self.conversions:
            weight = self.conversions[name].from_hf(name, lambda hf_name: read_hf(hf_name, ()))
            return weight if region is None else weight[region]
        region = region or tuple(slice(0, size) for size in shape)
        hf_name = rule.hf_name(name)
        if "#" not in hf_name:
            return _read(rule, hf_name, shape, region, read_hf)
        numbers = range(region[0].start, region[0].stop)
        names = [hf_name.replace("#", str(i)) for i in numbers]
        return torch.stack([_read(rule, name, shape[1:], region[1:], read_hf) for name in names])


def _read(
    rule: Rule,
    hf_name: str,
    shape: tuple[int, ...],
    region: Box,
    read_hf: Callable[[str, Box], torch.Tensor],
) -> torch.Tensor:
    """Read a region of one tensor of the folder, with a row's transforms undone."""
    inverses = []
    for transform in rule.via:
        wanted = region
        region, produced, inverse = transform.source_region(wanted, shape)
        pairs = zip(wanted, produced, strict=True)
        part = tuple(slice(one.start - other.start, one.stop - other.start) for one, other in pairs)
        inverses.append((inverse, part))
        shape = tuple(transform.to_hf(torch.empty(shape, device="meta")).shape)
    fused = rule.part
    if fused.of > 1:
        offset = fused.index * shape[fused.dim]
        one = region[fused.dim]
        shifted = slice(offset + one.start, offset + one.stop)
        region = (*region[: fused.dim], shifted, *region[fused.dim + 1 :])
    weight = read_hf(hf_name, region)
    for inverse, part in reversed(inverses):
        weight = inverse.from_hf(weight)[part]
    return weight


def documents(
    config: Mapping[str, Any], dtype: torch.dtype, tokenizer: Tokenizer | None
) -> dict[str, bytes]:
    """Return the files next to the tensors: config.json, generation_config.json, and those of the
    tokenizer.
    """
    end = tokenizer.end if tokenizer else None
    # In titanlite a document begins after the end token of another.
    ids = {"bos_token_id": end, "eos_token_id": end}
    if end is None:  # the class may need the ids in its config
        ids = {key: config.get(key) for key in ids}
    texts: dict[str, Any] = {
        "config.json": {**config, **ids, "torch_dtype": str(dtype).removeprefix("torch.")},
        "generation_config.json": ids,
    }
    files = {}
    for name, value in texts.items():
        files[name] = (json.dumps(value, indent=2) + "\n").encode()
    if tokenizer and not tokenizer.assets:
        files |= byte_files()
    elif tokenizer:
        assets = [Path(tokenizer.assets) / name for name in TOKENIZER_FILES]
        files |= {path.name: path.read_bytes() for path in assets if path.exists()}
    return files
