#!/usr/bin/env bash
# Llama 3 70B on 6 to 8 nodes of 8 GPUs under torchrun, which starts again with the nodes that are left. On every node:
#   MASTER_ADDR=first-node pretrain_scripts/llama_70b_elastic_torchrun.sh [--section.key value ...]
# 8 nodes are dp 16 x tp 2 x cp 2; with fewer the replicas do more micro-batches each, and the global batch stays.
# torchrun's agents meet at the first node, which has no password: keep the nodes on a private network. If the first
# node is lost, all nodes end; start them again.
set -euo pipefail
cd "$(dirname "$0")/.."
# torchrun kills its ranks so many seconds after a SIGTERM. By then the save must be done.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
train=(pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_70b.toml --launch.min_dp 12 "$@")
case " $* " in *" --dry_run "*) exec python "${train[@]}" ;; esac
exec torchrun --nnodes "${NNODES:-6:8}" --nproc-per-node 8 --max-restarts "${MAX_RESTARTS:-3}" --rdzv-id "${JOB_ID:-llama-70b}" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?set MASTER_ADDR to the first node}:${MASTER_PORT:-29500}" "${train[@]}"
