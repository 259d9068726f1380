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
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$python" -m pyrefly check --output-format min-text >"$types" 2>&1 &  # beside tests, which also wait
# Several files at a time, with one pool of ranks each, for the same reason.
status=0
"$python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" || status=$?
if wait $!; then
    tail -n 1 "$types"
else
    cat "$types"
    status=1
fi
exit $status
