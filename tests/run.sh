#!/usr/bin/env bash
# The set-up of the quickstart, then the suite on the CPU in two lanes, one after the other:
#
#   proof     parallelism, faults, checkpoints, data, kernels
#   project   documents, the benchmarks' code, the rules of the code, tools
#
# tests/run.sh --smoke runs what finds most mistakes within a minute (tests/smoke.txt).
# tests/run.sh --proof or --project runs one of the lanes. Other words go to pytest. An -m of your own replaces the lanes:
# tests/run.sh -m slow
# tests/run.sh --gpus runs the kernel tests natively on one GPU, then the distributed tests over NCCL (fewer GPUs are shared).
set -euo pipefail
source "$(dirname "$0")/../pretrain_scripts/setup.sh"
export OMP_NUM_THREADS=1
# Some containers set it. Without compiled files each of a thousand processes would compile what it imports.
unset PYTHONDONTWRITEBYTECODE

lanes="proof project"
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
    --proof | --project)
        lanes=${1#--}
        shift
        ;;
esac

run_tests() {
    # A file's tests stay in one process, because they share what its fixtures made. Files begin in the order of
    # tests/conftest.py, the longest first; xdist's own order goes by the number of tests.
    python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
}

for word in "$@"; do
    case $word in -m | -m[!-]*) run_tests "$@" && exit 0 || exit $? ;; esac
done

result=5 # pytest's code where no test was found, as in a lane that has none of the files that were named
report=
for lane in $lanes; do
    marks="project and not slow"
    [ "$lane" = project ] || marks="not $marks"
    begin=$SECONDS
    code=0
    run_tests -m "$marks" "$@" || code=$?
    word=passed
    [ "$code" = 0 ] || word="ended with $code"
    [ "$code" != 5 ] || word="has no such test"
    report+="$lane lane: $word, $((SECONDS - begin)) s"$'\n'
    if [ "$result" = 5 ] || { [ "$code" != 0 ] && [ "$code" != 5 ]; }; then
        result=$code
    fi
done
printf '%s' "$report"
exit "$result"
