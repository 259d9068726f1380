"""FLOPs of a model and peaks of devices: counted or known, never guessed."""

from collections.abc import Iterable

import torch

from titanlite.registry import ModelDims, Rule

PEAK_BF16_TFLOPS = {
    "A100": 312, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "H20": 148, "B200": 2250,
    "GB200": 2500, "GB300": 2500, "B300": 2500, "L40S": 362, "MI300X": 1300, "MI325X": 1300, "MI355X": 2500,
}  # fmt: skip
"""Dense bf16 peaks by words of the device's name; more specific names first."""


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's peak in TFLOP/s, or None if it is not known."""
    if device.type != "cuda":
        return None
    device_words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    peaks = (float(peak) for name, peak in PEAK_BF16_TFLOPS.items() if device_words.issuperset(name.split()))
    return next(peaks, None)


def flops_per_token(
    parameters: Iterable[tuple[str, torch.Tensor]], table: dict[str, Rule], shape: ModelDims, seq_len: int
) -> int:
    """Return training FLOPs per token: 6 for each parameter that multiplies (4 if frozen), and attention.

    An embedding is looked up, not multiplied, unless it is the output layer as well.
    """
    flops = 6 * shape.layers * shape.heads * 2 * shape.head_dim * seq_len
    for name, parameter in parameters:
        rule = table[name]
        if parameter.dim() >= 2 and (rule.tensor != "embedding" or rule.tied):
            flops += (6 if parameter.requires_grad else 4) * parameter.numel()
    return flops
