#!/usr/bin/env bash
# What is worth a schedule: ./scripts/nightly.sh [MINUTES of each soak, 20 by default]
# The tests marked nightly (commands of the README and the tutorials), everything that compiles for fake GPUs, 200 drawn
# plans, one model's whole table of verify, soaks, and an installation of the wheel with nothing but what it declares.
# scripts/nightly.txt is the record of the last run: it is committed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$here" || exit
. scripts/python.sh
python=$("$python" scripts/environment.py --dev) || exit 2
minutes=${1:-20}
seed=${TITANLITE_SEED:-$(date +%Y%m%d)}  # other draws every night
logs=$(mktemp -d)
record=$here/scripts/nightly.txt
failures=0
{
    echo "revision $(git rev-parse --short=10 HEAD), seed $seed, $(nproc) cores"
    "$python" -c 'import sys, torch; print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")'
} | tee "$record"

step() {  # NAME COMMAND …
    local name=$1 began=$SECONDS result=ok
    shift
    "$@" >"$logs/$name.log" 2>&1 || result="FAILED, see $logs/$name.log" failures=$((failures + 1))
    printf '%-12s %3d min  %s; %s\n' "$name" $(((SECONDS - began + 30) / 60)) "$result" \
        "$(grep -v '^ *$' "$logs/$name.log" | grep -v 'processor seconds' | tail -n 1 | cut -c 1-100)" | tee -a "$record"
}

# With no package that is not declared; called by its name.
# shellcheck disable=SC2329
from_wheel() {
    "$python" -m build --outdir "$logs/dist" . && "$python" -m venv "$logs/venv" &&
        "$logs/venv/bin/pip" install --quiet --disable-pip-version-check "$logs"/dist/*.whl &&
        (cd "$logs" && venv/bin/titanlite train --config debug.toml --training.steps 2)
}

step commands "$python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder --nightly -o faulthandler_timeout=3000
step plans env TITANLITE_DRAWS=200 TITANLITE_SEED="$seed" "$python" -m pytest tests/planner/test_random.py
step compiled ./scripts/test_fake_gpu.sh --compile
step verify "$python" -m titanlite verify --model llama3 --full
step soak "$python" scripts/soak.py --minutes "$minutes" --seed "$seed"
step checkpoints "$python" scripts/soak_checkpoint.py --rounds $((minutes * 10)) --seed "$seed"
step wheel from_wheel
exit $((failures > 0))
