# SPDX-License-Identifier: Apache-2.0
# Shared by `.ci/run` and `.ci/nightly`, which source it from the top of the repository.
set -euo pipefail
unset PYTHONPATH
scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || :; rm -rf "$scratch"' EXIT

# Prints a Python 3.$1 that can make virtual environments.
find_python() {
    local python candidates=("python3.$1" python3)
    if command -v pyenv >/dev/null; then
        candidates+=("$(pyenv root)"/versions/3."$1".*/bin/"python3.$1")
    fi
    for python in "${candidates[@]}"; do
        # a name on PATH can be a shim that fails, so try each one
        if "$python" -c "import ensurepip, sys, venv
sys.exit(sys.version_info[:2] != (3, $1))" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

# Sets `pythons` to those of the two Pythons that this machine has.
find_pythons() {
    local minor python
    pythons=()
    for minor in 11 12; do
        if python=$(find_python "$minor"); then
            pythons+=("$python")
        else
            echo "found no Python 3.$minor that can make virtual environments" >&2
        fi
    done
    [ ${#pythons[@]} -gt 0 ]
}

# Runs a command under a headline and prints how long it took.
phase() {
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    printf '== %s took %d s\n' "$name" $((SECONDS - start))
}

versions() {
    "$1/bin/python" - <<'END'
import platform

import flax
import jax

print(f"Python {platform.python_version()}, jax {jax.__version__},", end=" ")
print(f"flax {flax.__version__}")
END
}

# Runs all checks except the tests, with the commands of the environment $1, and with
# hetjax in the environment $2. Types and pages take the longest: each gets a core.
checks() {
    local commands=$1/bin venv=$2 types
    phase "format" "$commands/ruff" format --check .
    phase "lint" "$commands/ruff" check .
    phase "types" "$commands/pyright" --pythonpath "$venv/bin/python" \
        >"$scratch/types" 2>&1 &
    types=$!
    phase "import contracts" env PYTHONPATH=. "$commands/lint-imports" --no-cache --no-logo
    phase "docs" env PYTHONPATH=. "$commands/mkdocs" build --quiet --strict \
        --site-dir "$scratch/site"
    wait "$types" || { cat "$scratch/types"; return 1; }
    cat "$scratch/types"
}

# Runs pytest, and prints nothing after it: its summary has its time and ends the
# output.
tests() {
    local venv=$1
    shift
    printf '\n== tests, %s\n' "$("$venv/bin/python" --version)"
    "$venv/bin/python" -m pytest -n 2 "$@"
}
