"""FLOPs of a model and peaks of devices: counted or from a table, never guessed."""

from collections.abc import Iterable

import torch

from titanlite.config.hardware_table import hardware_table, recognize
from titanlite.registry import ModelDims, Rule


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s, or None if the table lacks it."""
    if device.type != "cuda":
        return None
    known = recognize(torch.cuda.get_device_name(device), memory=None)
    return hardware_table()["gpu"][known]["peaks"]["bfloat16"] if known else None


def flops_per_token(
    parameters: Iterable[tuple[str, torch.Tensor]],
    table: dict[str, Rule],
    shape: ModelDims,
    seq_len: int,
) -> int:
    """Return training FLOPs per token: 6 for each parameter that multiplies it (4 if frozen), and
    attention.

    An embedding is looked up, not multiplied, unless it is the output layer as well.
    """
    flops = 6 * shape.layers * shape.heads * 2 * shape.head_dim * seq_len
    for name, parameter in parameters:
        rule = table[name]
        if parameter.dim() >= 2 and (rule.tensor != "embedding" or rule.tied):
            flops += (6 if parameter.requires_grad else 4) * round(parameter.numel() * rule.active)
    return flops
