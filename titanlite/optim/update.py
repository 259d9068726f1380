"""One update: the gradients are divided by a number, and a flag on the device may forbid the step.

torch's fused Adam and AdamW do both in their kernel. For any other optimizer the gradients are
divided first, and a step that may be skipped is masked: copies of the parameters and of their state
are kept while it runs. (With state in bfloat16 they are kept for a few parameters at a time.)
"""

from typing import Any

import torch

from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part
from titanlite.runtime.torch_private import foreach_div_


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    divisor: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
) -> None:
    """Divide the gradients and take a step, which changes nothing if `skipped` is true.

    Both are scalars on the device; without them gradients stay as they are, and no step is skipped.
    """
    parameters = _parameters(optimizer)
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    takes_both = _is_like_fused_adam(optimizer)
    # The kernel's divisor has float32.
    divides_itself = takes_both and all(each.dtype != torch.float64 for each in gradients)
    if divisor is not None and not divides_itself:
        foreach_div_(gradients, divisor)
        divisor = None
    if skipped is not None and not takes_both:
        _masked_step(skipped, optimizer)
        return
    given = {"grad_scale": divisor, "found_inf": skipped}  # torch's own names
    for name, value in given.items():
        if value is not None and parameters:
            # Offloaded parameters are on the host.
            vars(optimizer)[name] = value.float().to(parameters[0].device)
    try:
        optimizer.step()
    finally:
        for name in given:
            vars(optimizer).pop(name, None)


def _is_like_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step divides by the attribute `grad_scale`, and does nothing if `found_inf`
    is 1.

    torch's classes, but not subclasses of them, do so when fused.
    """
    is_torchs = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return getattr(optimizer, "is_like_fused_adam", is_torchs and is_fused)


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
        local.copy_(torch.where(skipped.to(local.device).bool(), old, local))


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
