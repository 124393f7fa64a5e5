#!/usr/bin/env bash
# A small mixture of experts over cp 2 x dp 4 with ep 4, on 8 CPU ranks: pretrain_scripts/moe_laptop.sh [--section.key value ...]
# It uses the corpus and the tokenizer of quickstart.sh, and makes them if they are not there. It ends with the held-out
# loss beside the entropies of the same tokens, and with pictures of the loss and of the load of the experts.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source pretrain_scripts/quickstart_data.sh
run=runs/moe-laptop-$(date +%Y%m%d-%H%M%S)

echo "== pretraining: 8 experts on ep 4, sequences cut over cp 2"
python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/moe_laptop.toml --run_dir $run "$@"

echo "== what the loss means: entropies of the same held-out tokens, counted in the training tokens"
python tools/entropy.py --train $data/train --validation $data/validation --tokenizer $tokenizer \
    --validation_tokens 32769 --run_dir $run --json $run/entropies.json

echo "== pictures"
python tools/plot.py $run --entropies $run/entropies.json
echo "== everything lies in $run: config.toml, metrics.jsonl, report.html, tensorboard/, checkpoints/, loss.png, load.png"
