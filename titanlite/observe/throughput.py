"""FLOPs of a model, counted, and peak rates of devices, from a table; nothing is guessed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from titanlite.config.hardware_table import hardware_table, recognize
from titanlite.registry import ModelDims, Rule


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s, or None if the table lacks it."""
    if device.type != "cuda":
        return None
    known = recognize(torch.cuda.get_device_name(device), memory=None)
    if known:
        return hardware_table()["gpu"][known]["peaks"]["bfloat16"]
    return None


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs of a token, without recomputation."""

    products: int
    """FLOPs of products with parameters."""
    attention: int
    blocks: int
    """Blocks with a backward pass; there is none below the first trained parameter."""
    again: int
    """Products in the forward pass of these blocks, which full recomputation repeats."""
    attention_again: int

    @property
    def total(self) -> int:
        """FLOPs of products and attention."""
        return self.products + self.attention


def flops_per_token(
    parameters: Iterable[tuple[str, torch.Tensor]],
    table: dict[str, Rule],
    shape: ModelDims,
    seq_len: int,
    blocks: str,
) -> TokenFlops:
    """Count 2 for each parameter that multiplies a token, 2 more if it is trained, and 2 more if
    the gradient continues below it: to an earlier parameter, or one of the same block.

    An embedding is looked up, not multiplied, unless it is the output layer as well.
    """
    named = [*parameters]
    some_trained = any(parameter.requires_grad for _, parameter in named)
    products = 0
    again = 0
    backwards = 0
    is_below = False  # whether an earlier parameter is trained
    for part, group in groupby(named, lambda item: _part_of(item[0], blocks)):
        members = [*group]
        is_block = part.endswith(".")
        is_trained = any(parameter.requires_grad for _, parameter in members)
        goes_on = is_below or (is_block and is_trained)
        for name, parameter in members:
            rule = table[name]
            if parameter.dim() < 2 or (rule.tensor == "embedding" and not rule.tied):
                continue
            forward = 2 * round(parameter.numel() * rule.active)
            onward = some_trained if rule.tied else goes_on
            products += forward * (1 + parameter.requires_grad + onward)
            if is_block and goes_on:
                again += forward
        backwards += is_block and goes_on
        is_below = is_below or is_trained
    attention = 2 * shape.heads * 2 * shape.head_dim * seq_len
    passes = shape.layers + 2 * backwards
    return TokenFlops(products, attention * passes, backwards, again, attention * backwards)


def _part_of(name: str, blocks: str) -> str:
    """Return the block of a parameter, followed by a dot, or the parameter's name."""
    block = re.match(rf"{re.escape(blocks)}\.\d+\.", name)
    return block[0] if block else name
