#!/usr/bin/env bash
# Trains: ./run_train.sh [--config FILE.toml …] [--section.key VALUE …]
# Only finds or creates the environment, then runs titanlite's launcher.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run_train.sh
set -euo pipefail
script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do  # a link to the script; macOS had no readlink -f
    link=$(readlink "$script")
    case $link in /*) script=$link ;; *) script=$(dirname "$script")/$link ;; esac
done
here=$(cd "$(dirname "$script")" && pwd)
if [ -e titanlite/__init__.py ] && ! [ titanlite -ef "$here/titanlite" ]; then  # Python looks here first
    echo "titanlite: from here $PWD/titanlite would run instead of $here/titanlite; start it from another folder" >&2
    exit 2
fi
. "$here/scripts/python.sh"
python=$("$python" "$here/scripts/environment.py")
exec "$python" -m titanlite train "$@"
