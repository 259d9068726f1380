"""Locks for commands that write folders, against each other and against a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.errors import UserError
from titanlite.runtime import lock


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Let one process at a time write a folder, by a lock file next to it."""
    path = target.parent / f".{target.name}.lock"
    _take(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def hold_run(folder: Path) -> None:
    """Refuse to change files in the folder of a run in progress, and let none start there until
    this ends.
    """
    for parent in folder.absolute().parents:
        if (parent / lock.RUN_LOCK).exists():
            _take(parent / lock.RUN_LOCK, parent)


def _take(path: Path, folder: Path) -> None:
    try:
        lock.take(path, str(folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error}") from None
