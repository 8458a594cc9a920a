#!/usr/bin/env bash
# Builds the kernels, holds them against float64, and times them on this machine's GPU: under 8 minutes, one command.
#   scripts/gpu_check.sh             needs a CUDA device; results go to benchmarks/results/kernels_gpu_NAME.json
#   scripts/gpu_check.sh --dry-run   goes through the Triton part on a CPU, in Triton's interpreter, at small sizes
# PYTHON names the interpreter (default: .venv/bin/python where there is one). OUTPUT: another folder for the results.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] && default=.venv/bin/python || default=python3
python=${PYTHON:-$default}
output=${OUTPUT:-benchmarks/results}
dry_run=()
if [ "${1:-}" = --dry-run ]; then
  dry_run=(--dry-run)
  export TRITON_INTERPRET=1
elif [ $# -gt 0 ]; then
  echo "usage: scripts/gpu_check.sh [--dry-run]" >&2
  exit 2
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: $python finds no CUDA device (or no torch built for CUDA): nothing to check here." >&2
  echo "       scripts/gpu_check.sh --dry-run goes through the Triton part on a CPU." >&2
  exit 2
fi

step() { echo; echo "== $1 (${SECONDS} s)"; }

if [ ${#dry_run[@]} -eq 0 ]; then
  step "build"
  if command -v nvcc >/dev/null; then export UNIRL_CUDA=1; else echo "no nvcc on PATH: without the cuda back-end"; fi
  "$python" setup.py -q build_ext --inplace
  step "numerics against float64: every back-end"
  timeout 120 "$python" -m unirl.audit kernels
  step "GPU tests"
  timeout 120 "$python" -m pytest -q -m gpu tests/kernels
  step "memory checker on small sizes"
  if command -v compute-sanitizer >/dev/null; then
    timeout 120 compute-sanitizer --error-exitcode 1 "$python" -m benchmarks.kernels.gpu.small
  else
    echo "no compute-sanitizer on PATH: left out"
  fi
else
  step "every launch once"
  "$python" -m benchmarks.kernels.gpu.small
fi
step "times"
left=$((450 - SECONDS))
"$python" -m benchmarks.kernels.gpu "${dry_run[@]}" --seconds "$((left > 300 ? 300 : left))" --output "$output"
echo "done in ${SECONDS} s"
