"""An optimizer step that a value on the device undoes: parameters and state end, bit for bit, as they were before.

torch's fused Adam and AdamW do so themselves, at no cost. Any other step is masked: copies of the parameters and of
their state are kept while it runs, of state in bfloat16 for a few parameters at a time.
"""

from typing import Any

import torch

from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part


def step_unless(skipped: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> None:
    """Take a step whose effect is undone where `skipped`, a boolean on the device, is true. Of None, just take it."""
    if skipped is None:
        optimizer.step()
    elif _takes_found_inf(optimizer):
        devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
        vars(optimizer)["found_inf"] = skipped.to((devices or [skipped.device])[0], torch.float32)  # torch's own name
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["found_inf"]
    else:
        _masked_step(skipped, optimizer)


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it leaves everything as it is where `found_inf` is 1: torch's classes do when fused, if not derived."""
    is_torchs = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return getattr(optimizer, "takes_found_inf", is_torchs and is_fused)


@torch.no_grad()
def _masked_step(skipped: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    before, numbers = {key: local.clone() for key, local in _tensors(optimizer).items()}, _numbers(optimizer)
    optimizer.step()
    if any(numbers.get(key, number) != number for key, number in _numbers(optimizer).items()):
        raise UserError(
            f"optimizer.name: {type(optimizer).__name__} counts in Python numbers, which skipping a step on the "
            'device cannot undo; use fault.on_nonfinite = "stop", and not fault.on_spike = "skip"'
        )
    for key, local in _tensors(optimizer).items():
        old = before.pop(key, None)
        old = torch.zeros_like(local) if old is None else old  # state before its first step, as for a checkpoint
        local.copy_(torch.where(skipped.to(local.device), old, local))  # a step count may be on the host, which waits


def _tensors(optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Return the local parts of the parameters and of what the optimizer keeps for them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {(p, key): value for p in parameters for key, value in optimizer.state.get(p, {}).items()}
    tensors = {(p, None): p for p in parameters} | {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}
    return {key: local_part(tensor) for key, tensor in tensors.items()}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[Any, float]:
    owners = {**dict(enumerate(optimizer.param_groups)), **optimizer.state}
    return {(o, key): v for o, kept in owners.items() for key, v in kept.items() if isinstance(v, int | float)}
