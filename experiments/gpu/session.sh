#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a session on a machine that has JAX for the card and perhaps nothing else:
#
#     experiments/gpu/session.sh [--wheels DIR] --output DIR [OPTIONS OF THE SESSION]
#
# Uses the first Python whose JAX finds the card, and tries $PYTHON first. Packages that
# hetjax needs and that Python lacks are installed from the wheels in DIR, without a
# network, into a temporary folder, so that nothing on the machine changes for good.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Prints a Python that is new enough and whose JAX finds devices of platform $1.
find_python() {
    local python
    local -x XLA_PYTHON_CLIENT_PREALLOCATE=false # so the check takes no memory of the card
    for python in ${PYTHON:-} python3 python3.{14,13,12,11} python; do
        command -v "$python" >/dev/null || continue
        if "$python" -c "import sys, jax
assert sys.version_info >= (3, 11), sys.version
jax.devices('$1')" 2>"$scratch/why"; then
            echo "$python"
            return
        fi
        echo "$python: $(tail -n 1 "$scratch/why")" >&2
    done
    echo "found no Python with JAX for '$1'" >&2
    return 1
}

# Prints the wheels in folder $2 whose packages Python $1 lacks.
lacking() {
    "$1" - "$2" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    try:
        distribution(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        print(wheel)
END
}

wheels='' platform=cuda arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$2 && shift 2 && continue ;;
        --platform) platform=${2:-} ;;
        --platform=*) platform=${1#*=} ;;
    esac
    arguments+=("$1")
    shift
done

python=$(find_python "$platform")
export PYTHONPATH=$scratch/packages:$root${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
    mapfile -t lacked < <(lacking "$python" "$wheels")
    echo "$python lacks ${#lacked[@]} packages of $wheels"
    if [ ${#lacked[@]} -gt 0 ]; then
        "$python" -m pip install --quiet --no-index --no-deps \
            --target "$scratch/packages" "${lacked[@]}"
    fi
fi

"$python" -m experiments.gpu.session "${arguments[@]}" &
session=$!
trap 'kill -TERM "$session"' INT TERM # it ends its parts and writes its page
code=0
wait "$session" || code=$?
while kill -0 "$session" 2>/dev/null; do # the wait was interrupted
    code=0
    wait "$session" || code=$?
done
exit "$code"
