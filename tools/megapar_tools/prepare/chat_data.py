"""Makes a pair of tokens with weights out of conversations: PREFIX.bin, .idx and .weights, described by PREFIX.json."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedWriter, token_dtype
from megapar.data.prepared import CHAT, sha256, sidecar_path, weights_path, write_sidecar, write_weights
from megapar.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megapar_tools.prepare.chat import ChatTemplate
from megapar_tools.prepare.chat_masks import Rendered, Turns, rendered
from megapar_tools.prepare.conversations import Conversation


@dataclass(frozen=True)
class Example:
    """A conversation as tokens. `weights` [tokens] are 1 where a token is trained as a target."""

    tokens: NDArray[np.integer]
    weights: NDArray[np.uint8]
    place: str


@dataclass
class ChatCounts:
    """What became of conversations."""

    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """By reason."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """By the name of a key of rows or messages."""
    end_tokens: set[int] = field(default_factory=set)
    """The ids of special tokens that end what is trained of a conversation."""

    def add(self, example: Example, tokenizer: Tokenizer) -> None:
        self.examples += 1
        self.tokens += len(example.tokens)
        self.trained_tokens += int(example.weights[1:].sum())
        end = end_token(example, tokenizer)
        self.end_tokens |= {end} if end is not None else set()

    def words(self) -> list[str]:
        """What was left out and passed over, in words."""
        found = [f"{count:,} left out: {reason}" for reason, count in self.left_out.items()]
        if self.passed_over:
            found.append("passed over: " + ", ".join(f"{count:,} x {key}" for key, count in self.passed_over.items()))
        return found

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / max(self.tokens, 1)


def example_of(shown: Rendered, tokenizer: Tokenizer, source: str) -> Example:
    """The tokens of a rendered conversation. A token is trained if any of its letters is.

    Raises DataError if a tokenizer without spans joins letters on both sides of a trained part.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        tokens, spans = tokenizer.encode_with_spans(shown.text)
        weights = np.zeros(len(tokens), np.uint8)
        for start, stop in shown.trained:
            weights[(spans[:, 0] < stop) & (spans[:, 1] > start)] = 1
        return Example(tokens, weights, source)
    pieces = [(tokenizer.encode(text), is_trained) for text, is_trained in _pieces(shown)]
    tokens = np.concatenate([ids for ids, _ in pieces])
    if not np.array_equal(tokens, tokenizer.encode(shown.text)):
        raise DataError(
            f"{source}: the tokenizer joins letters on both sides of a trained part; put a line break or a special "
            "token between them in the template"
        )
    weights = np.concatenate([np.full(len(ids), is_trained, np.uint8) for ids, is_trained in pieces])
    return Example(tokens, weights, source)


def end_token(example: Example, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that ends the last trained part, or None if no special token ends this part.

    White space behind the special token does not count.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        return None
    for token in example.tokens[example.weights == 1][::-1].tolist():
        if token in tokenizer.special_ids:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None


def _pieces(shown: Rendered) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is trained."""
    at = 0
    for start, stop in shown.trained:
        yield shown.text[at:start], False
        yield shown.text[start:stop], True
        at = stop
    yield shown.text[at:], False


def examples(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    turns: Turns,
    max_length: int,
    too_long: Literal["refuse", "skip"],
    counts: ChatCounts,
) -> Iterator[Example]:
    """Yield the examples, and count them.

    Raises DataError with the place of a conversation without trained tokens, and of one of more than `max_length`
    tokens unless `too_long` is skip.
    """
    for conversation in conversations:
        try:
            shown = rendered(template, conversation.messages, turns, conversation.beside)
        except DataError as error:
            raise DataError(f"{conversation.place}: {error}") from None
        found = example_of(shown, tokenizer, conversation.place)
        # The first token is no target, whatever its weight.
        if not found.weights[1:].any():
            raise DataError(f"{conversation.place}: no token would be trained; the assistant says nothing in it")
        if max_length and len(found.tokens) > max_length:
            if too_long == "refuse":
                raise DataError(
                    f"{conversation.place}: has {len(found.tokens):,} tokens, above --max_length {max_length:,}; raise "
                    "it, or --too_long skip leaves such conversations out"
                )
            reason = f"above {max_length:,} tokens"
            counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
            continue
        counts.add(found, tokenizer)
        yield found


def write_examples(
    found: Iterator[Example],
    output: Path,
    tokenizer: Tokenizer,
    description: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Write examples to the pair `output` with its weights, and write and return its sidecar.

    `description` is called when all are written. Raises DataError if there are none.
    """
    # What says that a pair is whole goes first: a kill in between must not leave it beside another pair.
    sidecar_path(output).unlink(missing_ok=True)
    weights_path(output).unlink(missing_ok=True)
    weights: list[NDArray[np.uint8]] = []
    with IndexedWriter(output, token_dtype(tokenizer.vocab_size)) as writer:
        for example in found:
            writer.add_document(example.tokens)
            weights.append(example.weights)
        if not weights:
            raise DataError(f"{output}: no conversation is left to train on")
    write_weights(output, weights)
    sidecar = description()
    write_sidecar(output, sidecar)
    return sidecar


def describe(
    files: Sequence[Path],
    spec: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    turns: Turns,
    counts: ChatCounts,
    *,
    pairs: bool = False,
) -> dict[str, Any]:
    """The sidecar of a pair of conversations, without the hashes of its files.

    `pairs`: each two documents in a row are a chosen and a rejected answer (`megapar.data.pairs`).
    """
    described = {
        "spec": spec,
        "sha256": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    if isinstance(tokenizer, SentencePieceTokenizer):  # earlier versions read them as text, but those of hf: never
        described["special_tokens"] = "parse"
    return {
        "documents": counts.examples,
        "tokens": counts.tokens,
        "tokenizer": described,
        "append_eod": False,
        "sources": [{"path": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)} for path in files],
        CHAT: {
            "template": template.place,
            "template_sha256": template.sha256,
            "template_text": template.source,
            "template_text_for_tools": template.tool_use,
            "special_tokens": dict(template.variables),
            # Only a template that writes the time has other text on another day.
            "clock": template.now.isoformat() if template.process.read_clock else None,
            "end_tokens": sorted(counts.end_tokens),
            "turns": turns,
            "trained_tokens": counts.trained_tokens,
            "left_out": counts.left_out,
            "passed_over": counts.passed_over,
            "pairs": pairs,
        },
    }


def marked(example: Example, tokenizer: Tokenizer, mark: Callable[[str], str]) -> str:
    """The text of an example, with `mark` around what is trained."""
    decode = tokenizer.decode
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        decode = tokenizer.decode_with_ends
    pieces = []
    edges = np.flatnonzero(np.diff(example.weights)) + 1
    for ids, weights in zip(np.split(example.tokens, edges), np.split(example.weights, edges), strict=True):
        text = decode([int(i) for i in ids])
        pieces.append(mark(text) if weights[:1].any() else text)
    return "".join(pieces)
