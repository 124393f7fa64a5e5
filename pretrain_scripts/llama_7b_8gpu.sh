#!/usr/bin/env bash
# Llama 2 7B on one node of 8 GPUs, dp 8: pretrain_scripts/llama_7b_8gpu.sh [--section.key value ...]
# Expects data/train, data/validation (.bin/.idx) and data/tokenizer.model; tools/preprocess_data.py makes them.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/llama_7b.toml --launch.nproc 8 "$@"
