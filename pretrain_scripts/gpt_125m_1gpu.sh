#!/usr/bin/env bash
# GPT-2 small on one GPU: pretrain_scripts/gpt_125m_1gpu.sh [--section.key value ...]
# Expects data/train, data/validation (.bin/.idx) and data/tokenizer.model; tools/preprocess_data.py makes them.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/gpt_125m.toml "$@"
