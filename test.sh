#!/usr/bin/env bash
# Everything that must hold before a change goes in: bash test.sh [--all | --gpu] [pytest arguments]
#   --all   the complete suites too: every comparison with torchrun, every fault, long runs
#   --gpu   only what runs on a GPU (tests/gpu_gate.py); installs nothing and needs a Python with pytest, torch and the packages
#           of [train] (PYTHON, else .venv, else python3). STOKER_TEST_DEVICE=cpu runs the same tests on a CPU
# Stops at the first step that fails, with that step's exit code.
set -euo pipefail
CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"

step() { # name, command
  printf '== %s\n' "$1"
  shift
  "$@"
}

if [[ ${1:-} == --gpu ]]; then
  shift
  python=${PYTHON:-}
  if [[ -z $python ]]; then
    if [[ -x .venv/bin/python ]]; then python=$PWD/.venv/bin/python; else python=python3; fi
  fi
  command -v "$python" >/dev/null || {
    printf 'test.sh --gpu: no %s found; name a Python that has torch and pytest: PYTHON=/path/to/python3 bash test.sh --gpu\n' "$python" >&2
    exit 69
  }
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
  exec "$python" tests/gpu_gate.py "$@"
fi
if [[ ${1:-} == --all ]]; then
  shift
  export STOKER_TEST_ALL=1
fi
step setup bash setup.sh --test
export PATH="$PWD/.venv/bin:$PATH"
# By module, not by script: a package of the Python below .venv leaves no script in .venv/bin.
step ruff python -m ruff check
step format python -m ruff format --check

# On the core that pytest leaves while it collects. What they print is shown when they have ended.
types() {
  step mypy python -m mypy
  step imports python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
}
stop() { # what still runs of these: a signal as from Ctrl-C, and after 20 s one that nothing ignores
  local pid tries
  for pid in "$@"; do
    for ((tries = 0; tries < 200; tries++)); do
      if ((tries == 0)); then kill -INT "$pid" 2>/dev/null || break; fi
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
  done
}
said=$(mktemp)
types >"$said" 2>&1 &
checks=$! tests=
trap 'kill "$checks" 2>/dev/null || true; stop $tests; rm -f "$said"' EXIT

# Ten workers on two cores, a file each, the slowest first: half of a test's time it waits for processes and timeouts.
workers=(--workers 10)
if [[ -e /dev/nvidiactl ]]; then # CUDA survives no fork
  workers=(-n 6 --dist loadfile --no-loadscope-reorder)
  # In a fresh clone each of these would compile all tests for itself. What is wrong with them is pytest's to say, below.
  if [[ ! -d tests/__pycache__ ]]; then python -m pytest -q --collect-only "$@" >/dev/null 2>&1 || true; fi
fi
step pytest true
python -m pytest -q "${workers[@]}" "$@" <&0 &
tests=$!

code=0
wait "$checks" || code=$?
printf '\n%s\n' "$(cat "$said")"
if ((code)); then
  printf 'test.sh: %s failed with exit code %d; stopping the tests\n' "$(grep '^== ' "$said" | tail -n 1 | cut -c 4-)" "$code" >&2
  exit "$code"
fi
wait "$tests" || code=$?
tests=
exit "$code"
