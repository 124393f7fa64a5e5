"""Pairs of answers in files: a chosen and a rejected one, each with the conversation before it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megapar.base.errors import DataError
from megapar.data.tokenizer import Tokenizer
from megapar_tools.prepare.chat import ChatTemplate
from megapar_tools.prepare.chat_data import ChatCounts, Example, example_of
from megapar_tools.prepare.chat_masks import rendered
from megapar_tools.prepare.conversations import BESIDE, Conversation, Message, read_rows, repeated, side, with_beside
from megapar_tools.prepare.row_keys import Keys

MEMBERS = ("chosen", "rejected")
Pair = tuple[Conversation, Conversation]
"""The chosen and the rejected conversation. What both begin with is not trained."""


def read_pairs(files: Sequence[Path], keys: Keys | None = None) -> Iterator[Pair]:
    """Yield the pairs of .jsonl and .parquet files, in order.

    `chosen` and `rejected` are answers to `prompt`, or whole conversations. Each of the three is a text or a list of
    messages. Raises DataError for a row that is no pair, with its place.
    """
    return read_rows(files, pair_of, keys or Keys())


def pair_of(row: Any, source: str, keys: Keys) -> Pair:
    """The pair of a row. Raises ValueError with the reason if there is none, or if a key of the row is not known."""
    wanted = keys.wanted(row) if isinstance(row, Mapping) else {}
    if not all(wanted.get(name) for name in MEMBERS):
        has = ", ".join(map(str, wanted)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"has {has or 'no keys'}; a pair has prompt, chosen and rejected")
    answers = [side(wanted[name], "assistant", keys) for name in MEMBERS]
    for name, answer in zip(MEMBERS, answers, strict=True):
        if answer[-1]["role"] != "assistant":
            raise ValueError(f"{name} ends with a message of {answer[-1]['role']}, not of the assistant")
        if "prompt" not in wanted and isinstance(wanted[name], str):
            raise ValueError(f"{name} is a text without a prompt; a pair has prompt, chosen and rejected")
    prompt = _prompt_before(wanted.get("prompt"), answers, keys)
    num_prompt = len(prompt) or _common(answers)
    found = []
    for answer in answers:
        messages, beside = with_beside([*prompt, *answer], wanted, num_prompt)
        found.append(Conversation(messages, source, beside))
    same = ["messages"] if wanted.get("messages") == wanted["chosen"] else []
    keys.check_rest(wanted, ("prompt", *MEMBERS, *BESIDE, *same, *repeated(wanted, found[0].messages)))
    return found[0], found[1]


def _prompt_before(prompt: Any, answers: Sequence[Sequence[Message]], keys: Keys) -> list[Message]:
    """The messages of a prompt before both answers; none if the answers are conversations that begin with it.

    Many sets have the first question as a column beside whole conversations. Raises ValueError for a prompt that says
    something else.
    """
    if prompt is None:
        return []
    messages = side(prompt, "user", keys)
    firsts = {answer[0]["role"] for answer in answers}
    if not firsts & {"system", "user"}:
        return messages
    if not isinstance(prompt, str):
        if all(list(answer[: len(messages)]) == messages and len(answer) > len(messages) for answer in answers):
            return []
        if {message["role"] for message in messages} == {"system"} and firsts == {"user"}:
            _common(answers)
            return messages
    elif repeated({"prompt": prompt}, answers[0][: _common(answers)]):
        return []
    raise ValueError(
        "chosen and rejected are whole conversations, and prompt says something else; --pass_over prompt leaves it out"
    )


def _common(answers: Sequence[Sequence[Message]]) -> int:
    """How many messages two conversations begin with alike. Raises ValueError if they answer different prompts."""
    chosen, rejected = answers
    most = min(len(chosen), len(rejected)) - 1
    number = next((at for at in range(most) if chosen[at] != rejected[at]), most)
    for answer in answers:
        if answer[number]["role"] != "assistant":
            raise ValueError(
                f"chosen and rejected are answers to different prompts: message {number + 1} differs, and is of "
                f"{answer[number]['role']}"
            )
    return number


def members(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    max_length: int,
    too_long: Literal["refuse", "skip"],
    counts: ChatCounts,
) -> Iterator[Example]:
    """Yield both members of each pair, the chosen one first, with weights on the answers; and count them.

    Raises DataError with the place of a pair that has nothing to compare, and of one of more than `max_length` tokens
    in both together unless `too_long` is skip.
    """
    for pair in pairs:
        both = []
        place = pair[0].place
        for name, member in zip(MEMBERS, pair, strict=True):
            try:
                shown = rendered(template, member.messages, "all", member.beside)
                found = example_of(shown, tokenizer, place)
            except DataError as error:
                raise DataError(f"{place}: {name}: {error}") from None
            if not found.weights[1:].any():
                raise DataError(f"{place}: {name}: the answer is empty")
            both.append(found)
        if np.array_equal(both[0].tokens, both[1].tokens):
            raise DataError(f"{place}: chosen and rejected are the same")
        length = sum(len(example.tokens) for example in both)
        if max_length and length > max_length:
            if too_long == "refuse":
                raise DataError(
                    f"{place}: both answers have {length:,} tokens, above --max_length {max_length:,}; raise it, or "
                    "--too_long skip leaves such pairs out"
                )
            reason = f"above {max_length:,} tokens"
            counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
            continue
        for example in both:
            counts.add(example, tokenizer)
        yield from both
