"""titanlite: pretraining with multi-dimensional parallelism. `titanlite --help` lists the commands."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def load(checkpoint: Any, *overrides: str) -> tuple[Any, Any]:
    """Return the model of a checkpoint, on the CPU and in evaluation mode, and its tokenizer (None if it has none).

    `checkpoint` is a checkpoint's folder, a folder of them, or a run's dump folder: the latest complete one is used.
    Overrides are those of the command line: `titanlite.load("outputs", "--training.seq_len=4096")`.
    """
    return import_module(".tools.load", __name__).load(checkpoint, *overrides)  # imports torch, which takes seconds
