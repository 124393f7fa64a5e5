"""Conversations in files: messages, ShareGPT, alpaca, prompt and completion, in .jsonl or .parquet.

Every key of a row or message is used, passed over because it has no meaning, or named in a refusal
(`megapar_tools.prepare.row_keys`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megapar.base.errors import ConfigError, DataError, reason_of
from megapar_tools.prepare.corpus import open_parquet
from megapar_tools.prepare.row_keys import Keys

T = TypeVar("T")

Message = Mapping[str, Any]
"""A role and a content. A template may read further keys, such as reasoning_content."""

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts. The first one with a value is taken."""
_TRAINED = ("weight", "train", "training", "loss")  # 0 or false: the message is not trained
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SHAREGPT_ROLES |= {"tool": "tool", "observation": "tool", "function": "tool"}
_FORMS = "messages, conversations, instruction with output, or prompt with completion"
BESIDE = ("tools", "functions", "documents", "chat_template_kwargs", "system", "system_prompt")
"""What any form of a row may have beside its messages."""


@dataclass(frozen=True)
class ConversationContext:
    """What belongs to a conversation beside its messages.

    `tools`, `documents` and `options` (chat_template_kwargs) are for the template. `untrained` are the numbers of the
    assistant's messages that are not trained.
    """

    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Conversation:
    """Messages, and where they stand: the path, with the number of the line or row."""

    messages: Sequence[Message]
    place: str
    beside: ConversationContext = field(default_factory=ConversationContext)


def read_conversations(files: Sequence[Path], keys: Keys | None = None) -> Iterator[Conversation]:
    """Yield the conversations of .jsonl and .parquet files, in order.

    Raises ConfigError for another kind of file. Raises DataError for a row that is no conversation, with its place.
    """
    return read_rows(files, conversation_of, keys or Keys())


def read_rows(files: Sequence[Path], of_row: Callable[[Any, str, Keys], T], keys: Keys) -> Iterator[T]:
    """Yield `of_row(row, place, keys)` of each row. Where it raises ValueError, raise DataError with the place."""
    for path in files:
        for place, row in rows(path):
            try:
                yield of_row(row, place, keys)
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a .jsonl or .parquet file. Raises ConfigError for another, DataError for no JSON."""
    if path.suffix == ".parquet":
        number = 0
        for batch in open_parquet(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", _without_nulls(row)
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}: line {number}: no JSON: {reason_of(error)}") from None
                yield f"{path}: line {number}", row
    else:
        raise ConfigError(f"--input {path}: conversations are read from .jsonl and .parquet")


def _without_nulls(value: Any) -> Any:
    """A value of Arrow without keys that are null: all rows have all keys there, as have all calls of a tool."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def conversation_of(row: Any, source: str, keys: Keys) -> Conversation:
    """The conversation of a row, in whichever of the known forms it is.

    Raises ValueError with the reason if it is none, and if it has a key that is neither used nor without meaning.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}, not an object with {_FORMS}")
    row = keys.wanted(row)
    used: tuple[str, ...]
    prompt: Sequence[Message] = ()
    if "messages" in row:
        used, found = ("messages",), [_message(item, keys) for item in _list(row, "messages")]
    elif "conversations" in row:
        used, found = ("conversations",), [_sharegpt(item, keys) for item in _list(row, "conversations")]
    elif "instruction" in row and "output" in row:
        used, found = ("instruction", "input", "output", "history"), _alpaca(row)
    elif "prompt" in row and "completion" in row:
        prompt = side(row["prompt"], "user", keys)
        used, found = ("prompt", "completion"), [*prompt, *side(row["completion"], "assistant", keys)]
    else:
        raise ValueError(f"has {', '.join(map(str, row)) or 'no keys'}; it needs {_FORMS}")
    messages, beside = with_beside(found, row, len(prompt))
    keys.check_rest(row, (*used, *BESIDE, *repeated(row, messages)))
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no message of the assistant, so nothing could be trained")
    return Conversation(messages, source, beside)


def with_beside(
    messages: Sequence[Message], row: Mapping[str, Any], num_prompt: int
) -> tuple[Sequence[Message], ConversationContext]:
    """The messages of a conversation, with the row's system message, and what the row says beside them.

    The first `num_prompt` messages are not trained, nor are those that say so. Raises ValueError for what a row says
    that cannot be followed.
    """
    found = list(messages)
    said = [row[key] for key in ("system", "system_prompt") if row.get(key)]
    if not all(isinstance(system, str) for system in said):
        raise ValueError(f"system is {str(said[0])[:40]!r}, not a text")
    if said and found and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": said[0]})
        num_prompt += bool(num_prompt)
    if said and any(system != found[0]["content"] for system in said):
        raise ValueError("has several system messages, which differ: " + ", ".join(repr(text[:40]) for text in said))
    untrained = {number for number, message in enumerate(found) if number < num_prompt or not _is_trained(message)}
    options = row.get("chat_template_kwargs", {})
    options = _from_json(options, "chat_template_kwargs", dict)
    wrong = set(options) & {"messages", "tools", "documents", "add_generation_prompt"}
    if wrong:
        raise ValueError(f"chat_template_kwargs has {' '.join(sorted(wrong))}, which are no options of a template")
    documents = _from_json(row["documents"], "documents", list) if "documents" in row else None
    plain = [{key: value for key, value in message.items() if key not in _TRAINED} for message in found]
    numbers = frozenset(number for number in untrained if found[number]["role"] == "assistant")
    return plain, ConversationContext(_tools(row), documents, options, numbers)


def repeated(row: Mapping[str, Any], messages: Sequence[Message]) -> list[str]:
    """The keys prompt and text of a row if they say nothing but what its messages say.

    Many sets have the first question as a column, or the whole conversation as one text.
    """
    contents = [message["content"].strip() for message in messages]
    found = []
    for key in ("prompt", "text"):
        text = row.get(key)
        if not isinstance(text, str):
            continue
        # Of a prompt the messages are the most: a short content may stand in any text by chance.
        holds_all = all(content in text for content in contents) and (
            key == "text" or 2 * sum(map(len, contents)) > len(text)
        )
        if text.strip() in contents or holds_all:
            found.append(key)
    return found


def _is_trained(message: Message) -> bool:
    """Whether a message is to be trained by what it says itself. Raises ValueError for what is neither yes nor no."""
    said = {key: message[key] for key in _TRAINED if key in message}
    for key, value in said.items():
        if value not in (0, 1):
            raise ValueError(f"a message of {message['role']} has {key}={str(value)[:40]!r}; 0 and 1 can be followed")
        if value and message["role"] != "assistant":
            raise ValueError(f"a message of {message['role']} has {key}={value}, and the assistant's alone are trained")
    if len(set(map(bool, said.values()))) > 1:
        raise ValueError(f"a message has {' and '.join(said)}, which disagree")
    return all(said.values())


def _tools(row: Mapping[str, Any]) -> Sequence[Any] | None:
    """The tools of a row: a list of objects, or JSON text of one. Entries of functions are tools without a type."""
    if "tools" in row and "functions" in row:
        raise ValueError("has tools and functions, which say the same; leave one of them")
    if "functions" in row:
        named = _from_json(row["functions"], "functions", list)
        return [item if "function" in item else {"type": "function", "function": item} for item in named]
    return _from_json(row["tools"], "tools", list) if row.get("tools") is not None and row["tools"] != "" else None


def _from_json(value: Any, key: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """A value that may be JSON text. Raises ValueError unless it is a `kind`, and a list unless it is of objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{key} is no JSON: {reason_of(error)}") from None
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(x, Mapping) for x in value)):
        raise ValueError(f"{key} is {str(value)[:40]!r}, not {'a list of objects' if kind is list else 'an object'}")
    return value


def _list(row: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = row[key]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{key} is {str(value)[:40]!r}, not a list of messages")
    return value


def _message(item: Any, keys: Keys, role: str = "role", content: str = "content") -> Message:
    """A message with role and content. A content of several parts is joined if all are text."""
    if not isinstance(item, Mapping) or not isinstance(item.get(role), str):
        raise ValueError(f"a message without {role}: {str(item)[:60]!r}")
    item = keys.wanted(item)
    value = item.get(content)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in value):
            raise ValueError(f"a message of {item[role]} has parts that are no text")
        value = "".join(part["text"] for part in value)
    if value is None and item.get("tool_calls"):
        value = ""  # a call says all
    if not isinstance(value, str):
        raise ValueError(f"a message of {item[role]} has {content}={str(value)[:40]!r}, not a text")
    used = {key: item[key] for key in ("tool_calls", *THOUGHTS, *_TRAINED) if key in item}
    thoughts = [used[key] for key in THOUGHTS if key in used]
    if any(not isinstance(text, str) or text != thoughts[0] for text in thoughts):
        raise ValueError(f"a message of {item[role]} has thoughts that are no text, or several that differ")
    if not isinstance(used.get("tool_calls", []), list):
        raise ValueError(f"a message of {item[role]} has tool_calls={str(used['tool_calls'])[:40]!r}, not a list")
    return {"role": item[role], "content": value, **used, **keys.for_template(item, (role, content, *used))}


def _sharegpt(item: Any, keys: Keys) -> Message:
    message = _message(item, keys, "from", "value")
    if message["role"] not in _SHAREGPT_ROLES:
        raise ValueError(f"a message from {message['role']!r}; there are {', '.join(_SHAREGPT_ROLES)}")
    return {**message, "role": _SHAREGPT_ROLES[message["role"]]}


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Instruction and input are one message, with an empty line between them. Pairs of a history come before."""
    texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    earlier = row.get("history") or []
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise ValueError(f"history is {str(earlier)[:40]!r}, not a list of pairs [question, answer]")
    for name, text in (*texts.items(), *(("history", text) for pair in earlier for text in pair)):
        if not isinstance(text, str):
            raise ValueError(f"{name} is {str(text)[:40]!r}, not a text")
    asked = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    found: list[Message] = []
    for question, answer in [*earlier, (asked, texts["output"])]:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found


def side(value: Any, role: str, keys: Keys) -> list[Message]:
    """The messages of a prompt, completion or answer: a text, or a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence):
        return [_message(item, keys) for item in value]
    raise ValueError(f"prompt and completion are texts or lists of messages, not {type(value).__name__}")
