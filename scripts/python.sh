# Sourced: sets `python` to the first interpreter that is new enough. bash 3.2 is enough.
# shellcheck shell=bash
python=
for candidate in ${PYTHON:-} python3 python python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "titanlite: needs Python 3.10 or newer, and found none (PYTHON=… names one)" >&2
    exit 2
fi
