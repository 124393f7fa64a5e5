#!/usr/bin/env bash
#SBATCH --job-name=llama-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Llama 3 70B on 8 nodes of 8 GPUs, dp 2 x tp 8 x pp 4: sbatch pretrain_scripts/llama_70b_slurm.sh [--section.key value ...]
# Submit from the repository's root. Keep the nodes on a private network: the rendezvous has no password.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
train=(python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_70b.toml "$@")
case " $* " in *" --dry_run "*) exec "${train[@]}" ;; esac
# sed reads to the end: after `head -n 1` scontrol could be killed by SIGPIPE, and with pipefail this script would end.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT=29500
exec srun "${train[@]}"
