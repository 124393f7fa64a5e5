#!/usr/bin/env bash
# The set-up of the quickstart, then the whole suite on the CPU. Other words go to pytest: tests/run.sh -m slow
# tests/run.sh --gpus runs the distributed tests over NCCL, a GPU for each rank, on a node that has them.
set -euo pipefail
source "$(dirname "$0")/../pretrain_scripts/setup.sh"
export OMP_NUM_THREADS=1
if [ "${1:-}" = --gpus ]; then
    shift
    export MEGAPAR_TEST_DEVICE=cuda
    exec python -m pytest -m gpu -rs "$@"
fi
exec python -m pytest "$@"
