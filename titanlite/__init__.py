"""titanlite: pretraining with multi-dimensional parallelism. `titanlite --help` lists the
commands.
"""

from typing import Any

from titanlite.version import __version__ as __version__


def load(checkpoint: Any, *overrides: str, package: str = "") -> tuple[Any, Any]:
    """Return the model of a checkpoint, on the CPU and in evaluation mode, and its tokenizer (None
    if it has none).

    `checkpoint` is a checkpoint's folder, a folder of them, or a run's dump folder: the latest
    complete one is used. Overrides are those of the command line: `titanlite.load("outputs",
    "--training.seq_len=4096")`. `package` registers the model, if it is not one of titanlite's."""
    from titanlite.tools.load import load as load_model  # imports torch, which takes seconds

    return load_model(checkpoint, *overrides, package=package)
