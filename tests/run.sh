#!/usr/bin/env bash
# The set-up of the quickstart, then the whole suite; --gpus runs the distributed tests over NCCL as well.
# Other words go to pytest: tests/run.sh -m slow
set -euo pipefail
source "$(dirname "$0")/../pretrain_scripts/setup.sh"
export OMP_NUM_THREADS=1
if [ "${1:-}" = --gpus ]; then
    shift
    export MEGAPAR_TEST_DEVICE=cuda
fi
exec python -m pytest "$@"
