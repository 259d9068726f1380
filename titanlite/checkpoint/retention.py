"""Which checkpoints may go: never the newest whole one, never a folder that we did not write."""

from __future__ import annotations

from pathlib import Path

from titanlite.checkpoint.manifest import committed, is_complete, step_folder


def steps_to_delete(root: Path, keep_latest_k: int, keep_every: int) -> list[int]:
    """Steps of whole checkpoints that need not be kept; keep_latest_k = 0 keeps all.

    What is damaged counts as nothing and is left alone: it may be all that somebody has.
    """
    whole = [step for step in committed(root) if is_complete(step_folder(root, step))]
    old = whole[:-keep_latest_k] if keep_latest_k else []
    return [step for step in old if not keep_every or step % keep_every]
