#!/usr/bin/env bash
# Llama 3 70B on 8 nodes of 8 GPUs, dp 16 x tp 2 x cp 2, under torchrun. On every node:
#   MASTER_ADDR=first-node NODE_RANK=0..7 pretrain_scripts/llama_70b_torchrun.sh [--section.key value ...]
# The rendezvous listens on every interface of the first node, without a password: keep the nodes on a private network.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --dry_run "*) exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_70b.toml "$@" ;; esac
exec torchrun --nnodes "${NNODES:-8}" --nproc-per-node 8 --node-rank "${NODE_RANK:?set NODE_RANK to 0, 1, ...}" \
    --rdzv-backend static --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first node}" --master-port "${MASTER_PORT:-29500}" \
    pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_70b.toml "$@"
