"""Text to token ids and back."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import sentencepiece

from megapar.errors import ConfigError, DataError, StorageError


class Tokenizer(Protocol):
    """Ids are in range(vocab_size). `eod` ends a document; no text encodes to it."""

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without `eod`."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; id 256 ends a document."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model file; its end-of-sentence piece ends a document.

    Models of `train_sentencepiece` give back every text as it was, save that U+2581, which sentencepiece writes for a
    space, comes back as one. Raises DataError if the file is no such model.
    """

    def __init__(self, path: str | Path):
        if not Path(path).is_file():
            raise DataError(f"tokenizer spm:{path}: {path} is not a file; tools/train_tokenizer.py makes one")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise DataError(f"tokenizer spm:{path}: {path} is not a sentencepiece model ({error})") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise DataError(f"tokenizer spm:{path}: the model has no end-of-sentence piece; train it with an eos_id")

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or `spm:FILE` for a sentencepiece model.

    Raises ConfigError for any other spec and DataError for a missing or foreign file.
    """
    if spec == "bytes":
        return ByteTokenizer()
    kind, _, path = spec.partition(":")
    if kind == "spm" and path:
        return SentencePieceTokenizer(path)
    raise ConfigError(f"data.tokenizer: unknown tokenizer {spec!r}; use bytes or spm:FILE")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, output: str | Path) -> None:
    """Train a lossless sentencepiece BPE model and write it to `output`; the same texts give the same bytes.

    Characters too rare for a piece of their own fall back to bytes, digits stand alone, runs of spaces are pieces,
    newlines are ids of their own, nothing is normalised. Ids: 0 unknown, 1 start, 2 end, 3 newline, then 256 bytes.
    Raises ConfigError if `vocab_size` does not suit the texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            user_defined_symbols=["\n"],
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=1 << 30,  # longer texts would be left out in silence
            num_threads=1,  # recorded in the file, which must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"vocab_size {vocab_size}: sentencepiece refuses it for these texts: {reason}") from error
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_bytes(model.getvalue())
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}") from error
