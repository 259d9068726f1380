#!/usr/bin/env bash
# The nightly checks: ./scripts/nightly.sh [MINUTES of each soak, 20 by default [STEP ...]]
# The tests marked nightly (commands of the README and the tutorials, and what compiles for fake GPUs), 200 random plans
# (half of them compared with whole rehearsals, half with processes), the rest of verify's rows, soaks, and an
# installation of the wheel with only its declared dependencies.
# scripts/nightly.txt is the record of each step's last run, in their order: it is committed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$here" || exit
. scripts/python.sh
python=$("$python" scripts/environment.py --dev) || exit 2
minutes=${1:-20}
chosen=${*:2}
seed=${TITANLITE_SEED:-$(date +%Y%m%d)}  # other draws every night
logs=$(mktemp -d)
record=$here/scripts/nightly.txt
failures=0
revision=$(git rev-parse --short=10 HEAD)
where="$(nproc) cores, $("$python" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])')"
touch "$record"

step() {  # NAME COMMAND …
    local name=$1 began=$SECONDS result=ok line
    shift
    [[ -z $chosen || " $chosen " == *" $name "* ]] || return 0
    "$@" >"$logs/$name.log" 2>&1 || result=FAILED failures=$((failures + 1))
    [ $result = ok ] || echo "see $logs/$name.log" >&2
    line=$(grep -v '^ *$' "$logs/$name.log" | grep -v 'processor seconds' | tail -n 1 | cut -c 1-100)
    line=$(printf '%-12s %3d min  %s; %s (%s, seed %s, %s)' "$name" $(((SECONDS - began + 30) / 60)) \
        "$result" "$line" "$revision" "$seed" "$where")
    grep -v "^$name " "$record" >"$logs/record"
    echo "$line" | tee -a "$logs/record"
    cp "$logs/record" "$record"
}

# These are called by their names.
# shellcheck disable=SC2329
marked() {
    "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --nightly -o faulthandler_timeout=3000 "$@"
}

# shellcheck disable=SC2329
from_wheel() {  # with declared packages only
    "$python" -m build --outdir "$logs/dist" . && "$python" -m venv "$logs/venv" &&
        "$logs/venv/bin/pip" install --quiet --disable-pip-version-check "$logs"/dist/*.whl &&
        (cd "$logs" && venv/bin/titanlite train --config debug.toml --training.steps 2)
}

step commands marked --ignore tests/gpu
step gpu marked tests/gpu
step plans env TITANLITE_DRAWS=100 TITANLITE_SEED="$seed" "$python" -m pytest -n 2 tests/planner/test_random.py
step verify "$python" -m titanlite verify --model llama3 --beyond
step soak "$python" scripts/soak.py --minutes "$minutes" --seed "$seed"
step checkpoints "$python" scripts/soak_checkpoint.py --rounds $((minutes * 10)) --seed "$seed"
step wheel from_wheel
exit $((failures > 0))
