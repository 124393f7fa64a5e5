#!/usr/bin/env bash
# The set-up of the quickstart, then the suite on the CPU: two lanes, told apart at the end.
#
#   proof     parallelism, faults, checkpoints, data, kernels
#   project   documents, the benchmarks' code, the rules of the code, tools
#
# Tests of documents, benchmarks, migration and makers of pages run if files that they depend on differ from the last commit
# (tests/support/lanes.py): tests/run.sh --all runs them anyhow.
# tests/run.sh --smoke runs what finds most mistakes within a minute (tests/smoke.txt).
# tests/run.sh --proof or --project runs one of the lanes. Other words go to pytest. An -m of your own replaces the lanes:
# tests/run.sh -m slow
# tests/run.sh --gpus runs the kernel tests natively on one GPU, then the distributed tests over NCCL (fewer GPUs are shared).
set -euo pipefail
extra=dev
source "$(dirname "$0")/../pretrain_scripts/setup.sh"
export OMP_NUM_THREADS=1

marks="not slow"
leave_out=--leave-out
case ${1:-} in
    --gpus)
        shift
        # Two processes: CUDA cannot be used in a fork of a process that has used it.
        python -m pytest -m gpu -rs "$@"
        exec python -m pytest -m gpus -rs "$@"
        ;;
    --smoke)
        shift
        exec python -m pytest -q -n auto --maxprocesses 8 -m "not slow" @tests/smoke.txt "$@"
        ;;
    --all)
        leave_out=
        shift
        ;;
    --proof)
        leave_out=
        marks="not project and not slow"
        shift
        ;;
    --project)
        leave_out=
        marks="project and not slow"
        shift
        ;;
esac

for word in "$@"; do
    case $word in -m | -m[!-]*) leave_out= ;; esac
done

# A file's tests stay in one process, because they share what its fixtures made. Files begin in the order of
# tests/durations.json, the longest first; xdist's own order goes by the number of tests. Of two -m pytest takes the last.
exec python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "$marks" $leave_out "$@"
