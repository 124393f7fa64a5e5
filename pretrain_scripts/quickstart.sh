#!/usr/bin/env bash
# From nothing to a trained model: packages, corpus, tokenizer, tokens, a small Llama over dp x tp x pp, held-out loss
# beside the entropies of the same tokens, a sample of text, and pictures. Everything stays in this folder. Arguments are
# further options of pretrain.py.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

source pretrain_scripts/quickstart_data.sh
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)

# On GPUs the largest of these layouts that they allow, over NCCL; without GPUs 8 ranks on the CPU, over gloo.
gpus=$(python -c 'from megapar.system.device import cuda_devices; print(cuda_devices())')
case $gpus in
    1) layout="--launch.nproc 1 --parallel.dp 1 --parallel.tp 1 --parallel.pp 1" ;;
    2 | 3) layout="--launch.nproc 2 --parallel.dp 1 --parallel.tp 2 --parallel.pp 1" ;;
    4 | 5 | 6 | 7) layout="--launch.nproc 4 --parallel.dp 1 --parallel.tp 2 --parallel.pp 2" ;;
    *) layout="--launch.nproc 8 --parallel.dp 2 --parallel.tp 2 --parallel.pp 2" ;;
esac
echo "== pretraining: $layout"
python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/quickstart.toml --run_dir $run $layout "$@"

echo "== what the loss means: entropies of the same held-out tokens, counted in the training tokens"
python tools/entropy.py --train $data/train --validation $data/validation --tokenizer $tokenizer \
    --validation_tokens 32769 --run_dir $run --json $run/entropies.json

checkpoint=$(ls -d $run/checkpoints/step_* | tail -n 1)
echo "== a sample"
python tools/generate.py "$checkpoint" --prompt "def read(self, " --tokens 120
echo "== pictures"
python tools/plot.py $run --entropies $run/entropies.json
echo "== everything lies in $run: config.toml, metrics.jsonl, report.html, tensorboard/, checkpoints/, loss.png, timeline.png"
