"""Text to token ids and back."""

import base64
import hashlib
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megapar.errors import ConfigError, DataError, storing

SPECS = "bytes, spm:FILE (sentencepiece), hf:FILE (tokenizer.json) or tiktoken:FILE"

# What ends a document, by its usual names, where no tokenizer_config.json says it.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")

# How cl100k_base (tiktoken, MIT licence) cuts text into words before merging bytes.
_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


class Tokenizer(Protocol):
    """Ids are in range(vocab_size). `eod` ends a document; no text encodes to it. Safe to use in one thread.

    `fingerprint` names what decides the ids: a hash of the tokenizer's files. `older_fingerprints` are those that
    earlier versions gave the same files, and that stand beside data prepared with them.
    """

    vocab_size: int
    eod: int
    fingerprint: str
    older_fingerprints: tuple[str, ...]

    def encode(self, text: str) -> NDArray[np.integer]:
        """Ids [n] of `text`, without `eod`."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; id 256 ends a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "bytes"
    older_fingerprints: tuple[str, ...] = ()

    def encode(self, text: str) -> NDArray[np.integer]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model file; its end-of-sentence piece ends a document.

    Models of `train_sentencepiece` give back every text as it was, save that U+2581, which sentencepiece writes for a
    space, comes back as one. Raises DataError if the file is no such model.
    """

    older_fingerprints: tuple[str, ...] = ()

    def __init__(self, path: str | Path):
        self.fingerprint = _fingerprint(f"spm:{path}", path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise DataError(f"tokenizer spm:{path}: {path} is not a sentencepiece model ({error})") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise DataError(f"tokenizer spm:{path}: the model has no end-of-sentence piece; train it with an eos_id")

    def encode(self, text: str) -> NDArray[np.integer]:
        return _array(self._model.encode(text))

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library, used as it is but for three things that would harm a corpus.

    It truncates and pads nothing, adds no start or end, and special tokens that stand in a text are text. The end of a
    document is `eos_token` of a tokenizer_config.json in the same folder, else the one of the usual names that it has.
    With `parse_special` special tokens that stand in a text become their ids, the end of a document among them.
    Raises ConfigError without the library and DataError if the file is no such tokenizer or has no such end.
    """

    def __init__(self, path: str | Path, *, parse_special: bool = False):
        spec = f"hf:{path}"
        try:
            import tokenizers
        except ImportError as error:
            raise _missing(spec, "tokenizers") from error
        beside = Path(path).with_name("tokenizer_config.json")
        older = _fingerprint(spec, path, beside)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"tokenizer {spec}: not a tokenizer.json ({' '.join(str(error).split())})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1  # get_vocab_size() counts, and ids have gaps
        end = _read_object(spec, beside).get("eos_token") if beside.is_file() else None
        ends = [end["content"] if isinstance(end, dict) else end] if end else [e for e in _ENDS if e in vocabulary]
        if len(ends) != 1 or ends[0] not in vocabulary:
            found = " and ".join(map(str, ends)) or f"none of {', '.join(_ENDS)}"
            raise DataError(
                f"tokenizer {spec}: which token ends a document? Found {found}; name one of its vocabulary as "
                f'{{"eos_token": "..."}} in {beside}'
            )
        self.eod: int = vocabulary[ends[0]]
        if self.eod in self.encode(ends[0]):
            text = "text can hold it; mark it as special in added_tokens"
            raise DataError(f"tokenizer {spec}: {ends[0]} cannot end a document: {text}")
        self._tokenizer.encode_special_tokens = not parse_special
        # Of tokenizer_config.json the end token alone decides ids. Its other fields change when transformers saves the
        # same tokenizer again, or with a chat template; the fingerprint was once of the whole file.
        self.fingerprint = hashlib.sha256(Path(path).read_bytes() + f"\neod={self.eod}".encode()).hexdigest()
        self.older_fingerprints: tuple[str, ...] = (older,)

    def encode(self, text: str) -> NDArray[np.integer]:
        # A batch, because `encode` computes the place of each token in the text as well; of one, so in one thread.
        return _array(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.eod], skip_special_tokens=False)


class TiktokenTokenizer:
    """A file of byte pair ranks as `tiktoken` reads it: a line a token, its bytes in base64 and its rank.

    The file does not say how text is cut into words, nor what ends a document. FILE.json beside it does, if it is
    there: {"pattern": REGEX, "special_tokens": {TEXT: ID}, "eod": TEXT}, each optional; else words are those of
    cl100k_base and the first free id, <|endoftext|>, ends a document. Special tokens that stand in a text are text.
    Raises ConfigError without the library and DataError if the file is no such list.
    """

    older_fingerprints: tuple[str, ...] = ()

    def __init__(self, path: str | Path):
        spec = f"tiktoken:{path}"
        beside = Path(f"{path}.json")
        try:
            import tiktoken
        except ImportError as error:
            raise _missing(spec, "tiktoken") from error
        self.fingerprint = _fingerprint(spec, path, beside)
        ranks = _read_ranks(spec, Path(path))
        facts = _read_object(spec, beside) if beside.is_file() else {}
        special = facts.get("special_tokens", {"<|endoftext|>": max(ranks.values()) + 1})
        end = facts.get("eod", "<|endoftext|>")
        if end not in special:
            raise DataError(f"tokenizer {spec}: {end} is none of the special tokens {', '.join(special) or '(none)'}")
        try:
            self._encoding = tiktoken.Encoding(
                Path(path).stem, pat_str=facts.get("pattern", _WORDS), mergeable_ranks=ranks, special_tokens=special
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(f"tokenizer {spec}: tiktoken refuses it: {' '.join(str(error).split())}") from error
        self.vocab_size: int = self._encoding.max_token_value + 1
        self.eod: int = special[end]

    def encode(self, text: str) -> NDArray[np.integer]:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i != self.eod])


def _array(ids: list[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64, len(ids))  # twice as fast as np.array


def _read_ranks(spec: str, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"tokenizer {spec}: line {number}: expected BASE64 RANK, got {line[:40]!r}") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # the library would panic at the first text that needs it
        raise DataError(f"tokenizer {spec}: no rank for byte {missing[0]}: not a list of byte pair ranks, or cut short")
    return ranks


def _read_object(spec: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"tokenizer {spec}: {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"tokenizer {spec}: {path} holds no JSON object")
    return found


def _fingerprint(spec: str, path: str | Path, *beside: Path) -> str:
    """SHA-256 of a tokenizer's file and, where they are there, of those that belong to it."""
    if not Path(path).is_file():
        raise DataError(f"tokenizer {spec}: {path} is not a file")
    digest = hashlib.sha256(Path(path).read_bytes())
    for extra in filter(Path.is_file, beside):
        digest.update(extra.read_bytes())
    return digest.hexdigest()


def _missing(spec: str, package: str) -> ConfigError:
    return ConfigError(f"data.tokenizer: {spec} needs the package {package}: pip install {package}")


def made_by(tokenizer: Tokenizer, fingerprint: str) -> bool:
    """Whether this tokenizer made the data whose description holds `fingerprint`, which an earlier version may have
    written."""
    return fingerprint in (tokenizer.fingerprint, *tokenizer.older_fingerprints)


def load_tokenizer(spec: str, *, parse_special: bool = False) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, `spm:FILE`, `hf:FILE` or `tiktoken:FILE`.

    `parse_special`: special tokens that stand in a text become their ids, which `hf:` alone can do.
    Raises ConfigError for any other spec or a package that is not installed, DataError for a missing or foreign file.
    """
    if parse_special:
        kind, _, path = spec.partition(":")
        if kind != "hf":
            raise ConfigError(f"--special_tokens parse: hf: tokenizers alone can do it, not {spec}")
        return HuggingFaceTokenizer(path, parse_special=True)
    if spec == "bytes":
        return ByteTokenizer()
    kind, _, path = spec.partition(":")
    kinds: dict[str, Callable[[str], Tokenizer]] = {
        "spm": SentencePieceTokenizer,
        "hf": HuggingFaceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    if kind in kinds and path:
        return kinds[kind](path)
    raise ConfigError(f"data.tokenizer: unknown tokenizer {spec!r}; use {SPECS}")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, output: str | Path) -> None:
    """Train a lossless sentencepiece BPE model and write it to `output`; the same texts give the same bytes.

    Characters too rare for a piece of their own fall back to bytes, digits stand alone, runs of spaces are pieces,
    newlines are ids of their own, nothing is normalized. Ids: 0 unknown, 1 start, 2 end, 3 newline, then 256 bytes.
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
    with storing(Path(output)):
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_bytes(model.getvalue())
