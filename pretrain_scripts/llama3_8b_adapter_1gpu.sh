#!/usr/bin/env bash
# Adapters (LoRA) on Llama 3 8B on one GPU of 24 GB: pretrain_scripts/llama3_8b_adapter_1gpu.sh [--section.key value ...]
# Expects data/train (.bin/.idx) and data/llama3_8b, the base; the config's comment has the command that makes it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama3_8b_adapter.toml "$@"
