"""Tokenizer files for tests."""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

TEXT = Path(__file__).parents[2] / "megapar/config/options.py"


def hugging_face(folder: Path, **added: Any) -> Path:
    """A byte-level BPE tokenizer.json as the library saves it; it truncates, pads and puts a token first."""
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


def byte_pairs(path: Path, *merges: bytes) -> Path:
    """A file of ranks as tiktoken reads it: those of the bytes, then those of `merges`."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))
    return path


def trained_byte_pairs(path: Path, count: int, *more: bytes, **facts: Any) -> Path:
    """A file of `count` ranks learned by byte pair encoding from TEXT, then those of `more`. `facts` go beside it."""
    words = [[bytes([byte]) for byte in f" {word}".encode()] for word in TEXT.read_text().split()[:2000]]
    learned: list[bytes] = []
    while len(learned) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(left + right)
        words = [_joined(word, left, right) for word in words]
    if facts:
        Path(f"{path}.json").write_text(json.dumps(facts))
    return byte_pairs(path, *learned, *more)


def _joined(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    joined: list[bytes] = []
    for part in word:
        if joined and (joined[-1], part) == (left, right):
            joined[-1] = left + right
        else:
            joined.append(part)
    return joined
