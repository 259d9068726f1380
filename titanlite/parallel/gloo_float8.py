"""Float8 over gloo, which lacks the type: FSDP2 gathers it as bytes. For runs on CPUs; NCCL does not need this."""

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
