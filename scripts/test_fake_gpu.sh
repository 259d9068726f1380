#!/usr/bin/env bash
# The tests on fake GPUs: ./scripts/test_fake_gpu.sh [--compile] [pytest arguments]
# --compile adds what compiles for a GPU: every row of first_light.sh, blocks, FlexAttention and float8. On two cores it
# takes half an hour or more.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${1:-}" = --compile ]; then
    export TITANLITE_TEST_COMPILE=1
    shift
fi
exec "$here/scripts/test.sh" "$here/tests/gpu" --all "$@"
