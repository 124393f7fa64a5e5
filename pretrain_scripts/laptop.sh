#!/usr/bin/env bash
# Any layout on a laptop, in seconds: pretrain_scripts/laptop.sh [--section.key value ...]
# Four small layers on synthetic data over 8 local ranks; see configs/laptop.toml and configs/tiny.toml for what may change.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/laptop.toml "$@"
