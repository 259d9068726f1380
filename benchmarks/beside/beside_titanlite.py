"""For --model.package: titanlite on fake GPUs, with marked steps."""

import on_fake_gpu  # noqa: F401

from benchmarks.beside.timed_steps import mark_steps
from titanlite.train.trainer import Trainer

mark_steps(Trainer)
