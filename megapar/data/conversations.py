"""Conversations in files: messages, ShareGPT, alpaca, prompt and completion, in .jsonl or .parquet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.data.corpus import open_parquet
from megapar.errors import ConfigError, DataError, reason_of

Message = Mapping[str, Any]
"""A role and a content. A template may read further keys, such as reasoning_content."""

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SHAREGPT_ROLES |= {"tool": "tool", "observation": "tool", "function": "tool"}
_FORMS = "messages, conversations, instruction with output, or prompt with completion"


@dataclass(frozen=True)
class Conversation:
    """Messages, and where they stand: the path, with the number of the line or row."""

    messages: Sequence[Message]
    place: str


def read_conversations(files: Sequence[Path]) -> Iterator[Conversation]:
    """Yield the conversations of .jsonl and .parquet files, in order.

    Raises ConfigError for another kind of file. Raises DataError for a row that is no conversation, with its place.
    """
    for path in files:
        for place, row in rows(path):
            try:
                yield Conversation(messages_of(row), place)
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a .jsonl or .parquet file. Raises ConfigError for another, DataError for no JSON."""
    if path.suffix == ".parquet":
        number = 0
        for batch in open_parquet(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
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


def messages_of(row: Any) -> list[Message]:
    """The messages of a row, in whichever of the known forms it is. Raises ValueError with the reason if it is none."""
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}, not an object with {_FORMS}")
    if row.get("messages") is not None:
        found = [_message(item, "role", "content") for item in _list(row, "messages")]
    elif row.get("conversations") is not None:
        found = [_sharegpt(item) for item in _list(row, "conversations")]
    elif row.get("instruction") is not None and row.get("output") is not None:
        found = _alpaca(row)
    elif row.get("prompt") is not None and row.get("completion") is not None:
        found = [*_side(row["prompt"], "user"), *_side(row["completion"], "assistant")]
    else:
        raise ValueError(f"has {', '.join(map(str, row)) or 'no keys'}; it needs {_FORMS}")
    if not any(message["role"] == "assistant" for message in found):
        raise ValueError("has no message of the assistant, so nothing could be trained")
    return found


def _list(row: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = row[key]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{key} is {str(value)[:40]!r}, not a list of messages")
    return value


def _message(item: Any, role: str, content: str) -> Message:
    """A message with role and content. A content of several parts is joined if all are text."""
    if not isinstance(item, Mapping) or not isinstance(item.get(role), str):
        raise ValueError(f"a message without {role}: {str(item)[:60]!r}")
    value = item.get(content)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in value):
            raise ValueError(f"a message of {item[role]} has parts that are no text")
        value = "".join(part["text"] for part in value)
    if value is None and item.get("tool_calls"):
        value = ""  # a call says all
    if not isinstance(value, str):
        raise ValueError(f"a message of {item[role]} has {content}={str(value)[:40]!r}, not a text")
    # Columns of parquet exist for every message, and are null where a message has no such key.
    further = {key: x for key, x in item.items() if key not in (role, content) and x is not None}
    return {"role": item[role], "content": value, **further}


def _sharegpt(item: Any) -> Message:
    message = _message(item, "from", "value")
    if message["role"] not in _SHAREGPT_ROLES:
        raise ValueError(f"a message from {message['role']!r}; there are {', '.join(_SHAREGPT_ROLES)}")
    return {**message, "role": _SHAREGPT_ROLES[message["role"]]}


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Instruction and input are one message, with an empty line between them."""
    texts = {name: row.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is {str(text)[:40]!r}, not a text")
    asked = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]}]


def _side(value: Any, role: str) -> list[Message]:
    """Prompt or completion: a text, or a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence):
        return [_message(item, "role", "content") for item in value]
    raise ValueError(f"prompt and completion are texts or lists of messages, not {type(value).__name__}")
