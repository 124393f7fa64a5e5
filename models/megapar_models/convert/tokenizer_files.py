"""Tokenizer files of Hugging Face that encode a text as training did, for tokenizers that have no such files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megapar.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from megapar.errors import ConfigError

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
CODE = "tokenizer_as_it_is.py"
_SYMBOLS = 32  # special tokens that texts are made of; some tokenizers reserve hundreds

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
    """TEXTS, and texts that hold the `symbols`, such as special tokens: alone, at the start, inside words."""
    added = [text for symbol in symbols for text in (symbol, f"{symbol} a{symbol}b", f"one {symbol}\n{symbol}two")]
    return [*TEXTS, *added]


class Difference(NamedTuple):
    """A text that two tokenizers encode differently, and its ids."""

    text: str
    expected: list[int]
    found: list[int]


def differences(expected: Tokenizer, encode: Any, texts: Iterable[str]) -> list[Difference]:
    """The `texts` for which the ids of the function `encode` are not those of the tokenizer `expected`."""
    found = (Difference(text, expected.encode(text).tolist(), list(encode(text))) for text in texts)
    return [each for each in found if each.expected != each.found]


def write_missing(folder: Path, tokenizer: Tokenizer, model_file: Path | None, context: int) -> str:
    """Write to `folder` what Hugging Face needs of `tokenizer` and the folder lacks.

    That is tokenizer.json for bytes and for the sentencepiece model in `model_file`, and tokenizer_config.json, or the
    fields that it lacks. `context` is the model's number of positions. Returns what could not be written, or "".
    """
    names: dict[str, str] = {}
    made: str | None
    if not (folder / JSON).exists():
        if isinstance(tokenizer, ByteTokenizer):
            made = bytes_json()
            names = {"eos_token": _BYTES_END}
        elif isinstance(tokenizer, SentencePieceTokenizer) and model_file is not None:
            made = sentencepiece_json(tokenizer, model_file)
            names = sentencepiece_names(model_file)
        else:
            return f"a tokenizer of its kind has no {JSON}"
        if made is None:
            return f"no {JSON} of the `tokenizers` library encodes as the sentencepiece model does"
        (folder / JSON).write_text(made)
    written = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    if "tokenizer_class" not in written:
        names = names or {"eos_token": _name(folder / JSON, tokenizer.eod)}
        facts = {**_config(names, context), **written}
        (folder / CONFIG).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    return ""


_AS_IT_IS = """from transformers import PreTrainedTokenizerFast


class AsItIs(PreTrainedTokenizerFast):
    \"\"\"Reads tokenizer.json as it is. AutoTokenizer takes this class with trust_remote_code alone.\"\"\"
"""


def read_as_it_is(folder: Path) -> None:
    """Let AutoTokenizer read tokenizer.json in `folder` as it is, also where the class of the model_type would not.

    For some values of model_type, qwen2 among them, transformers 5 ignores tokenizer_class, unless there is an auto_map
    (AutoTokenizer.from_pretrained, transformers 5.23). Without trust_remote_code it then drops the auto_map, and does
    follow tokenizer_class. With trust_remote_code it takes the class in the file CODE, which does the same.
    """
    written = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    written["auto_map"] = {"AutoTokenizer": [None, f"{CODE.removesuffix('.py')}.AsItIs"]}
    (folder / CONFIG).write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    (folder / CODE).write_text(_AS_IT_IS)


def compare_with_transformers(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """What AutoTokenizer makes of the check texts with the files in `folder`, against `tokenizer`.

    Returns what was compared, as JSON types, and what is wrong: texts that differ, another end token, one outside the
    `vocab_size` ids of the model.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the classes of transformers raise for files that they cannot read
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
    if auto.eos_token_id != tokenizer.eod:
        problems.append(f"the end token is {auto.eos_token!r} (id {auto.eos_token_id}), in training id {tokenizer.eod}")
    if tokenizer.eod >= vocab_size:
        problems.append(f"the end token's id {tokenizer.eod} is outside the model's vocabulary of {vocab_size}")
    facts = {
        "reference": f"transformers {transformers.__version__}, {type(auto).__name__}",
        "texts": len(texts),
        "different": len(wrong),
        "first_difference": wrong[0]._asdict() if wrong else None,
        "end_token_ids": {"training": tokenizer.eod, "AutoTokenizer": auto.eos_token_id},
        "added_to_each_text": auto("")["input_ids"],
    }
    return facts, problems


def _config(names: dict[str, str], context: int) -> dict[str, Any]:
    # transformers 4 and 5 use tokenizer.json unchanged for this class. Another class, which transformers may choose by
    # the model_type of config.json, builds a tokenizer of its own out of the vocabulary.
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    # Training puts no token before or after a document's text, and text must come back as it was.
    return {
        **facts,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def _name(path: Path, token: int) -> str:
    """The text of a token id of a tokenizer.json."""
    import tokenizers

    name = tokenizers.Tokenizer.from_file(str(path)).id_to_token(token)
    assert name is not None, f"{path} has no token {token}"
    return name


# Bytes

_BYTES_END = "<|endoftext|>"


def bytes_json() -> str:
    """A tokenizer.json whose ids are those of `ByteTokenizer`: byte-level BPE that merges nothing."""
    library = _library()
    symbols = _byte_symbols()
    made = library.Tokenizer(library.models.BPE({symbol: byte for byte, symbol in enumerate(symbols)}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(_BYTES_END, normalized=False, special=True)])
    return made.to_str()


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2): itself if it is printable, else one of the
    characters from 256 on, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"{JSON} is written with the package tokenizers: pip install tokenizers") from error
    return tokenizers


# sentencepiece


def sentencepiece_names(model_file: Path) -> dict[str, str]:
    """Names of the special tokens of a sentencepiece model, as tokenizer_config.json calls them."""
    model = _proto(model_file)
    ids = {"bos_token": model.trainer_spec.bos_id, "eos_token": model.trainer_spec.eos_id}
    ids |= {"unk_token": model.trainer_spec.unk_id, "pad_token": model.trainer_spec.pad_id}
    return {name: model.pieces[number].piece for name, number in ids.items() if number >= 0}


def sentencepiece_json(tokenizer: SentencePieceTokenizer, model_file: Path) -> str | None:
    """The sentencepiece model in `model_file` as a tokenizer.json, or None if that encodes any of the check texts
    otherwise than the sentencepiece library does, or the model is neither unigram nor BPE."""
    model = _proto(model_file)
    kinds = model.SentencePiece
    symbols = [piece.piece for piece in model.pieces if piece.type not in (kinds.NORMAL, kinds.UNUSED, kinds.BYTE)]
    made = _converted(_library(), model)
    if made is None:
        return None
    made.encode_special_tokens = True  # special tokens that stand in a text are text, as in training

    def encode(text: str) -> list[int]:
        return made.encode(text, add_special_tokens=False).ids

    return None if differences(tokenizer, encode, check_texts(symbols)) else made.to_str()


def _proto(model_file: Path) -> Any:
    """What a sentencepiece model file holds (sentencepiece_model.proto)."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(f"{model_file} is read with the package protobuf: pip install protobuf") from error
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(model_file.read_bytes())
    return model


def _converted(library: Any, model: Any) -> Any:
    """A `tokenizers.Tokenizer` of the pieces, scores and normalizer of a sentencepiece model; None for other kinds of
    models than unigram and BPE."""
    kinds = model.SentencePiece
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
                fuse_unk=True,  # as sentencepiece does: unknown characters that follow each other are one id
                byte_fallback=spec.byte_fallback,
            )
        )
        # No merges make a symbol of the user that has several characters, so the text is cut around them first. Where
        # the model also puts a prefix before a text, each part would get one: the check texts then show it.
        users = [piece.piece for piece in model.pieces if piece.type == kinds.USER_DEFINED and len(piece.piece) > 1]
        made.add_tokens([library.AddedToken(name, normalized=False, special=False) for name in users])
    else:
        return None
    made.normalizer = _normalizer(library, model.normalizer_spec)
    made.decoder = _decoder(library, model)
    reserved = [piece.piece for piece in model.pieces if piece.type in (kinds.CONTROL, kinds.UNKNOWN)]
    made.add_special_tokens([library.AddedToken(name, normalized=False, special=True) for name in reserved])
    return made


def _unigram(model: Any) -> list[tuple[str, float]]:
    """Pieces and the scores with which Viterbi search finds what sentencepiece finds (unigram_model.cc)."""
    kinds = model.SentencePiece
    learned = [piece.score for piece in model.pieces if piece.type == kinds.NORMAL]
    scores = []
    for piece in model.pieces:
        score = piece.score
        if piece.type == kinds.USER_DEFINED:  # chosen wherever it stands
            score = len(piece.piece) * max(learned) - 0.1
        elif piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.BYTE):  # in a text only if it has unknown characters
            score = min(learned) - 1000.0
        scores.append((piece.piece, score))
    return scores


def _merges(model: Any) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, best score first, which is the order in which sentencepiece joins them."""
    kinds = model.SentencePiece
    numbers = {piece.piece: at for at, piece in enumerate(model.pieces) if piece.type in (kinds.NORMAL, kinds.UNUSED)}
    found = []
    for name in numbers:
        for cut in range(1, len(name)):
            left = name[:cut]
            right = name[cut:]
            if left in numbers and right in numbers:
                order = (-model.pieces[numbers[name]].score, numbers[left], numbers[right])
                found.append((order, (left, right)))
    return [pair for _, pair in sorted(found)]


def _normalizer(library: Any, spec: Any) -> Any:
    steps = []
    if spec.precompiled_charsmap:
        steps.append(library.normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(library.normalizers.Replace(library.Regex(r"\A +|[ ▁]+\z"), ""))  # it strips its own sign too
        steps.append(library.normalizers.Replace(library.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(library.normalizers.Prepend("▁"))
    if spec.escape_whitespaces:
        steps.append(library.normalizers.Replace(" ", "▁"))
    return library.normalizers.Sequence(steps)


def _decoder(library: Any, model: Any) -> Any:
    steps = [library.decoders.Replace("▁", " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(library.decoders.ByteFallback())
    steps.append(library.decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(library.decoders.Strip(" ", 1, 0))
    return library.decoders.Sequence(steps)
