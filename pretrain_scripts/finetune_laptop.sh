#!/usr/bin/env bash
# Fine-tunes the newest model of quickstart.sh on conversations out of the docstrings of Python's library: all weights, and
# then an adapter (LoRA) alone, with 4 ranks on the CPU. Prints held-out losses, and four answers before and after.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

base=$(ls -dt runs/quickstart-*/checkpoints/step_* 2>/dev/null | head -n 1 || true)
if [ -z "$base" ]; then
    echo "finetune_laptop.sh: no runs/quickstart-*/checkpoints here; bash pretrain_scripts/quickstart.sh makes one" >&2
    exit 2
fi
tokenizer=spm:data/quickstart/tokenizer.model
run=runs/finetune-$(date +%Y%m%d-%H%M%S)

echo "== conversations"
python tools/docstrings.py --output $run/talks
for part in train validation; do
    python tools/preprocess_data.py chat --input $run/talks/$part.jsonl --output $run/talks/$part \
        --tokenizer $tokenizer --template chatml --max_length 257 --too_long skip
done

finetune() { # NAME, then flags
    python pretrain_scripts/pretrain.py --config pretrain_scripts/configs/quickstart.toml --run_dir $run/$1 \
        --checkpoint.init_from $base --launch.nproc 4 --parallel.dp 2 --parallel.tp 2 --parallel.pp 1 \
        --data.train $run/talks/train --data.validation $run/talks/validation --data.tokenizer $tokenizer \
        --data.documents apart --train.seq_length 256 --train.micro_batch_size 4 \
        --train.eval_samples 32 --train.recompute none --log.every 20 --log.profile none "${@:2}"
}

answers() { # a checkpoint, then flags
    python tools/generate.py "$1" "${@:2}" --tokens 40 --temperature 0 \
        --prompt 'What is shutil.copytree?' 'What is abc.ABC?' 'What is statistics.median?' 'What is threading.Timer?'
}

echo "== before: a step of learning rate 0 evaluates $base, which continues a question with code"
finetune base --train.steps 1 --train.global_batch_size 16 --optimizer.warmup_steps 0 --optimizer.lr 0 \
    --optimizer.min_lr 0 --optimizer.weight_decay 0 | grep validation
answers "$base"
echo "== all weights, by muon: the conversations about 7 times"
finetune full --train.steps 280 --train.global_batch_size 8 --optimizer.name muon --optimizer.warmup_steps 5 \
    --optimizer.lr 2e-2 --optimizer.min_lr 1e-3
answers "$(ls -d $run/full/checkpoints/step_* | tail -n 1)" --chat
echo "== an adapter alone: the conversations 3 times"
finetune adapter --train.steps 60 --train.global_batch_size 16 --optimizer.warmup_steps 5 --optimizer.lr 1e-2 \
    --optimizer.min_lr 1e-3 --adapter.rank 16 --adapter.alpha 32
python tools/convert_checkpoint.py merge "$(ls -d $run/adapter/checkpoints/step_* | tail -n 1)" "$base" $run/merged
answers $run/merged --chat
echo "== everything lies in $run. The training asked about shutil.copytree and abc.ABC, and not about the other two."
echo "   All weights learn the answers to these two by heart, and to the others a sentence of the kind. The adapter alone"
echo "   lowers the loss, but its answers make no sense: the model is too small and too little trained to lend it more."
