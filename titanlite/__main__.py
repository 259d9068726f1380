"""`python -m titanlite` is the `titanlite` command."""

import sys

from titanlite.cli import main

sys.exit(main())
