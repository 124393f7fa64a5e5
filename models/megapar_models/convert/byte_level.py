"""tokenizer.json for tokenizers of bytes and of byte pairs. A character stands for each byte, as in GPT-2."""

from itertools import pairwise
from typing import Any

from megapar.base.errors import ConfigError
from megapar.data.tokenizer import TiktokenTokenizer
from megapar_models.convert.word_pattern import InexpressibleError, oniguruma

BYTES_END = "<|endoftext|>"
_MOST_UNUSED = 10_000  # ids without a token that get a name; each of them takes time when the file is read


def bytes_json() -> str:
    """A tokenizer.json with the ids of `ByteTokenizer`: byte-level BPE without merges."""
    library = tokenizers_library()
    symbols = _byte_symbols()
    made = library.Tokenizer(library.models.BPE({symbol: byte for byte, symbol in enumerate(symbols)}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(BYTES_END, normalized=False, special=True)])
    return made.to_str()


def tiktoken_json(tokenizer: TiktokenTokenizer) -> str:
    """A tokenizer.json with the ids of `tokenizer`.

    Raises InexpressibleError if the pattern or the special tokens cannot be written so that the ids are the same.
    """
    library = tokenizers_library()
    pattern = oniguruma(tokenizer.pattern)
    special = _special_in_order(tokenizer)
    symbols = _byte_symbols()

    def name(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    vocabulary = {name(token): rank for token, rank in tokenizer.ranks.items()}
    # A name with a space stands for no bytes, so no text is encoded to it.
    vocabulary |= {f"<unused {rank}>": rank for rank in _gaps(tokenizer)}
    pairs = [(name(left), name(right)) for left, right in merges(tokenizer.ranks)]
    # Like tiktoken, ignore_merges first looks for the whole word. Some tokens are the result of no merges.
    made = library.Tokenizer(library.models.BPE(vocabulary, pairs, ignore_merges=True))
    try:
        # Text between matches is left out, as tiktoken does.
        words = library.pre_tokenizers.Split(library.Regex(pattern), "removed", invert=True)
    except Exception as error:  # the library raises nothing narrower
        raise InexpressibleError(
            f"the tokenizers library refuses its pattern: {' '.join(str(error).split())}"
        ) from error
    bytes_of_word = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = library.pre_tokenizers.Sequence([words, bytes_of_word])
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(text, normalized=False, special=True) for text in special])
    for text, token in tokenizer.special_tokens.items():
        if made.token_to_id(text) != token:
            raise InexpressibleError(
                f"its special token {text!r} cannot have the id {token}: {text!r} is the text of another token, or the "
                "id that of another special token"
            )
    return made.to_str()


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens to be joined as tiktoken does, lowest rank of the result first.

    tiktoken joins any two neighbours if their bytes are a token, lowest rank first, leftmost first. As long as no join
    crosses a token's ends, the joins within are those of its bytes alone. So every joined token is made of one pair,
    the last one in its bytes alone. No other pair is ever joined to it.
    """
    pairs = {}
    for token, rank in ranks.items():
        pair = _last_pair(token, ranks)
        if pair:
            pairs[rank] = pair
    return [pairs[rank] for rank in sorted(pairs)]


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The pair before the last join of the bytes of `token`, or None if joins make no pair."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [left + right for left, right in pairwise(parts)]
        known = [(ranks[text], at) for at, text in enumerate(joined) if text in ranks]
        if not known:
            return None
        _, at = min(known)
        parts[at : at + 2] = [joined[at]]
    if len(parts) == 2:
        return (parts[0], parts[1])
    return None


def _gaps(tokenizer: TiktokenTokenizer) -> list[int]:
    """The ids below the last rank without a token. Raises InexpressibleError if there are too many."""
    last = max(tokenizer.ranks.values())
    if last - len(tokenizer.ranks) > _MOST_UNUSED:
        raise InexpressibleError(f"more than {_MOST_UNUSED} of its ids have no token")
    return sorted({*range(last)} - {*tokenizer.ranks.values()})


def _special_in_order(tokenizer: TiktokenTokenizer) -> list[str]:
    """The names of all ids from the last rank on: special tokens, and names for ids between them.

    The tokenizers library numbers special tokens in their order. Within the model's vocabulary they could have any id,
    but there ignore_merges would find them in text.
    Raises InexpressibleError if a special token has an id among those of the ranks.
    """
    first = max(tokenizer.ranks.values()) + 1
    names = {token: text for text, token in tokenizer.special_tokens.items()}
    for token, text in names.items():
        if token < first:
            raise InexpressibleError(f"its special token {text!r} with id {token}, below the last rank, {first - 1}")
    last = max(names)
    if last - first - len(names) >= _MOST_UNUSED:
        raise InexpressibleError(f"more than {_MOST_UNUSED} of its ids have no token")
    return [names.get(token, f"<|unused {token}|>") for token in range(first, last + 1)]


def _byte_symbols() -> list[str]:
    """The character for each byte in byte-level BPE (GPT-2).

    A printable byte stands for itself. The others get the characters from 256 on, in the order of the bytes.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizers_library() -> Any:
    """The `tokenizers` library. Raises ConfigError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("tokenizer.json is written with the package tokenizers: pip install tokenizers") from error
    return tokenizers
