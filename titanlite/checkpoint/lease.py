"""One run a place in a bucket: an object there names the run that holds it. No torch.

A store has no locks that end with their holder, so the holder renews its lease, each time in a new
content, and is known to be gone when the lease has not changed for three renewals on the clock of
the process that waits. A run that was stopped for longer finds another content, and commits nothing
any more: what it has stored by then lies in folders that no manifest names.
"""

import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from titanlite.errors import RunFailed, UserError
from titanlite.runtime.bucket import BucketError
from titanlite.runtime.rank_files import STARTED

LEASE = "run.lock"
_RENEWAL_SECONDS = 10


def holder_on(host: str) -> str:
    """Return the name of this run, which is the same for all attempts of a launcher."""
    started = os.environ.get(STARTED) or uuid4()
    return f"pid {os.getppid()} on {host} ({started})"


class Lease:
    """The lease of a place, to be taken on one rank of a run."""

    def __init__(self, root: Path, holder: str, log: logging.Logger) -> None:
        self._path: Any = root / LEASE
        self._holder = holder
        self._log = log
        self._tag: Any = None
        self._writing = threading.Lock()
        self._released = threading.Event()

    def take(self) -> None:
        """Take the lease, or raise UserError while another run renews it."""
        seen, since, expiry = None, 0.0, 3 * _RENEWAL_SECONDS
        while True:
            holder, tag = self._read()
            is_free = holder in ("", self._holder)
            if is_free or (tag == seen and time.monotonic() - since > expiry):
                if self._write(tag):
                    break
            elif seen is None:
                self._log.info(f"{self._path}: waiting {expiry} s to see if {holder} is still up")
                seen, since = tag, time.monotonic()
            elif tag != seen:
                raise UserError(
                    f"{self._path} is held by another run, {holder}; wait, or use another place"
                )
            time.sleep(1)
        threading.Thread(target=self._renew, daemon=True).start()

    def _read(self) -> tuple[str, Any]:
        """Return the holder, which is empty if there is none, and the version of the lease."""
        with suppress(FileNotFoundError):
            content, tag = self._path.bucket.read_tagged(self._path.key)
            with suppress(ValueError, KeyError, TypeError):  # it is not ours, and nobody renews it
                return json.loads(content)["holder"], tag
            return "an unknown program", tag
        return "", "create"

    def _write(self, tag: Any, **changes: str) -> bool:
        """Replace a version of the lease; return whether no other run did."""
        body = {"holder": self._holder, "nonce": uuid4().hex, **changes}
        self._tag = self._path.bucket.put_if(self._path.key, json.dumps(body).encode(), tag)
        return self._tag is not None

    def confirm(self) -> None:
        """Renew the lease; raise RunFailed if another run has taken it."""
        with self._writing:
            if not (self._tag and self._write(self._tag)):
                raise RunFailed(
                    f"{self._path}: {self._read()[0]} has taken it: nothing more is committed"
                )

    def _renew(self) -> None:
        while not self._released.wait(_RENEWAL_SECONDS):
            try:
                self.confirm()
            except BucketError as error:  # as long as nobody takes it, nothing is lost
                self._log.warning(f"{error}; the lease of {self._path} is not renewed")
            except RunFailed as error:
                self._log.error(str(error))
                return

    def release(self) -> None:
        """Let the next run in at once."""
        self._released.set()
        with self._writing, suppress(BucketError):
            if self._tag:
                self._write(self._tag, holder="")
