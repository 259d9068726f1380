"""Weights between titanlite's names and those of a Hugging Face folder, as the model's table says."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from titanlite.errors import UserError
from titanlite.registry import Rule


def to_hf(weights: Mapping[str, torch.Tensor], table: Mapping[str, Rule]) -> dict[str, torch.Tensor]:
    """Every weight by its Hugging Face name; parts of one tensor over there are joined."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    rules: dict[str, Rule] = {}
    for name, weight in weights.items():
        rule = table[name]
        for step in rule.via:
            weight = step.to_hf(weight)
        there = rule.hf_name(name)
        parts.setdefault(there, {})[rule.part.index if rule.part else 0] = weight
        rules[there] = rule
    found = {}
    for there, pieces in parts.items():
        part = rules[there].part
        found[there] = torch.cat([pieces[i] for i in range(part.of)], part.dim) if part else pieces[0].contiguous()
    return found


def from_hf(tensors: Mapping[str, torch.Tensor], table: Mapping[str, Rule]) -> dict[str, torch.Tensor]:
    """Every weight of the table out of tensors by Hugging Face names; an error names all that are missing."""
    if missing := sorted({rule.hf_name(name) for name, rule in table.items()} - tensors.keys()):
        raise UserError(f"tensors missing from the Hugging Face weights: {', '.join(missing)}")
    found = {}
    for name, rule in table.items():
        weight = tensors[rule.hf_name(name)]
        if rule.part:
            weight = weight.chunk(rule.part.of, rule.part.dim)[rule.part.index]
        for step in reversed(rule.via):
            weight = step.from_hf(weight)
        found[name] = weight
    return found
