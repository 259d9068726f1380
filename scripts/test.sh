#!/usr/bin/env bash
# All checks: ./scripts/test.sh [--long | --exhaustive] [pytest arguments]
# --long adds the tests that are marked long, --exhaustive those and every further row. With other arguments only pytest
# runs, and gets them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/python.sh"
python=$("$python" "$here/scripts/environment.py" --dev)
cd "$here"
unset PYTHONDONTWRITEBYTECODE  # or each of the processes that tests start compiles titanlite once more
if [ $# -gt 0 ] && [ "$*" != --long ] && [ "$*" != --exhaustive ]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check --output-format concise .
"$python" -m ruff format --check .
"$python" -m pyrefly check --output-format min-text
# Several files at a time, with one pool of ranks each: two keep two cores busy. The long tests wait more: for time
# limits, other hosts, a scheduler.
files=2
if [ $# -gt 0 ]; then
    files=3
fi
exec "$python" -m pytest -n $files --dist loadfile --no-loadscope-reorder "$@"
