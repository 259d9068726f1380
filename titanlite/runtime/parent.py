"""End a process once its parent has ended in any way, even if killed."""

import os
import threading
import time
from multiprocessing import parent_process

from titanlite.errors import print_notice


def exit_with_parent(*_: object, pid: int = 0, notice: str = "") -> None:
    """End this process soon after its parent `pid`, and print `notice` to stderr first.

    Without a pid, the parent is the process that started this multiprocessing worker, not its fork
    server."""

    def watch() -> None:
        starter = parent_process()
        if not pid and starter:
            starter.join()
        while os.getppid() == pid:
            time.sleep(0.5)
        if notice:
            print_notice(notice)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
