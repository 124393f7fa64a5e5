"""Hugging Face's tokenizer files for tokenizers without them. They encode a text as training did."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import ConfigError, DataError, reason_of
from megapar.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, TiktokenTokenizer, Tokenizer
from megapar.system.regular_files import read_regular
from megapar_models.convert.byte_level import BYTES_END, bytes_json, tiktoken_json, tokenizers_library
from megapar_models.convert.word_pattern import InexpressibleError

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
CODE = "tokenizer_as_it_is.py"
_SYMBOLS = 32  # special tokens that check texts are made of; some tokenizers reserve hundreds

# Two tokenizers that encode all of these alike are taken for the same one. Each text shows something that rebuilt
# tokenizers are known to change: how words are cut, whether spaces are kept, whether characters are normalized.
TEXTS = (
    "",
    "Hello, world! It's a test of plain English text.",
    "I'LL don't they've we'd she's CAN'T o'clock",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX.",
    "UPPERCASE lowercase CamelCase snake_case kebab-case",
    " one leading space",
    "  two leading spaces",
    "trailing space ",
    "trailing spaces   ",
    " ",
    "   ",
    "inner  two and   three    four spaces",
    "a\nb",
    "a\n\nb\n\n\nc\n",
    "\nleading newline",
    "\r\ncarriage\r\nreturns\r\n",
    "\ttab\tseparated\t\tvalues",
    " \n \t \n  mixed whitespace \n\n  ",
    "def f(x: int) -> str:\n    if x >= 10:\n        return f'{x!r}'\n\n    return \"\\n\"\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 2; }  // loop",
    '<div class="a">text &amp; more</div>\n<!-- comment -->',
    '{"key": [1, 2.5, -3e10, true, null], "other": "value"}',
    "SELECT * FROM t WHERE a != 'b' AND c <> 1;",
    "https://example.com/path?query=1&other=%20#fragment user@example.com",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 0xFF 1e-5",
    "2024-01-31T12:34:56Z 50% $9.99 #42 (555) 123-4567",
    "Café naïve résumé Ångström Straße ÇĞİÖŞÜ",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 (combining marks)",
    "\u00e9 \u212b \ufb01 \u2460 \uff21\uff22 \u00bd \u2126 (compatible forms)",
    "Ελληνικά Русский Українська עברית العربية فارسی",
    "中文字符，没有空格。日本語のテキスト、カタカナ。한국어 텍스트",
    "हिन्दी தமிழ் ไทย ខ្មែរ",
    "🙂 👍🏽 👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f",
    "\u00a0no-break\u2003em\u3000ideographic\u200bzero-width spaces",
    "\u201cquotes\u201d \u2018single\u2019 \u2013 \u2014 \u2026 \u2022",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), √2 ≈ 1.414",
    "____ ---- ==== **** #### !!!! ???? ....",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "▁underline for a space▁ ▁▁",
    "<0x41> <0x0A> are text here",
    "$\\int_0^1 x^2\\,dx = \\frac{1}{3}$",
    "control \x1b[0m \x07 \x7f characters",
)


def check_texts(symbols: Iterable[str]) -> list[str]:
    """TEXTS and three texts for each of `symbols`, such as special tokens: alone, at the start, inside words."""
    texts = list(TEXTS)
    for symbol in symbols:
        texts += [symbol, f"{symbol} a{symbol}b", f"one {symbol}\n{symbol}two"]
    return texts


# Mostly bytes that are no UTF-8. Decoding writes U+FFFD for them, and libraries may write other numbers of it.
BROKEN = (
    bytes(range(256)),
    b"\xff",
    b"a\xc3",
    b"\xe2\x82 cut",
    b"\xf0\x9f\x98\x98\xf0\x9f\x98b",
    b"\xc0\xaf\xe0\x80\xaf overlong",
    b"\xed\xa0\x80 half of a pair",
    b"\xf4\x90\x80\x80 beyond Unicode",
    b"\x80\xbf\x80 and \xc3\xa9",
)


class EncodingDifference(NamedTuple):
    """A text with two encodings by two tokenizers, and its ids."""

    text: str
    expected: list[int]
    found: list[int]


def differences(expected: Tokenizer, encode: Any, texts: Iterable[str]) -> list[EncodingDifference]:
    """The `texts` with other ids by the function `encode` than by the tokenizer `expected`, with both."""
    compared = (EncodingDifference(text, expected.encode(text).tolist(), list(encode(text))) for text in texts)
    return [each for each in compared if each.expected != each.found]


def decoding_differences(tokenizer: Tokenizer, decode: Any, texts: Iterable[str]) -> list[list[int]]:
    """The ids with other text by the function `decode` than by `tokenizer`: those of `texts`, and BROKEN.

    Only tokenizers of bytes are compared. The decoders of others strip spaces in ways of their own.
    """
    ids_of_bytes = _ids_of_bytes(tokenizer)
    if not ids_of_bytes:
        return []
    compared = [tokenizer.encode(text).tolist() for text in texts]
    compared += [[ids_of_bytes[byte] for byte in data] for data in BROKEN]
    return [ids for ids in compared if decode(ids) != tokenizer.decode(ids)]


def _ids_of_bytes(tokenizer: Tokenizer) -> list[int]:
    """The id of each byte, or an empty list if the tokenizer is not made of bytes."""
    if isinstance(tokenizer, ByteTokenizer):
        return list(range(256))
    if isinstance(tokenizer, TiktokenTokenizer):
        return [tokenizer.ranks[bytes([byte])] for byte in range(256)]
    return []


def write_missing(
    folder: Path, tokenizer: Tokenizer, model_file: Path | None, context: int, start: Sequence[int] | None = ()
) -> str:
    """Write to `folder` the missing files of `tokenizer` for Hugging Face.

    They are tokenizer.json, unless `tokenizer` was read from one, and tokenizer_config.json, or its missing fields.
    `model_file` is the file of a sentencepiece model. `context` is the model's number of positions, and `start` are the
    ids in front of each text of the training, or None if a chat template decides. Returns what could not be written,
    or "".
    """
    names: dict[str, str] = {}
    if not (folder / JSON).exists():
        try:
            made, names = _made(tokenizer, model_file, start)
        except InexpressibleError as error:
            return f"no {JSON} is known to encode as training did: {error}"
        (folder / JSON).write_text(made)
    written = read_config(folder)
    if "tokenizer_class" not in written:
        names = names or {"eos_token": _name(folder / JSON, tokenizer.eod)}
        config = {**_config(names, context), **written}
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return ""


def _made(tokenizer: Tokenizer, model_file: Path | None, start: Sequence[int] | None) -> tuple[str, dict[str, str]]:
    """Return tokenizer.json for `tokenizer`, and its special tokens by the names of tokenizer_config.json.

    Raises InexpressibleError if no tokenizer.json is known to equal it.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return bytes_json(), {"eos_token": BYTES_END}
    if isinstance(tokenizer, TiktokenTokenizer):
        made = tiktoken_json(tokenizer)
        _check_alike(tokenizer, made, tokenizer.special_tokens)
        return made, {"eos_token": tokenizer.end}
    if isinstance(tokenizer, SentencePieceTokenizer) and model_file is not None:
        names = sentencepiece_names(model_file)
        if start is not None and not start:
            # What no text of the training began with must not become the context of a first token elsewhere.
            names.pop("bos_token", None)
        return sentencepiece_json(tokenizer, model_file, start or ()), names
    raise InexpressibleError("its file was not found")


def _check_alike(tokenizer: Tokenizer, made: str, symbols: Iterable[str]) -> None:
    """Raise InexpressibleError if the tokenizer.json `made` encodes a check text with `symbols` otherwise."""
    read = tokenizers_library().Tokenizer.from_str(made)
    read.encode_special_tokens = True  # special tokens that stand in a text are text, as in training

    def encode(text: str) -> list[int]:
        return read.encode(text, add_special_tokens=False).ids

    wrong = differences(tokenizer, encode, check_texts(symbols))
    if wrong:
        raise InexpressibleError(f"{wrong[0].text[:60]!r} would be {wrong[0].found[:12]}, not {wrong[0].expected[:12]}")


def read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json in `folder`, or an empty dict if there is none.

    Raises DataError if the file holds no JSON object.
    """
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        config = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: holds no JSON object")
    return config


_AS_IT_IS = """from transformers import PreTrainedTokenizerFast


class AsItIs(PreTrainedTokenizerFast):
    \"\"\"Reads tokenizer.json as it is. AutoTokenizer takes this class with trust_remote_code alone.\"\"\"
"""


def read_as_it_is(folder: Path) -> None:
    """Change the files in `folder`: AutoTokenizer must read tokenizer.json as it is.

    The class chosen by transformers for the model_type might not.
    """
    # For some values of model_type, qwen2 among them, transformers 5 ignores tokenizer_class unless there is an
    # auto_map (AutoTokenizer.from_pretrained, transformers 5.23). Without trust_remote_code it then drops the auto_map,
    # but it follows tokenizer_class. With trust_remote_code it takes the class in the file CODE, which does the same.
    written = read_config(folder)
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    written["auto_map"] = {"AutoTokenizer": [None, f"{CODE.removesuffix('.py')}.AsItIs"]}
    (folder / CONFIG).write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    (folder / CODE).write_text(_AS_IT_IS)


def compare_with_transformers(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Compare AutoTokenizer, with the files in `folder`, with `tokenizer` on the check texts.

    Returns what was compared, as JSON types, and a list of problems: texts with other ids, another end
    token, or an end token outside the `vocab_size` ids of the model.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the classes of transformers have no common error for files that they cannot read
        return {}, [f"AutoTokenizer cannot read it ({type(error).__name__}: {' '.join(str(error).split())[:200]})"]
    texts = check_texts([str(token) for token in auto.added_tokens_decoder.values()][:_SYMBOLS])

    def encode(text: str) -> list[int]:
        # Training adds no token, and reads special tokens that stand in a text as text.
        return auto(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    wrong = differences(tokenizer, encode, texts)
    problems = []
    if wrong:
        first = wrong[0]
        problems.append(
            f"{len(wrong)} of {len(texts)} texts are encoded otherwise by AutoTokenizer ({type(auto).__name__}), such "
            f"as {first.text[:60]!r}: {first.expected[:12]} in training, {first.found[:12]} now"
        )
    decoded = decoding_differences(tokenizer, auto.decode, texts)
    if decoded:
        problems.append(f"AutoTokenizer decodes {len(decoded)} lists of ids otherwise, such as {decoded[0][:12]}")
    if auto.eos_token_id != tokenizer.eod:
        problems.append(f"the end token is {auto.eos_token!r} (id {auto.eos_token_id}), in training id {tokenizer.eod}")
    if tokenizer.eod >= vocab_size:
        problems.append(f"the end token's id {tokenizer.eod} is outside the model's vocabulary of {vocab_size}")
    comparison = {
        "reference": f"transformers {transformers.__version__}, {type(auto).__name__}",
        "texts": len(texts),
        "different": len(wrong),
        "decoded_otherwise": len(decoded),
        "first_difference": wrong[0]._asdict() if wrong else None,
        "end_token_ids": {"training": tokenizer.eod, "AutoTokenizer": auto.eos_token_id},
        "added_to_each_text": auto("")["input_ids"],
    }
    return comparison, problems


def _config(names: dict[str, str], context: int) -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer.json to be read as it is."""
    # transformers 4 and 5 use tokenizer.json unchanged for this class. Another class, which transformers may choose by
    # the model_type of config.json, builds a tokenizer of its own out of the vocabulary.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        # Training puts no token before or after a document's text, and decoding must give the text back unchanged.
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def _name(path: Path, token: int) -> str:
    """The text of the token id `token` in a tokenizer.json."""
    import tokenizers

    name = tokenizers.Tokenizer.from_file(str(path)).id_to_token(token)
    assert name is not None, f"{path} has no token {token}"
    return name


# sentencepiece


def sentencepiece_names(model_file: Path) -> dict[str, str]:
    """The special tokens of a sentencepiece model by the names of tokenizer_config.json, such as eos_token."""
    model = _proto(model_file)
    ids = {"bos_token": model.trainer_spec.bos_id, "eos_token": model.trainer_spec.eos_id}
    ids |= {"unk_token": model.trainer_spec.unk_id, "pad_token": model.trainer_spec.pad_id}
    return {name: model.pieces[number].piece for name, number in ids.items() if number >= 0}


def sentencepiece_json(tokenizer: SentencePieceTokenizer, model_file: Path, start: Sequence[int] = ()) -> str:
    """The sentencepiece model in `model_file` as a tokenizer.json, which puts the ids `start` in front of a text.

    Raises InexpressibleError if the model is neither unigram nor BPE, or if the tokenizer.json would encode any of the
    check texts differently from the sentencepiece library.
    """
    model = _proto(model_file)
    types = model.SentencePiece
    symbols = [piece.piece for piece in model.pieces if piece.type not in (types.NORMAL, types.UNUSED, types.BYTE)]
    library = tokenizers_library()
    converted = _converted(library, model)
    if start:
        pieces = [model.pieces[number].piece for number in start]
        converted.post_processor = library.processors.TemplateProcessing(
            single=[*pieces, "$A"], special_tokens=list(zip(pieces, start, strict=True))
        )
    made: str = converted.to_str()
    _check_alike(tokenizer, made, symbols)
    return made


def _proto(model_file: Path) -> Any:
    """The parsed sentencepiece model file (sentencepiece_model.proto). Raises ConfigError without protobuf."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(f"{model_file} is read with the package protobuf: pip install protobuf") from error
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(model_file.read_bytes())
    return model


def _converted(library: Any, model: Any) -> Any:
    """A `tokenizers.Tokenizer` of the pieces, scores and normalizer of a sentencepiece model.

    Raises InexpressibleError unless the model is unigram or BPE.
    """
    types = model.SentencePiece
    spec = model.trainer_spec
    if spec.model_type == spec.UNIGRAM:
        made = library.Tokenizer(
            library.models.Unigram(_unigram(model), unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
        )
    elif spec.model_type == spec.BPE:
        made = library.Tokenizer(
            library.models.BPE(
                {piece.piece: number for number, piece in enumerate(model.pieces)},
                _merges(model),
                unk_token=model.pieces[spec.unk_id].piece,
                fuse_unk=True,  # as in sentencepiece: unknown characters in a row are one id
                byte_fallback=spec.byte_fallback,
            )
        )
        # No merges make a user-defined symbol of several characters, so the text is cut around such symbols first. If
        # the model also puts a prefix before a text, each part would get one. The check texts then show the difference.
        users = [piece.piece for piece in model.pieces if piece.type == types.USER_DEFINED and len(piece.piece) > 1]
        made.add_tokens([library.AddedToken(name, normalized=False, special=False) for name in users])
    else:
        raise InexpressibleError("the sentencepiece model is neither unigram nor BPE")
    made.normalizer = _normalizer(library, model.normalizer_spec)
    made.decoder = _decoder(library, model)
    reserved = [piece.piece for piece in model.pieces if piece.type in (types.CONTROL, types.UNKNOWN)]
    made.add_special_tokens([library.AddedToken(name, normalized=False, special=True) for name in reserved])
    return made


def _unigram(model: Any) -> list[tuple[str, float]]:
    """The pieces, with scores for a Viterbi search with sentencepiece's result (unigram_model.cc)."""
    types = model.SentencePiece
    learned = [piece.score for piece in model.pieces if piece.type == types.NORMAL]
    scores = []
    for piece in model.pieces:
        score = piece.score
        if piece.type == types.USER_DEFINED:  # sentencepiece chooses it wherever it occurs
            score = len(piece.piece) * max(learned) - 0.1
        elif piece.type in (types.CONTROL, types.UNKNOWN, types.BYTE):  # chosen only for unknown characters
            score = min(learned) - 1000.0
        scores.append((piece.piece, score))
    return scores


def _merges(model: Any) -> list[tuple[str, str]]:
    """The pairs of pieces for each piece, best score first. sentencepiece joins pairs in this order."""
    types = model.SentencePiece
    numbers = {piece.piece: at for at, piece in enumerate(model.pieces) if piece.type in (types.NORMAL, types.UNUSED)}
    ordered = []
    for name in numbers:
        for cut in range(1, len(name)):
            left = name[:cut]
            right = name[cut:]
            if left in numbers and right in numbers:
                order = (-model.pieces[numbers[name]].score, numbers[left], numbers[right])
                ordered.append((order, (left, right)))
    return [pair for _, pair in sorted(ordered)]


def _normalizer(library: Any, spec: Any) -> Any:
    """The normalizer of a sentencepiece model."""
    steps = []
    if spec.precompiled_charsmap:
        steps.append(library.normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # At the end of a text, sentencepiece also strips U+2581, its own sign for a space.
        steps.append(library.normalizers.Replace(library.Regex(r"\A +|[ ▁]+\z"), ""))
        steps.append(library.normalizers.Replace(library.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(library.normalizers.Prepend("▁"))
    if spec.escape_whitespaces:
        steps.append(library.normalizers.Replace(" ", "▁"))
    return library.normalizers.Sequence(steps)


def _decoder(library: Any, model: Any) -> Any:
    """The decoder of a sentencepiece model."""
    steps = [library.decoders.Replace("▁", " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(library.decoders.ByteFallback())
    steps.append(library.decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(library.decoders.Strip(" ", 1, 0))
    return library.decoders.Sequence(steps)
