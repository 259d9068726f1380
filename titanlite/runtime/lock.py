"""One run per folder: a POSIX record lock on a file, which the system releases when its holder
ends. Imports no torch.

Such locks work across network file systems, and forked children, such as data loaders, do not
inherit them. Closing any descriptor of the file would release the lock, so the holder never does.
"""

import fcntl
import os
import socket
import time
from pathlib import Path

from titanlite.errors import UserError, print_notice

RUN_LOCK = ".titanlite.lock"
_BUSY = "busy"
_PATIENCE_SECONDS = 1.5  # the ranks of a killed launcher exit in less


def take(path: Path, folder: str) -> None:
    """Lock a file until this process ends, or raise a UserError that names the process holding the
    lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        fault = _lock(file, fcntl.LOCK_EX)
        if fault != _BUSY:
            break
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder} is in use by another run: {path.read_text()}; "
                "wait for it, or use another folder"
            )
        time.sleep(0.1)
    if fault:
        why = f"the file system has no locks ({fault}): a second run cannot be refused"
        print_notice(f"{folder}: {why}, and the remains of killed saves are not deleted")
    os.truncate(file, 0)
    holder = f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %z')}"
    os.write(file, holder.encode())
    _lock(file, fcntl.LOCK_SH)  # so that rank 0 can join, but no other run can take it


def join(path: Path) -> None:
    """Share the lock on rank 0: if the launcher that took it is killed, the folder stays in use
    until rank 0 ends.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if _lock(file, fcntl.LOCK_SH) == _BUSY:
        raise UserError(f"{path.parent}: the launcher has ended, and another run starts there")
    # Drop the rank 0 of an earlier attempt.
    launcher = os.pread(file, 4096, 0).partition(b",")[0]
    os.truncate(file, len(launcher))
    os.write(file, f", its rank 0 is pid {os.getpid()}".encode())


def works_on(path: Path) -> bool:
    """Whether the file system of an unlocked file supports locks."""
    with path.open("r+") as file:
        return not _lock(file.fileno(), fcntl.LOCK_EX)


def _lock(file: int, mode: int) -> str:
    """Try to lock the file; return an empty string, or why that failed."""
    try:
        fcntl.lockf(file, mode | fcntl.LOCK_NB)
        return ""
    except (BlockingIOError, PermissionError):
        return _BUSY
    except OSError as error:  # such as ENOLCK on network file systems
        return error.strerror or str(error)
