"""Tokenizer files for tests."""

import json
from pathlib import Path
from typing import Any

import tokenizers

TEXT = Path(__file__).parents[2] / "megapar/config.py"


def hugging_face(folder: Path, **added: Any) -> Path:
    """A byte-level BPE tokenizer.json as the library saves it, which truncates, pads and puts a token first."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.read_text()], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(facts | added))
    return folder / "tokenizer.json"
