"""Tokenizers: they turn text into token ids and token ids into text."""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError, reason_of, storing
from megapar.system.atomic_files import replace_file
from megapar.system.hub import ModelName, cached, fetch
from megapar.system.regular_files import read_regular

SPECS = "bytes, spm:FILE (sentencepiece), hf:FILE or hf:ORG/MODEL (tokenizer.json), or tiktoken:FILE"

# The usual names of the end-of-document token. They are tried when no tokenizer_config.json names it.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")

_CONFIG = "tokenizer_config.json"
_OLDER_CONFIG = "special_tokens_map.json"
_JSON = "tokenizer.json"
FILES = (_JSON, _CONFIG, _OLDER_CONFIG, "chat_template.jinja", "additional_chat_templates/tool_use.jinja")
"""The files of a Hugging Face tokenizer that are read, of a model at Hugging Face too."""
_MOST_IDS = 1 << 31  # ids are stored in 32 bits, with a sign

# The pattern of cl100k_base (tiktoken, MIT license). It cuts text into words before bytes are merged.
_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


class Tokenizer(Protocol):
    """A tokenizer whose ids are in range(vocab_size). It may be used by one thread at a time.

    `eod` is the id that ends a document. No text encodes to it.
    `bos` is the id that the files name as the start of a text. It is None if they name none.
    `start` are the ids that the files put in front of each text: none, or mostly `bos`. `encode` does not add them.
    `fingerprint` identifies everything that decides the ids. It is a hash of the tokenizer's files.
    `older_fingerprints` are the fingerprints that earlier versions of this project gave the same files. Sidecars of
    data that those versions prepared still hold them.
    """

    vocab_size: int
    eod: int
    bos: int | None
    start: tuple[int, ...]
    fingerprint: str
    older_fingerprints: tuple[str, ...]

    def encode(self, text: str) -> NDArray[np.integer]:
        """The ids [n] of `text`, without `start` and `eod`. Raises DataError if the tokenizer fails at it."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`. Ends of documents are left out, and broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8. Id 256 ends a document."""

    vocab_size = 257
    eod = 256
    bos: int | None = None
    start: tuple[int, ...] = ()
    fingerprint = "bytes"
    older_fingerprints: tuple[str, ...] = ()

    def encode(self, text: str) -> NDArray[np.integer]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """The tokenizer of a sentencepiece model file. Its end-of-sentence piece ends a document.

    The file names a start token, and does not say whether it stands in front of a text. It does if `add_bos_token` is
    true in tokenizer_config.json in the same folder.
    A model of `train_sentencepiece` decodes to the text that was encoded, with one exception: U+2581 comes back as a
    space, because sentencepiece writes a space as U+2581.
    With `parse_special`, the names of control pieces in a text, such as </s>, become their ids. `special_tokens` are
    these names: of start, end and unknown pieces.
    Raises DataError if the file is not a sentencepiece model or the model has no end-of-sentence piece.
    """

    older_fingerprints: tuple[str, ...] = ()

    def __init__(self, path: str | Path, *, parse_special: bool = False):
        self.fingerprint = _fingerprint(f"spm:{path}", path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise DataError(f"tokenizer spm:{path}: {path} is not a sentencepiece model ({error})") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise DataError(f"tokenizer spm:{path}: the model has no end-of-sentence piece; train it with an eos_id")
        found: int = self._model.bos_id()
        self.bos: int | None = found if found >= 0 else None
        beside = _read_config(f"spm:{path}", Path(path).with_name(_CONFIG))
        self.start: tuple[int, ...] = (found,) if found >= 0 and beside.get("add_bos_token") is True else ()
        self._control = {
            self._model.id_to_piece(number): number
            for number in range(self.vocab_size)
            if self._model.is_control(number)
        }
        self.special_ids = frozenset(self._control.values())
        ids = {"bos": self._model.bos_id(), "eos": self.eod, "unk": self._model.unk_id(), "pad": self._model.pad_id()}
        self.special_tokens = {f"{name}_token": self._model.id_to_piece(i) for name, i in ids.items() if i >= 0}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._parsed = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if parse_special else None

    def encode(self, text: str) -> NDArray[np.integer]:
        if self._parsed is None:
            return _array(self._model.encode(text))
        return self.encode_with_spans(text)[0]

    def encode_with_spans(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The ids of a text, and for each the letters [start, stop) that it stands for, [ids, 2]."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for part in self._parsed.split(text) if self._parsed is not None else [text]:
            if self._parsed is not None and part in self._control:
                ids.append(self._control[part])
                spans.append((at, at + len(part)))
            else:
                found = self._model.encode(part, out_type="offset_mapping")
                ids += found["ids"]
                spans += [(at + first, at + last) for first, last in found["offsets"]]
            at += len(part)
        # Of the bytes of a letter the last one alone gets the letter.
        for number in range(len(spans) - 2, -1, -1):
            if spans[number][0] == spans[number][1]:
                spans[number] = spans[number + 1]
        return _array(ids), np.array(spans, np.int64).reshape(-1, 2)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def decode_with_ends(self, ids: list[int]) -> str:
        """Return the text of `ids`, with the names of control pieces."""
        edges = [at for at, number in enumerate(ids) for at in (at, at + 1) if number in self.special_ids]
        parts = [ids[first:last] for first, last in zip([0, *edges], [*edges, len(ids)], strict=True) if first < last]
        return "".join(self._model.id_to_piece(p[0]) if p[0] in self.special_ids else self.decode(p) for p in parts)


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    It is used as it is, except for three settings, harmful to a corpus: it truncates and pads nothing, it adds no
    start or end token, and it reads special tokens in a text as text.
    `start` is what its post-processor puts in front of a text, and `bos` the `bos_token` of tokenizer_config.json.
    With `parse_special`, special tokens in a text become their ids. The end of a document is one of them.
    A document ends with the `eos_token` of tokenizer_config.json in the same folder. Without that file or field it
    ends with the one token of a usual name (_ENDS) in the vocabulary.
    Raises ConfigError if the library is not installed. Raises DataError if the file is not such a tokenizer, or if it
    has no end-of-document token or several of them.
    """

    def __init__(self, path: str | Path, *, parse_special: bool = False):
        spec = f"hf:{path}"
        try:
            import tokenizers
        except ImportError as error:
            raise _missing(spec, "tokenizers") from error
        self._spec = spec
        beside = Path(path).with_name(_CONFIG)
        older = _fingerprint(spec, path, beside)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library raises nothing narrower, and panics as Rust does
            raise DataError(f"tokenizer {spec}: not a tokenizer.json ({' '.join(str(error).split())})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the check of the end token below needs it, parse_special or not
        vocabulary = self._tokenizer.get_vocab()
        # get_vocab_size() counts the tokens. Ids may have gaps, so the largest id may be beyond that count.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        config = _read_config(spec, beside)
        ends = _end_tokens(spec, beside, config, vocabulary)
        if len(ends) != 1 or ends[0] not in vocabulary:
            found = " and ".join(ends) or f"none of {', '.join(_ENDS)}"
            raise DataError(
                f"tokenizer {spec}: which token ends a document? Found {found}; name one of its vocabulary as "
                f'{{"eos_token": "..."}} in {beside}'
            )
        self.eod: int = vocabulary[ends[0]]
        # A text that holds the name of the end token must not end the document in the middle.
        if self.eod in self.encode(ends[0]):
            text = "text can hold it; mark it as special in added_tokens"
            raise DataError(f"tokenizer {spec}: {ends[0]} cannot end a document: {text}")
        # As in transformers, which also wrote special_tokens_map.json before the config listed all added tokens.
        further = {} if "added_tokens_decoder" in config else _read_config(spec, beside.with_name(_OLDER_CONFIG))
        self.bos: int | None = vocabulary.get(_named_token(spec, beside, config | further, "bos_token"))
        self.start: tuple[int, ...] = self._added_in_front()
        self._tokenizer.encode_special_tokens = not parse_special
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        """The ids of special tokens, such as those that begin and end turns."""
        # Of tokenizer_config.json only the end token decides ids. Its other fields change when transformers saves the
        # same tokenizer again, or with a chat template. Earlier versions hashed the whole file: see `older`.
        self.fingerprint = hashlib.sha256(Path(path).read_bytes() + f"\neod={self.eod}".encode()).hexdigest()
        self.older_fingerprints: tuple[str, ...] = (older,)

    def encode(self, text: str) -> NDArray[np.integer]:
        # `encode` also computes the position of each token in the text, which is not needed here. The batch holds one
        # text, so that the library uses one thread.
        with _failing_in_one_line(self._spec, text):
            return _array(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def id_of(self, text: str) -> int | None:
        """The id of the token with this text, such as <|im_end|>, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def _added_in_front(self) -> tuple[int, ...]:
        """The ids that the post-processor puts in front of a text."""
        with _failing_in_one_line(self._spec, "a"):
            whole, alone = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
        # Behind a text there may be more, such as BERT's [SEP].
        first = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return tuple(whole[:first])

    def decode_with_ends(self, ids: list[int]) -> str:
        """Return the text of `ids`, with the texts of tokens that end documents."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_with_spans(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The ids of a text, and for each the letters [start, stop) that it stands for, [ids, 2]."""
        with _failing_in_one_line(self._spec, text):
            found = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return _array(found.ids), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.eod], skip_special_tokens=False)


class TiktokenTokenizer:
    """A file of byte pair ranks as `tiktoken` reads it. Each line holds a token's bytes in base64 and its rank.

    The file says neither how text is cut into words nor how a document ends. FILE.json beside it may say
    both: {"pattern": REGEX, "special_tokens": {TEXT: ID}, "eod": TEXT}. Each field is optional. By default words are
    cut as in cl100k_base, and the first free id, <|endoftext|>, ends a document.
    Special tokens in a text are read as text. No token starts a text.
    `ranks` are the ids of the tokens by their bytes, and `special_tokens` the ids of the others by their text.
    `end` is the special token that ends a document.
    `pattern` matches words, in the syntax of fancy-regex. Text without a match is left out.
    Raises ConfigError if the library is not installed and DataError if the file is not such a list.
    """

    bos: int | None = None
    start: tuple[int, ...] = ()
    older_fingerprints: tuple[str, ...] = ()

    def __init__(self, path: str | Path):
        spec = f"tiktoken:{path}"
        self._spec = spec
        beside = Path(f"{path}.json")
        try:
            import tiktoken
        except ImportError as error:
            raise _missing(spec, "tiktoken") from error
        self.fingerprint = _fingerprint(spec, path, beside)
        ranks = _read_ranks(spec, Path(path))
        settings = _read_object(spec, beside) if beside.is_file() else {}
        special = settings.get("special_tokens", {"<|endoftext|>": max(ranks.values()) + 1})
        end = settings.get("eod", "<|endoftext|>")
        if not isinstance(special, dict) or not all(_is_id(token_id) for token_id in special.values()):
            raise DataError(f'tokenizer {spec}: special_tokens in {beside} must be an object {{"TEXT": ID, ...}}')
        if not isinstance(end, str) or end not in special:
            raise DataError(f"tokenizer {spec}: {end} is none of the special tokens {', '.join(special) or '(none)'}")
        if special[end] in ranks.values():  # a text could then end its document in the middle
            raise DataError(f"tokenizer {spec}: {end} has the id {special[end]}, which is the rank of a token")
        pattern = settings.get("pattern", _WORDS)
        try:
            self._encoding = tiktoken.Encoding(
                Path(path).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of Rust is no subclass of Exception
            raise DataError(f"tokenizer {spec}: tiktoken refuses it: {' '.join(str(error).split())}") from error
        self.pattern: str = pattern
        self.ranks = ranks
        self.special_tokens: dict[str, int] = special
        self.end = end
        self.vocab_size: int = self._encoding.max_token_value + 1
        self.eod: int = special[end]

    def encode(self, text: str) -> NDArray[np.integer]:
        with _failing_in_one_line(self._spec, text):
            return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i != self.eod])


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_IDS


def _array(ids: list[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64, len(ids))  # twice as fast as np.array


@contextmanager
def _failing_in_one_line(spec: str, text: str) -> Iterator[None]:
    """Turn an error or a panic of a library in Rust, as of a regular expression that backtracks, into a DataError."""
    try:
        yield
    except Exception as error:
        raise _refused(spec, text, error) from error
    except BaseException as error:
        # A panic is no subclass of Exception, and pyo3 exports its class nowhere.
        if type(error).__name__ != "PanicException":
            raise
        raise _refused(spec, text, error) from error


def _refused(spec: str, text: str, error: BaseException) -> DataError:
    begins = f"{text[:40]!r}{'...' if len(text) > 40 else ''}"
    return DataError(f"tokenizer {spec}: fails at a text that begins {begins}: {' '.join(str(error).split())[:300]}")


def _end_tokens(spec: str, path: Path, config: dict[str, Any], vocabulary: dict[str, int]) -> list[str]:
    """The texts of possible ends of a document: `eos_token` of the config in the file `path`, or each usual name."""
    end = _named_token(spec, path, config, "eos_token")
    return [end] if end else [name for name in _ENDS if name in vocabulary]


def _named_token(spec: str, path: Path, config: dict[str, Any], name: str) -> str:
    """The text of the token `name` in the config of the file `path`, or "". Raises DataError if it is no text."""
    token = config.get(name)
    if isinstance(token, dict):  # transformers writes an AddedToken as an object
        token = token.get("content") or 0
    if not token and token != 0:
        return ""
    if not isinstance(token, str):
        raise DataError(f'tokenizer {spec}: {name} in {path} names no token: write it as a text, {{"{name}": "..."}}')
    return token


def _read_config(spec: str, path: Path) -> dict[str, Any]:
    """The tokenizer_config.json `path`, or nothing if there is none. Raises DataError if it is no JSON object."""
    return _read_object(spec, path) if path.is_file() else {}


def _read_ranks(spec: str, path: Path) -> dict[bytes, int]:
    """The rank of each token by its bytes. Raises DataError for a bad line or a byte without a rank."""
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}  # by rank
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, word = line.split()
            rank = int(word)
            ranks[base64.b64decode(token, validate=True)] = rank
        except ValueError as error:
            raise DataError(f"tokenizer {spec}: line {number}: expected BASE64 RANK, got {line[:40]!r}") from error
        # The library would panic at both.
        if not 0 <= rank < _MOST_IDS:
            raise DataError(f"tokenizer {spec}: line {number}: rank {rank} is not from 0 to {_MOST_IDS - 1}")
        if rank in line_of:
            raise DataError(f"tokenizer {spec}: lines {line_of[rank]} and {number} have the same rank, {rank}")
        line_of[rank] = number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # the library would panic at the first text that needs it
        raise DataError(f"tokenizer {spec}: no rank for byte {missing[0]}: not a list of byte pair ranks, or cut short")
    return ranks


def _read_object(spec: str, path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises DataError if the file holds anything else."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"tokenizer {spec}: {path} is not JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise DataError(f"tokenizer {spec}: {path} holds no JSON object")
    return value


def _fingerprint(spec: str, path: str | Path, *beside: Path) -> str:
    """The SHA-256 of a tokenizer's file, followed by those of the existing files `beside`.

    Raises DataError if `path` is not a file.
    """
    if not Path(path).is_file():
        raise DataError(f"tokenizer {spec}: {path} is not a file")
    digest = hashlib.sha256(Path(path).read_bytes())
    for extra in filter(Path.is_file, beside):
        digest.update(extra.read_bytes())
    return digest.hexdigest()


def _missing(spec: str, package: str) -> ConfigError:
    return ConfigError(f"data.tokenizer: {spec} needs the package {package}: pip install {package}")


def made_by(tokenizer: Tokenizer, fingerprint: str) -> bool:
    """Whether `tokenizer` made the data with `fingerprint` in the sidecar.

    An earlier version of this project may have written the sidecar, so its older fingerprints count too.
    """
    return fingerprint in (tokenizer.fingerprint, *tokenizer.older_fingerprints)


def fetch_tokenizer(spec: str) -> str:
    """Return `spec` after a download of its files into Hugging Face's cache, if it is hf:ORG/MODEL[@REVISION].

    Such a spec gets the commit that stands for these files for ever. Programs call this for a spec that the user has
    typed, before they fork. Raises what `hub.fetch` raises.
    """
    name = _model_of(spec)
    return spec if name is None else f"hf:{fetch(name, FILES, needed=[_JSON]).pinned}"


def tokenizer_file(spec: str) -> Path | None:
    """Return the file of a tokenizer, which may not be there. None for `bytes`.

    It is FILE, tokenizer.json in FOLDER of hf:FOLDER, or that in Hugging Face's cache. Nothing is downloaded. Raises
    ConfigError for a model's name without huggingface_hub.
    """
    prefix, _, path = spec.partition(":")
    name = _model_of(spec)
    if name is not None:
        return cached(name, _JSON) or Path(path)
    if prefix == "hf" and Path(path).is_dir():
        return Path(path, _JSON)
    return Path(path) if path else None


def _model_of(spec: str) -> ModelName | None:
    """The model at Hugging Face that `spec` names."""
    prefix, _, path = spec.partition(":")
    return ModelName.parse(path) if prefix == "hf" else None


def load_tokenizer(spec: str, *, parse_special: bool = False) -> Tokenizer:
    """Load the tokenizer of `data.tokenizer`: `bytes`, `spm:FILE`, `hf:FILE`, `hf:ORG/MODEL` or `tiktoken:FILE`.

    `parse_special`: special tokens in a text become their ids. Only `hf:` and `spm:` tokenizers can do it.
    Raises ConfigError for any other spec and for a missing package. Raises DataError if the file is
    missing, not in Hugging Face's cache (`fetch_tokenizer`), or is not such a tokenizer.
    """
    prefix, _, path = spec.partition(":")
    if prefix == "hf" and path:
        file = tokenizer_file(spec)
        if (name := _model_of(spec)) is not None and file == Path(path):
            command = f"hf download {name.repo} {_JSON} {_CONFIG}{f' --revision {name.revision}' * bool(name.revision)}"
            raise DataError(
                f"tokenizer {spec}: nothing here has this name, and Hugging Face's cache has no {_JSON} of it; a name "
                f"in a file is no reason to download: {command}"
            )
        path = str(file)
    if parse_special:
        if prefix not in ("hf", "spm"):
            raise ConfigError(f"--special_tokens parse: hf: and spm: tokenizers alone can do it, not {spec}")
        return (HuggingFaceTokenizer if prefix == "hf" else SentencePieceTokenizer)(path, parse_special=True)
    if spec == "bytes":
        return ByteTokenizer()
    classes: dict[str, Callable[[str], Tokenizer]] = {
        "spm": SentencePieceTokenizer,
        "hf": HuggingFaceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    if prefix in classes and path:
        return classes[prefix](path)
    raise ConfigError(f"data.tokenizer: unknown tokenizer {spec!r}; use {SPECS}")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, output: str | Path) -> None:
    """Train a lossless sentencepiece BPE model and write it to `output`. The same texts give the same bytes.

    Characters too rare for a piece of their own are encoded as bytes. Each digit is a piece of its own. Runs
    of spaces may be pieces. A newline has an id of its own. Text is not normalized.
    Ids: 0 unknown, 1 start, 2 end, 3 newline, then 256 bytes, then the learned pieces.
    Raises ConfigError if `vocab_size` does not suit the texts, StorageError if the file cannot be written, and whatever
    `texts` raises.
    """
    failures: list[Exception] = []

    def read() -> Iterator[str]:
        try:
            yield from texts
        except Exception as error:
            failures.append(error)
            raise

    # The model goes to memory first: a training that fails must leave no file.
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=read(),
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
        # sentencepiece makes a RuntimeError of every error that it meets while it reads.
        if failures:
            raise failures[0] from None
        reason = " ".join(str(error).split())
        raise ConfigError(f"vocab_size {vocab_size}: sentencepiece refuses it for these texts: {reason}") from error
    with storing(Path(output)):
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(output), model.getvalue())
