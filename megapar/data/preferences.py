"""Pairs of answers in files: a chosen and a rejected one, each with the conversation before it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megapar.data.chat import ChatTemplate
from megapar.data.chat_data import ChatCounts, Example, example_of
from megapar.data.conversations import Message, messages_of, rows
from megapar.data.tokenizer import Tokenizer
from megapar.errors import DataError

MEMBERS = ("chosen", "rejected")
Pair = tuple[Sequence[Message], Sequence[Message], str]
"""The messages of the chosen and of the rejected conversation, and their place: the path and the line or row."""


def read_pairs(files: Sequence[Path]) -> Iterator[Pair]:
    """Yield the pairs of .jsonl and .parquet files, in order.

    `chosen` and `rejected` are answers to `prompt`, or without it whole conversations. Each of the three is a text or a
    list of messages. Raises DataError for a row that is no pair, with its place.
    """
    for path in files:
        for place, row in rows(path):
            try:
                chosen, rejected = (_member(row, name) for name in MEMBERS)
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None
            yield chosen, rejected, place


def _member(row: Any, name: str) -> Sequence[Message]:
    """The conversation that ends with this answer. Raises ValueError with the reason if there is none."""
    if not isinstance(row, Mapping) or row.get(name) is None:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"has {has or 'no keys'}; a pair has prompt, chosen and rejected")
    if row.get("prompt") is not None:
        found = messages_of({"prompt": row["prompt"], "completion": row[name]})
    elif isinstance(row[name], str):
        raise ValueError(f"{name} is a text without a prompt; a pair has prompt, chosen and rejected")
    else:
        found = messages_of({"messages": row[name]})
    if found[-1]["role"] != "assistant":
        raise ValueError(f"{name} ends with a message of {found[-1]['role']}, not of the assistant")
    return found


def members(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    max_length: int,
    too_long: Literal["refuse", "skip"],
    counts: ChatCounts,
) -> Iterator[Example]:
    """Yield both members of each pair, the chosen one first, with weights on the last turn; and count them.

    Raises DataError with the place of a pair that has nothing to compare, and of one of more than `max_length` tokens
    in both together unless `too_long` is skip.
    """
    for chosen, rejected, place in pairs:
        both = []
        for name, messages in zip(MEMBERS, (chosen, rejected), strict=True):
            try:
                found = example_of(template.rendered(messages, "last"), tokenizer, place)
            except DataError as error:
                raise DataError(f"{place}: {name}: {error}") from None
            if not found.weights[1:].any():
                raise DataError(f"{place}: {name}: the answer is empty")
            both.append(found)
        if np.array_equal(both[0].tokens, both[1].tokens):
            raise DataError(f"{place}: chosen and rejected are the same")
        length = sum(len(member.tokens) for member in both)
        if max_length and length > max_length:
            if too_long == "refuse":
                raise DataError(
                    f"{place}: both answers have {length:,} tokens, above --max_length {max_length:,}; raise it, or "
                    "--too_long skip leaves such pairs out"
                )
            reason = f"above {max_length:,} tokens"
            counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
            continue
        for member in both:
            counts.add(member, tokenizer)
        yield from both
