#!/usr/bin/env bash
# Everything that needs a real GPU, in one go: bash tests/gpu_check.sh [folder for results]
# Works without pytest plugins and without an install: PYTHONPATH is enough.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${1:-/tmp/gpu-check}
mkdir -p "$out"
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
failed=0
step() { printf '== %s\n' "$1"; shift; "$@" || { failed=1; printf '!! failed\n'; }; }
step "doctor" python3 -m stoker doctor --record "$out/box.json"
step "pytest" python3 -m pytest -c /dev/null --rootdir . -q tests/test_real_gpu.py tests/test_clean.py tests/test_burnin.py -k "gpu or GPU or real or card or rank or memory or healthy" 
step "burnin" python3 -m stoker burnin --minutes 0.5 --runs-dir "$out/runs"
exit $failed
