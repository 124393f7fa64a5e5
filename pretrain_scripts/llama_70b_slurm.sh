#!/usr/bin/env bash
#SBATCH --job-name=llama-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# Llama 3 70B on 8 nodes of 8 GPUs, dp 16 x tp 2 x cp 2: sbatch pretrain_scripts/llama_70b_slurm.sh [--section.key value ...]
# Submit from the repository's root. Keep the nodes on a private network: the rendezvous has no password.
# For your cluster: --cpus-per-task is a node's cores by its GPUs (96 by 8), --time at most your partition's limit.
# Every rank gets SIGUSR1 120 seconds before the time limit, and the run saves and ends with 75. After that, and after a
# fault that may pass, this script queues the job again. If a node fails or the job is preempted, Slurm does so by itself
# (--requeue). The log goes on in the same file. MAX_REQUEUES (20) bounds how often; after an error in options, data,
# numbers, storage or memory the job ends.
set -euo pipefail
# The environment that setup.sh makes, unless another one was active at submission.
[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || source .venv/bin/activate
train=(python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_70b.toml "$@")
case " $* " in *" --dry_run "*) exec "${train[@]}" ;; esac
if [ -z "${SLURM_JOB_ID:-}" ] || [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "llama_70b_slurm.sh: this is no Slurm job; submit it with sbatch, or plan the run here with --dry_run" >&2
    exit 2
fi
# sed reads to the end: after `head -n 1` scontrol could be killed by SIGPIPE, and with pipefail this script would end.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# Two jobs may share a node. Ports from 32768 on are those that Linux gives to outgoing connections.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# srun does not take sbatch's --cpus-per-task (since Slurm 22.05): without it a task may be bound to one core.
code=0
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${train[@]}" || code=$?
# srun gives the highest code of its tasks: one that it has ended has 128 and the number of a signal.
if [ "$code" = 4 ] || [ "$code" = 6 ] || [ "$code" = 9 ] || [ "$code" = 70 ] || [ "$code" = 75 ] || [ "$code" -ge 128 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-20}" ]; then
        echo "llama_70b_slurm.sh: ended with $code: queued again" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
