#!/usr/bin/env bash
# All checks: ./scripts/test.sh [--all] [pytest arguments]
# --all adds the tests marked long. Other arguments are passed to pytest, and then only pytest runs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/python.sh"
python=$("$python" "$here/scripts/environment.py" --dev)
cd "$here"
unset PYTHONDONTWRITEBYTECODE  # or each of the processes that tests start compiles titanlite once more
if [ $# -gt 0 ] && [ "$1" != --all ]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check --output-format concise .
"$python" -m ruff format --check .
"$python" -m pyrefly check --output-format min-text
# Several files at a time, with one pool of ranks each, since tests also wait.
exec "$python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@"
