"""End a process after its parent has ended in any way, a kill included."""

import os
import threading
import time
from multiprocessing import parent_process

from titanlite.errors import print_notice


def exit_with_parent(*_: object, pid: int = 0, notice: str = "") -> None:
    """End this process soon after its parent `pid`; `notice` goes to stderr first.

    Without a pid: after the process that started this multiprocessing worker, which is not its fork
    server."""

    def watch() -> None:
        if not pid and (parent := parent_process()):
            parent.join()
        while os.getppid() == pid:
            time.sleep(0.5)
        if notice:
            print_notice(notice)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
