#!/usr/bin/env bash
# The tests on another torch: ./scripts/test_torch.sh VERSION [pytest arguments], e.g. 2.11.0 --all
# PYTHON=python3.12 picks another Python. The environment, .venv-torch-VERSION, is created once (up to 8 GB).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -eq 0 ]; then
    echo "usage: ./scripts/test_torch.sh VERSION [pytest arguments]" >&2
    exit 2
fi
version=$1
shift
cd "$here"
. scripts/python.sh
venv=$here/.venv-torch-$version
if [ "$(cat "$venv/complete" 2>/dev/null)" != "$here" ]; then  # none yet, or copied from another checkout
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" install --disable-pip-version-check "torch==$version" -e ".[dev]" >&2
    echo "$here" >"$venv/complete"
fi
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH PYTHON=$venv/bin/python
"$PYTHON" -c 'import sys, torch; print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")'
exec "$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
