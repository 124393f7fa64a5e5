"""Perplexity of texts: by token and by byte, which compares models with other tokenizers."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from megapar_models.judging.judge import Judge, Window, sliding

_AT_ONCE = 1024  # documents that are scored together


@dataclass
class Perplexity:
    """Sums over documents: tokens, bytes in UTF-8, and negative log-probabilities of tokens, in nats."""

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    nats: float = 0.0

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        return math.exp(self.nats / self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.num_bytes / math.log(2)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON types."""
        derived = {name: getattr(self, name) for name in ("per_token", "per_byte", "bits_per_byte")}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        return (
            f"perplexity {self.per_token:.4f} per token, {self.per_byte:.4f} per byte | "
            f"{self.bits_per_byte:.4f} bits per byte | "
            f"{self.nats / self.tokens:.4f} nats per token | documents {self.documents:,}, tokens {self.tokens:,}, "
            f"bytes {self.num_bytes:,}"
        )


def perplexity(judge: Judge, documents: Iterable[str], stride: int) -> Perplexity:
    """The perplexity of documents, each by itself: no token sees another document. A collective.

    Each token is scored once. The first one is scored behind the start token. Without such a token it is scored behind
    the end token: a document of the training began behind the end of another one. Windows of
    `judge.longest` tokens move by `stride`: all but the first `judge.longest` tokens of a document see at least
    `judge.longest - stride` tokens before them.
    """
    total = Perplexity()
    waiting = iter(documents)
    while texts := list(islice(waiting, _AT_ONCE)):
        windows: list[Window] = []
        for text in texts:
            start = judge.texts.start
            ids = judge.texts.encode(text).tolist()[len(start) :]
            windows += sliding(ids, start or (judge.tokenizer.eod,), judge.longest, stride)
            total.documents += 1
            total.tokens += len(ids)
            total.num_bytes += len(text.encode())
        total.nats -= math.fsum(score.log_prob for score in judge.score(windows))
    return total
