"""An optimizer step that leaves everything bit-identical if a flag on the device is set.

torch's fused Adam and AdamW do so themselves, at no cost. Any other step is masked: copies of the
parameters and of their state are kept while it runs. (With state in bfloat16 they are kept for a
few parameters at a time.)
"""

from typing import Any

import torch

from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part


def step_unless(skipped: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> None:
    """Take a step that changes nothing if `skipped`, a boolean on the device, is true.

    None never skips.
    """
    if skipped is None:
        optimizer.step()
        return
    if not _takes_found_inf(optimizer):
        _masked_step(skipped, optimizer)
        return
    parameters = _parameters(optimizer)
    device = skipped.device
    if parameters:
        device = parameters[0].device
    vars(optimizer)["found_inf"] = skipped.to(device, torch.float32)  # torch's own name
    try:
        optimizer.step()
    finally:
        del vars(optimizer)["found_inf"]


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer changes nothing if its attribute `found_inf` is 1.

    torch's classes, but not subclasses of them, do so when fused.
    """
    is_torchs = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return getattr(optimizer, "takes_found_inf", is_torchs and is_fused)


@torch.no_grad()
def _masked_step(skipped: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    before = {key: local.clone() for key, local in _tensors(optimizer).items()}
    numbers = _numbers(optimizer)
    optimizer.step()
    for key, number in _numbers(optimizer).items():
        if numbers.get(key, number) != number:
            name = type(optimizer).__name__
            raise UserError(
                f"optimizer.name: {name} counts in Python numbers, which skipping a step on the "
                'device cannot undo; use fault.on_nonfinite = "stop", and not '
                'fault.on_spike = "skip"'
            )
    for key, local in _tensors(optimizer).items():
        old = before.pop(key, None)
        if old is None:  # state that the first step creates was zero, as for a checkpoint
            old = torch.zeros_like(local)
        # A step count may be on the host: then moving `skipped` waits for the device.
        local.copy_(torch.where(skipped.to(local.device), old, local))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _tensors(optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Return the local parts of the parameters and of the optimizer's state tensors."""
    parameters = _parameters(optimizer)
    tensors: dict[Any, torch.Tensor] = {(p, None): local_part(p) for p in parameters}
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[parameter, key] = local_part(value)
    return tensors


def _numbers(optimizer: torch.optim.Optimizer) -> dict[Any, float]:
    """Return the Python numbers in the optimizer's groups and state."""
    numbers: dict[Any, float] = {}
    owners = {**dict(enumerate(optimizer.param_groups)), **optimizer.state}
    for owner, kept in owners.items():
        for key, value in kept.items():
            if isinstance(value, int | float):
                numbers[owner, key] = value
    return numbers
