"""Float8 over gloo, which lacks the type: collectives see it as bytes. For runs on CPUs; NCCL needs none of this."""

from __future__ import annotations

from typing import Any

import torch

from titanlite.runtime import torch_private


def bytes_all_gather() -> Any:
    """Return what FSDP2 gathers with instead: a group of float8 weights only is gathered as float8."""

    class BytesAllGather(torch_private.default_all_gather()):  # type: ignore[misc]
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any
        ) -> Any:
            return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), *args, **options)

    return BytesAllGather()


def gather_activations_as_bytes() -> None:
    """Let tensor parallel gather float8 activations in this process."""
    torch_private.register_float8_all_gather(_all_gather)


def _all_gather(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    data = args[0]._data.contiguous()
    gathered = torch_private.wait_tensor(operation(data.view(torch.uint8), *args[1:], **(kwargs or {})))
    return torch_private.replace_float8_data(args[0], gathered.view(data.dtype))
