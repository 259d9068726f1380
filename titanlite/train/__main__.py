"""The worker's entry point: `python -m titanlite.train [--config …] [--section.key value …]`.

titanlite's launcher starts it, or torchrun, or srun with one task per GPU; it needs only their
usual environment variables.
"""

import faulthandler
import os
import signal
import sys
from typing import Any


def main(task: Any = None, prepared: Any = None) -> None:
    """Train, or do another task, as a worker; a fork receives what its launcher `prepared`."""
    # Ctrl-C ends a rank at once, also inside a collective or an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocks it
    faulthandler.enable(all_threads=False)  # a crash in a library leaves its stack in the log
    from titanlite.errors import replace_unprintable
    from titanlite.runtime.cluster import set_defaults
    from titanlite.runtime.page import share_own_page

    replace_unprintable()
    set_defaults(os.environ)
    share_own_page(os.environ)  # before the seconds that importing torch takes
    from titanlite.train.worker import main as work

    code = work(sys.argv[1:], task, prepared)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal interpreter exit can abort in a communication thread


if __name__ == "__main__":
    main()
