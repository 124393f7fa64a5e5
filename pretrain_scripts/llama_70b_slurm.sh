#!/usr/bin/env bash
#SBATCH --job-name=llama-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# Llama 3 70B on 8 nodes of 8 GPUs, dp 16 x tp 2 x cp 2: sbatch pretrain_scripts/llama_70b_slurm.sh [--section.key value ...]
# Submit from the repository's root. Keep the nodes on a private network: the rendezvous has no password.
# Every rank gets SIGUSR1 120 seconds before the time limit, and the run saves. Submit again to go on. If a node fails or
# the job is preempted, Slurm queues it again by itself (--requeue), and the log goes on in the same file.
set -euo pipefail
# The environment that setup.sh makes, unless another one was active at submission.
[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || source .venv/bin/activate
export CUDA_DEVICE_MAX_CONNECTIONS=1
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
exec srun "${train[@]}"
