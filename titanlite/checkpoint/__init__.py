"""Checkpoints: saving, committing, verifying, loading and resuming; hf and torchtitan exchange them
with other programs. May import parallel, data, observe, runtime, config, registry and errors; not
train, optim or above. Never unpickles a file except torch's .metadata, and never writes into a
committed folder; only runtime/store.py, safetensors and torch's DCP open files.
"""

from typing import Any


def reader(folder: Any, tensors: Any = None) -> Any:
    """Return a storage reader of a step, for torch.distributed.checkpoint.load.

    Given tensors, by their names in the step, it lists only what this rank's parts of them need.
    """
    from titanlite.checkpoint.manifest import read_manifest
    from titanlite.checkpoint.read import CheckpointReader
    from titanlite.runtime.bucket import place

    return CheckpointReader(place(f"{folder}"), read_manifest(place(f"{folder}")), tensors)


def planner(group: Any = None) -> Any:
    """Return a planner of saves for the ranks of a gloo group; keep it for all saves of a run."""
    from titanlite.checkpoint.plan import Planner

    return Planner(group)


def writer(root: Any, step: int, group: Any = None, documents: Any = None) -> Any:
    """Return a storage writer of a step without optimizer, for torch.distributed.checkpoint.save.

    `documents` has the contents of files to write next to the tensors, by name.
    """
    from titanlite.checkpoint.commit import Content, Writer
    from titanlite.runtime.bucket import place

    content = Content(step, None, lambda _: documents or {}, weights_only=True)
    return Writer(place(f"{root}"), content, group)
