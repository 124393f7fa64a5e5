# Sourced by quickstart.sh and moe_laptop.sh: corpus, tokenizer and tokens in data/quickstart, made once.

data=data/quickstart
tokenizer=spm:$data/tokenizer.model

if [ ! -f $data/validation.idx ]; then
    echo "== corpus: the Python standard library's own sources"
    python tools/build_corpus.py --output $data
    echo "== tokenizer: sentencepiece BPE"
    python tools/train_tokenizer.py --input $data/train.jsonl --output $data/tokenizer.model --vocab_size 4096 --sample_mb 4
    echo "== tokens"
    for part in train validation; do
        python tools/preprocess_data.py --input $data/$part.jsonl --output $data/$part --tokenizer $tokenizer \
            --workers "$(nproc)" --append_eod
    done
fi
