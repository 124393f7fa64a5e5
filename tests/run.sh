#!/usr/bin/env bash
# The set-up of the quickstart, then the whole suite on the CPU. Other words go to pytest: tests/run.sh -m slow
# tests/run.sh --gpus runs the kernel tests natively on one GPU, then the distributed tests over NCCL, a GPU for each rank.
set -euo pipefail
source "$(dirname "$0")/../pretrain_scripts/setup.sh"
export OMP_NUM_THREADS=1
if [ "${1:-}" = --gpus ]; then
    shift
    # Two processes: CUDA cannot be used in a fork of a process that has used it.
    python -m pytest -m gpu -rs "$@"
    exec python -m pytest -m gpus -rs "$@"
fi
# A file's tests stay in one process, because they share what its fixtures made. Files begin in the order of
# tests/conftest.py, the longest first; xdist's own order goes by the number of tests.
exec python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
