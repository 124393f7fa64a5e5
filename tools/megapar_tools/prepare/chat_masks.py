"""Which characters of a rendered conversation are trained: the assistant's turns, with what ends a turn.

A template marks them by `{% generation %}`. Without that tag they are found by prefixes: a conversation cut before and
behind a turn must be a beginning of the whole one. What messages say and a template does not write is refused.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megapar.base.errors import DataError
from megapar_tools.prepare.chat import ChatTemplate
from megapar_tools.prepare.conversations import THOUGHTS, ConversationContext, Message

Turns = Literal["all", "last"]
# A template adds it where an answer has no thoughts. It is no answer.
_NO_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")
_OPENED_THOUGHTS = re.compile(r"<think>\s*$")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans [start, stop) of its characters that are trained."""

    text: str
    trained: Sequence[tuple[int, int]]


def rendered(
    template: ChatTemplate, messages: Sequence[Message], turns: Turns = "all", beside: ConversationContext | None = None
) -> Rendered:
    """The text of a conversation with its trained spans.

    Raises DataError if the template cannot be masked: if the text before a turn depends on what comes after it. It
    raises DataError too if the template does not write what the messages, their calls and their thoughts say.
    """
    view = _View(template, messages, beside or ConversationContext())
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [
        number for number in (answers[-1:] if turns == "last" else answers) if number not in view.beside.untrained
    ]
    text = view.text(messages)
    found: list[tuple[int, int]] = []
    if _MARK.search(template.source_for(view.beside)):
        for number, spans in zip(answers, _marked(view, text, answers, trained == answers), strict=True):
            found += spans if number in trained else []
    else:
        found = [_between_prefixes(view, text, number, turns) for number in trained]
    check_written(view, trained)
    return Rendered(text, found)


@dataclass(frozen=True)
class _View:
    """A conversation seen through a template."""

    template: ChatTemplate
    messages: Sequence[Message]
    beside: ConversationContext

    def text(self, messages: Sequence[Message], **how: Any) -> str:
        return self.template.text(messages, beside=self.beside, **how)

    def refused(self, why: str) -> DataError:
        return DataError(f"the template {self.template.place} {why}")


# Marked by the template


def _marked(view: _View, text: str, answers: Sequence[int], together: bool) -> list[list[tuple[int, int]]]:
    """The marked spans of each answer. A template may mark a turn in several parts, or in none.

    `together`: all spans are wanted, and the first answer gets them.
    """
    parts, plain = _parts(view, view.messages)
    if plain != text:
        raise view.refused("changes what is between generation tags; it cannot be masked")
    spans = [span for span, _ in parts]
    if together:
        return [spans, *([] for _ in answers[1:])]
    edges = []
    for number in answers:
        # What is marked before a turn is marked in the conversation that ends there, too.
        before = _parts(view, view.messages[:number], add_generation_prompt=True)[0] if number else []
        if [letters for _, letters in before] != [letters for _, letters in parts[: len(before)]]:
            raise view.refused(f"marks other parts up to message {number + 1} if nothing follows; it cannot be masked")
        edges.append(len(before))
    return [spans[first:last] for first, last in zip(edges, [*edges[1:], len(spans)], strict=True)]


def _parts(
    view: _View, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> tuple[list[tuple[tuple[int, int], str]], str]:
    """The marked spans of a conversation, each with its letters, and the text without the marks."""
    # Letters that no message can have by chance.
    key = os.urandom(16).hex()
    first, last = f"<{key}[", f"]{key}>"
    whole = view.text(messages, marks=(first, last), add_generation_prompt=add_generation_prompt)
    found: list[tuple[tuple[int, int], str]] = []
    plain, start = "", 0
    for piece in re.split(f"({re.escape(first)}|{re.escape(last)})", whole):
        if piece == first:
            start = len(plain)
        elif piece == last:
            found.append(((start, len(plain)), plain[start:]))
        else:
            plain += piece
    return found, plain


# Found by prefixes


def _between_prefixes(view: _View, text: str, number: int, turns: Turns) -> tuple[int, int]:
    """The trained span of the answer `number`."""
    message, messages = view.messages[number], view.messages
    through = view.text(messages[: number + 1])
    if not text.startswith(through):
        remedy = ", or train --turns last" if turns == "all" else ""
        raise view.refused(
            f"cannot be masked: what it writes up to message {number + 1} changes with what follows; mark the "
            f"assistant's text in it with {{% generation %}}{remedy}"
        )
    key = _key(through)
    # The turn with another text in place of all that the message says: what is before the text is not the answer.
    plain = view.text([*messages[:number], {"role": message["role"], "content": key}])
    if number:
        prompt = view.text(messages[:number], add_generation_prompt=True)
    else:  # many templates refuse a conversation without messages
        prompt = plain.partition(key)[0]
        prompt = prompt[: len(prompt) - _no_thoughts_at_end(prompt)]
    if not through.startswith(prompt):
        # A prompt may begin thoughts that the template leaves out of a turn.
        prompt = _OPENED_THOUGHTS.sub("", prompt)
    if not through.startswith(prompt):
        raise view.refused(
            f"cannot be masked: its generation prompt is not the beginning of message {number + 1}; mark the "
            "assistant's text in it with {% generation %}"
        )
    before, _, behind = plain.partition(key)
    added = before.removeprefix(prompt)
    opened = _OPENED_THOUGHTS.search(prompt)
    is_empty = _NO_THOUGHTS.fullmatch((opened.group() if opened else "") + added)
    is_added = is_empty and not _thoughts(message) and not _NO_THOUGHTS.match(message["content"])
    start = len(prompt)
    if is_added and through.startswith(added, start):
        start += len(added)
    # White space behind what ends a turn is no part of it. If nothing else follows any text, white space ends the turn.
    return start, len(through.rstrip()) if behind.strip() else len(through)


def _no_thoughts_at_end(text: str) -> int:
    """How many letters at the end of a text are empty thoughts."""
    at = text.rfind("<think>")
    return len(text) - at if at >= 0 and _NO_THOUGHTS.fullmatch(text, at) else 0


# What messages say is written


def check_written(view: _View, trained: Sequence[int]) -> None:
    """Raise DataError if the template leaves out what a message says.

    A text, the name or an argument of a call, the name of a tool, or the thoughts of one of the messages `trained`.
    Each is looked for by a number of its own that is put behind it: a name may stand elsewhere, too.
    """
    key = _key(repr(view.messages))
    said: list[str] = []

    def sign(what: str) -> str:
        said.append(what)
        return f"{key}{len(said) - 1:05d}"

    messages = [_signed(message, number, number in trained, sign) for number, message in enumerate(view.messages)]
    tools = view.beside.tools
    if tools is not None:
        tools = [_signed_tool(tool, sign) for tool in tools]
    text = view.template.text(messages, beside=replace(view.beside, tools=tools))
    for number, what in enumerate(said):
        if f"{key}{number:05d}" not in text:
            raise view.refused(f"does not write {what}")
    if view.beside.documents is not None and not view.template.reads("documents"):
        raise view.refused("does not write documents; --pass_over documents leaves them out")
    unread = [name for name in view.beside.options if not view.template.reads(name)]
    if unread:
        raise view.refused(
            f"does not read {' '.join(unread)} of chat_template_kwargs; --pass_over chat_template_kwargs leaves all out"
        )


def _signed(message: Message, number: int, trained: bool, sign: Any) -> Message:
    whose = f"of message {number + 1} ({message['role']})"
    changed = dict(message)
    content = message["content"]
    if content.strip():
        changed["content"] = content + sign(f"the text {whose}")
    if trained and "</think>" in content:
        inner, end, rest = changed["content"].partition("</think>")
        changed["content"] = inner + sign(f"the thoughts {whose}, which are in its text") + end + rest
    if trained and _thoughts(message):
        mark = sign(
            f"the thoughts {whose}; if it drops those of earlier turns, train --turns last; "
            f"--pass_over {' '.join(THOUGHTS)} leaves all thoughts out"
        )
        changed |= {name: message[name] + mark for name in THOUGHTS if name in message}
    if message.get("tool_calls"):
        changed["tool_calls"] = [_signed_call(call, whose, sign) for call in message["tool_calls"]]
    return changed


def _signed_call(call: Any, whose: str, sign: Any) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise DataError(f"a call {whose} without a name: {str(call)[:60]!r}")
    name = inner["name"]
    changed = {**inner, "name": name + sign(f"the call of {name} {whose}")}
    arguments = inner.get("arguments")
    if isinstance(arguments, Mapping):
        number = sign(f"the arguments of the call of {name} {whose}")
        changed["arguments"] = {**arguments, number: number}
    elif isinstance(arguments, str):
        changed["arguments"] = arguments + sign(f"the arguments of the call of {name} {whose}")
    return {**call, "function": changed} if "function" in call else changed


def _signed_tool(tool: Any, sign: Any) -> Any:
    inner = tool.get("function", tool)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise DataError(f"a tool without a name: {str(tool)[:60]!r}")
    changed = {**inner, "name": inner["name"] + sign(f"the tool {inner['name']}; --pass_over tools leaves tools out")}
    return {**tool, "function": changed} if "function" in tool else changed


def _thoughts(message: Message) -> str:
    return next((message[name] for name in THOUGHTS if message.get(name)), "")


def _key(text: str) -> str:
    """A number that is in no text by chance. Templates may change the case of letters, but no digits."""
    return str(int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), 16))[:30]
