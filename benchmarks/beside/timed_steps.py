"""Mark each step of titanlite's or TorchTitan's trainer in the trace of a fake GPU, with the
processor time of this process.
"""

import time
from typing import Any

import torch

from tests.gpu.marks import mark


def mark_steps(trainer: Any) -> None:
    """Mark the beginning of each step of a class of trainers, and the allocator's peaks."""
    train_step = trainer.train_step

    def marked(self: Any, *arguments: Any) -> Any:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        mark("step {} {} {} {}".format(self.step, time.process_time_ns(), *peaks))
        return train_step(self, *arguments)

    trainer.train_step = marked
