#!/usr/bin/env bash
# Everything that must hold before a change goes in: bash test.sh [--all] [pytest arguments]
#   --all   the complete suites too: every comparison with torchrun, every fault, long runs
# Stops at the first step that fails, with that step's exit code.
set -euo pipefail
CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"

step() { # name, command
  printf '== %s\n' "$1"
  shift
  "$@"
}

if [[ ${1:-} == --all ]]; then
  shift
  export STOKER_TEST_ALL=1
fi
step setup bash setup.sh --test
export PATH="$PWD/.venv/bin:$PATH"
# By module, not by script: a package of the Python below .venv leaves no script in .venv/bin.
step ruff python -m ruff check
step format python -m ruff format --check
if [[ ! -d tests/__pycache__ ]]; then
  # In a fresh clone each of pytest's workers would compile all tests for itself: once is enough, on the core that mypy leaves.
  # What it finds wrong is pytest's to say, below.
  python -m pytest -q --collect-only "$@" >/dev/null 2>&1 &
  collecting=$!
  trap 'kill "$collecting" 2>/dev/null || true' EXIT
fi
step mypy python -m mypy
step imports python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
wait
trap - EXIT
# Ten workers on two cores, a file each, the slowest first: two thirds of a test's time it waits for processes and timeouts.
workers=(--workers 10)
if [[ -e /dev/nvidiactl ]]; then workers=(-n 6 --dist loadfile --no-loadscope-reorder); fi # CUDA survives no fork
step pytest python -m pytest -q "${workers[@]}" "$@"
