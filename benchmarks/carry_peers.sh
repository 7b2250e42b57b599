#!/usr/bin/env bash
# Gathers in build/peers what the peers of benchmarks/qlora*.py need and a machine with torch, transformers, peft and accelerate (but no network) lacks: unsloth
# without its studio, trl, and bitsandbytes for one CUDA version. About 35 MB. There: PYTHONPATH=src:build/peers
#   [PYTHON=python3] [CUDA=130] bash benchmarks/carry_peers.sh
set -euo pipefail
cd "$(dirname "$0")/.."
to=build/peers
rm -rf "$to"
mkdir -p "$to"
"${PYTHON:-python3}" -m pip install --quiet --no-deps --no-compile --target "$to" --python-version 3.12 --implementation cp --only-binary=:all: \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 \
    unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 bitsandbytes==0.50.2
rm -rf "$to"/studio "$to"/unsloth_cli "$to"/bin "$to"/tests
find "$to" -name 'libbitsandbytes_*.so' ! -name "libbitsandbytes_cuda${CUDA:-130}.so" ! -name 'libbitsandbytes_cpu.so' -delete
find "$to" -name __pycache__ -type d -prune -exec rm -rf {} +
du -sh --apparent-size "$to"
