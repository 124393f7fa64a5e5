#!/usr/bin/env bash
# Checks and measures this project on a machine with GPUs, in stages that each end within nine minutes:
#
#   tools/gpu_check.sh STAGE FOLDER [--dry_run]
#
#   facts     versions, GPUs, copy bandwidth, a bf16 matrix product, missing packages          -> FOLDER/facts.json
#   tests     kernel and checkpoint tests natively on the first GPU                            -> FOLDER/tests.log, .xml
#   nccl      the distributed tests; ranks share GPUs where there are fewer                    -> FOLDER/nccl.log, .xml
#   train     Llama 1B to 8B, mixtures: tokens/s, MFU, memory, a profile, PyTorch beside       -> FOLDER/train.json
#   fp8       rates of FP8 products and of what quantizes, and whether they pay                -> FOLDER/fp8.json
#   fp8_train 16 layers of Llama 8B and 4 of Qwen3 in bf16, then with train.fp8 blocks         -> FOLDER/fp8_train.json
#   kernels   every op beside torch eager, Liger-Kernel and torch.compile                      -> FOLDER/kernels.json
#
# It takes the first Python from 3.11 that has torch from 2.11, or the one that PYTHON names, and installs nothing into
# it. Pure-Python packages that are missing come from a folder of wheels (WHEELS, default .whl), never from an index:
#
#   pip download --no-deps --dest .whl tyro docstring_parser typeguard liger_kernel
#
# Each result is in FOLDER as soon as it is measured. LIMIT is the stage's time in seconds (default 510): what is left
# then is ended. --dry_run does the same on a CPU with tiny shapes and claims no figure.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "gpu_check.sh $stage: $1" >&2
    exit 2
}

stage=${1:-}
folder=${2:-}
dry_run=${3:-}
case $stage in
    facts | tests | nccl | train | fp8 | fp8_train | kernels) ;;
    *) stage='' && fail "name a stage: facts, tests, nccl, train, fp8, fp8_train or kernels" ;;
esac
[ -n "$folder" ] || fail "name a folder for the results"
case $dry_run in '' | --dry_run) ;; *) fail "$dry_run is not known; only --dry_run is" ;; esac
mkdir -p "$folder" || fail "cannot make the folder $folder"

# A Python with torch. What it says about a version that is too old is the last line of the failure below.
usable='
import sys
assert sys.version_info >= (3, 11), "Python is older than 3.11"
import torch
assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11), f"torch {torch.__version__} < 2.11"
'
python=''
for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
    if reason=$("$candidate" -c "$usable" 2>&1); then
        python=$candidate
        break
    fi
    reasons="${reasons:-}; $candidate: $(echo "$reason" | tail -n 1)"
done
[ -n "$python" ] || fail "no Python from 3.11 with torch from 2.11${reasons:-}"

site=$folder/site
export PYTHONPATH="$site:$PWD:$PWD/models:$PWD/kernels:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
missing=$("$python" tools/gpu_facts.py --missing | tr '\n' ' ')
if [ -n "${missing// /}" ] && [ -d "${WHEELS:-.whl}" ]; then
    for package in $missing; do
        "$python" -m pip install --quiet --no-index --no-deps --find-links "${WHEELS:-.whl}" --target "$site" "$package" \
            2> /dev/null || echo "no wheel of $package in ${WHEELS:-.whl}"
    done
    missing=$("$python" tools/gpu_facts.py --missing | tr '\n' ' ')
fi
if [ "$stage" != facts ]; then
    [ -z "${missing// /}" ] || fail "missing packages: ${missing% }; put their wheels into ${WHEELS:-.whl}"
    if [ -z "$dry_run" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
        fail "torch sees no GPU here; --dry_run does everything on a CPU without figures"
    fi
fi

# The kernels' tests ask for most of the GPU's memory one at a time, so few of them run side by side.
tests="tests/test_kernels_*.py tests/test_checkpoint.py tests/test_checkpoint_async.py tests/test_expert_parallel.py"
tests+=" tests/test_gpu_waits.py"
side_by_side=$("$python" -c 'import xdist; print("-n 4")' 2> /dev/null || true)
# Ranks that share a GPU wait for it most of the time: on one H200, twelve at a time, 181 of 206 tests took 560 s, 40 % of
# it for 57 layouts by hand. 15 of those are left, so all should take about 470 s. Tests are handed out one by one, so that
# the slow ones, which come last, are those left where the time ends.
ranks_side_by_side=${side_by_side:+-n 12 --dist load --maxschedchunk 1}
lane="-m gpu"
ranks="-m gpus"
[ -z "$dry_run" ] || lane="-k swiglu" ranks="-k test_regions"
case $stage in
    facts) command="$python tools/gpu_facts.py --json $folder/facts.json" ;;
    tests) command="$python -m pytest $lane $side_by_side -v -rs -p no:cacheprovider --junitxml $folder/tests.xml $tests" ;;
    nccl) command="$python -m pytest $ranks $ranks_side_by_side -v -rs -p no:cacheprovider --junitxml $folder/nccl.xml tests" ;;
    train) command="$python tools/benchmark.py gpu $dry_run --json $folder/train.json" ;;
    fp8) command="$python tools/benchmark.py fp8_probe $dry_run --json $folder/fp8.json" ;;
    fp8_train)
        command="$python tools/benchmark.py gpu --workloads 8b-16-layers qwen3-4-layers --contenders megapar fp8"
        command+=" --steps 8 --no-profile --minutes 7 $dry_run --json $folder/fp8_train.json"
        ;;
    kernels) command="$python tools/benchmark.py kernels $dry_run --json $folder/kernels.json" ;;
esac

# INT first: pytest and the benchmarks then say what they have; KILL for what hangs in the driver.
run() {
    local status=0
    # shellcheck disable=SC2086 # the words of the command are separate
    timeout --signal=INT --kill-after=15 "${LIMIT:-510}" "$@" 2>&1 | tee -a "$folder/$stage.log" || status=$?
    [ $status -ne 124 ] || echo "gpu_check.sh $stage: ended after ${LIMIT:-510} s; $folder has what was measured" >&2
    return $status
}
run $command
