#!/usr/bin/env bash
# Mixtral 8x7B on one node of 8 GPUs, dp 4 x tp 2 with ep 8: pretrain_scripts/mixtral_8x7b_8gpu.sh [--section.key value ...]
# Expects data/train, data/validation (.bin/.idx) and data/tokenizer.model; tools/preprocess_data.py makes them.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/mixtral_8x7b.toml --launch.nproc 8 "$@"
