#!/usr/bin/env bash
# The first run on real GPUs: ./scripts/first_light.sh [options], on all GPUs of this machine, in at most ten minutes.
# Each row has its own time limit, and the rows after a failed one run, too. At the end it prints a Markdown table.
# --help lists the options.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/python.sh"
python=$("$python" "$here/scripts/environment.py")
cd "$here"
exec "$python" scripts/first_light.py "$@"
