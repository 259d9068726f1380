"""What a worker runs: `python -m titanlite.train [--config …] [--section.key value …]`.

Started by titanlite's launcher, by torchrun, or by srun with one task per GPU; it needs nothing but the usual
variables. Nothing is imported here but to train: each of a loader's processes imports its parent's main module again.
It leaves by os._exit: the interpreter's own end can abort in a communication thread.
"""

import os
import sys

if __name__ == "__main__":
    from titanlite.train.worker import main

    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
