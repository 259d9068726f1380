#!/usr/bin/env bash
# Checks the recipes for schedulers with these schedulers' own packages: ./scripts/recipes_check.sh [pytest arguments]
# The packages (730 MB) are in a separate environment, .venv-recipes, which falls back on that of the tests, because
# SkyPilot 0.14 pins a click that huggingface-hub 2 and wandb refuse.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$here"
. scripts/python.sh
python=$("$python" scripts/environment.py --dev)
venv=$here/.venv-recipes
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
if [ "$(cat "$venv/complete" 2>/dev/null)" != "$here $(cksum <pyproject.toml)" ]; then
    "$python" -m venv --clear "$venv"
    "$python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/tests.pth"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile -e ".[recipes]" >&2
    echo "$here $(cksum <pyproject.toml)" >"$venv/complete"
fi
PATH=$venv/bin:$PATH exec "$venv/bin/python" -m pytest -n 0 tests/recipes --all "$@"
