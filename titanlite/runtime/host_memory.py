"""Host memory that a GPU copies from and to asynchronously."""

import weakref
from typing import Any

import torch


def lock_pages(memory: torch.Tensor, owner: object) -> None:
    """Lock the pages of a tensor on the CPU until `owner` is gone.

    torch would round each page-locked block up to a power of two.
    """
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
    weakref.finalize(owner, cuda.cudaHostUnregister, memory.data_ptr())
