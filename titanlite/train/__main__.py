"""What a worker runs: `python -m titanlite.train [--config …] [--section.key value …]`.

titanlite's launcher starts it, or torchrun, or srun with one task per GPU; all it needs are their usual variables.
"""

import os
import sys

from titanlite.train.worker import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal interpreter exit can abort in a communication thread
