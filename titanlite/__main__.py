"""`python -m titanlite` is the `titanlite` command."""

from titanlite.cli import run

run()
