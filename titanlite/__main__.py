"""`python -m titanlite` is the `titanlite` command."""

import sys

try:
    from titanlite.cli import run
except KeyboardInterrupt:
    print("\ntitanlite: stopped", file=sys.stderr)
    sys.exit(130)

run()
