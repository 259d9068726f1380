#!/usr/bin/env bash
# Trains: ./run_train.sh [--config FILE.toml …] [--section.key VALUE …]
# Finds or makes the environment, then hands over to titanlite's launcher; nothing else.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/scripts/python.sh"
python=$("$python" "$here/scripts/environment.py")
exec "$python" -m titanlite train "$@"
