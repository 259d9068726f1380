"""Marks each step of titanlite's or TorchTitan's trainer in the trace of a fake GPU, with the time
that this process has computed."""

import ctypes
import time
from functools import cache
from typing import Any

import torch


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def mark(text: str) -> None:
    library().fake_gpu_mark(text.encode())


def mark_steps(trainer: Any) -> None:
    """Mark the beginning of each step of a class of trainers, and the allocator's peaks."""
    train_step = trainer.train_step

    def marked(self: Any, *arguments: Any) -> Any:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        mark("step {} {} {} {}".format(self.step, time.process_time_ns(), *peaks))
        return train_step(self, *arguments)

    trainer.train_step = marked
