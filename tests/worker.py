"""A worker of xdist that is a fork of a process which has imported everything, and so are the
processes that it forks whole runs and the ranks of pools from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import resource_tracker, util
from typing import Any
from unittest.mock import patch

from tests import runs
from tests.forked import Forked, Server, serve
from titanlite.runtime import forks
from titanlite.runtime.torch_private import INDUCTOR_MODULE
from titanlite.verify import pool

PRELOAD = ["titanlite.verify.harness", INDUCTOR_MODULE]


def fork_workers() -> None:
    """Let xdist start its workers so, from now on."""
    from execnet import gateway_io
    from execnet.gateway_base import Popen2IO

    runs.server()

    def start(io: Any, _: Any, execmodel: Any) -> None:
        pipe = subprocess.PIPE
        io.popen = Forked(["tests.worker"], stdin=pipe, stdout=pipe, env=os.environ, cwd=runs.ROOT)
        Popen2IO.__init__(io, io.popen.stdin, io.popen.stdout, execmodel=execmodel)

    vars(gateway_io)["Popen2IOMaster"].__init__ = start


def _fork_server() -> bool:
    """Give this process what runs are forked from; True in a run."""
    forks.adopt_orphans()
    requests, theirs = forks.socket_pair()
    if not (pid := os.fork()):
        requests.close()
        _let_go()
        serve(theirs)
        return True
    theirs.close()
    Forked.server = Server(runs.environment(), requests, pid)
    runs.HELPERS.add(pid)
    return False


def _fork_pool_server() -> None:
    """Fork what the ranks of pools are forked from."""

    def fork(_: Any, argv: list[str], files: list[int]) -> int:
        if not (pid := os.fork()):
            try:
                _let_go()
                Forked.server.requests.detach()
                kept = {0, 1, 2, *files}
                for number in {*map(int, os.listdir("/proc/self/fd"))} - kept:
                    with suppress(OSError):  # the listing has had one of its own
                        os.close(number)  # or the server would never see its owner's end
                exec(argv[-1], {})
            finally:
                os._exit(0)
        runs.HELPERS.add(pid)
        return pid

    resource_tracker.ensure_running()  # or it would be such a fork, too
    with patch.object(util, "spawnv_passfds", fork):
        pool.fork_server(PRELOAD).ensure_running()


def _let_go() -> None:
    """Close the connection to xdist."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)


if __name__ == "__main__" and not _fork_server():
    _fork_pool_server()
    del __file__
    __spec__ = None  # or each rank of a pool would import this module
    exec(eval(sys.stdin.readline()))
