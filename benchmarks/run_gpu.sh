#!/usr/bin/env bash
# The benchmarks of one GPU, in one call that ends within 9 minutes; a second call continues with the rest.
#   benchmarks/run_gpu.sh [FOLDER OF WHEELS]
# Needs a torch of 2.11 to 2.15 that sees the GPU. Other packages that titanlite needs and this Python lacks are taken
# from a folder of wheels, which a machine with a network makes for the GPU machine's Python, such as 3.12:
#   for="--python-version 3.12 --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64"
#   pip download -d wheels $for "pydantic>=2.10"     # with its dependencies: it needs one exact pydantic-core
#   pip download -d wheels $for --no-deps torchdata torchao tokenizers safetensors rich markdown-it-py mdurl \
#       pygments tensorboard tomli numpy
# Compiled rows need gcc and Python's headers there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
if [ $# -gt 0 ]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    # torch stays the machine's own.
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$1"/*.whl
    export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" benchmarks/gpu.py --json benchmarks/gpu.json
