"""The text of manifest.json, indexed without parsing all of it.

The file is one line of JSON with sorted keys: {"body": {..., "tensors": {NAME: {"chunks": ..., "dtype": ..., "shape":
...}, ...}, "trainer": ...}, "sha256": "..."}. The tensors' chunks are nearly all of the text: 83 MB for a model of 70
billion parameters on 4,096 ranks. As Python objects they would take over a gigabyte. A rank needs the chunks of a few
tensors. So this module finds the place of each tensor's text, and parses everything else.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_HEAD = b'{"body": '
_SEAL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\s*\Z')
_SEAL_BYTES = 200  # more than the seal and the blanks after it take; the search begins that far before the end
_OPENING = b'"tensors": {'
_ENTRY = b'": {"chunks": '  # between a tensor's name and its chunks
_AFTER_CHUNKS = b'], "dtype": '


class EntryBytes(NamedTuple):
    """The bytes [first, stop) of a tensor's entry in the file, their CRC-32, and what the entry says besides chunks."""

    first: int  # byte
    stop: int  # byte
    crc32: int
    dtype: str
    shape: tuple[int, ...]


class ManifestIndex(NamedTuple):
    """The body without its tensors, and the span of each tensor by name."""

    header: dict[str, Any]
    spans: dict[str, EntryBytes]


def encode(body: Mapping[str, Any]) -> str:
    """The text of a body. Its SHA-256 is taken of this text, so the text must be the same for the same body."""
    return json.dumps(body, sort_keys=True)


def seal(body: Mapping[str, Any]) -> str:
    """The text of the whole file: the body and its SHA-256."""
    text = encode(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{_HEAD.decode()}{text}, "sha256": "{digest}"}}'


def index(text: bytes) -> ManifestIndex | None:
    """The index of a file, or None if its SHA-256 is wrong or its text is not as `seal` writes it."""
    sealed = _SEAL.search(text, max(0, len(text) - _SEAL_BYTES))
    if not text.startswith(_HEAD) or sealed is None:
        return None
    body = memoryview(text)[len(_HEAD) : sealed.start()]
    if hashlib.sha256(body).hexdigest() != sealed[1].decode():
        return None
    try:
        return _index(text, len(_HEAD), sealed.start())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # another program wrote this text: the caller parses all of it, and says what is wrong


def _index(text: bytes, first: int, stop: int) -> ManifestIndex:
    """The index of the body text[first:stop].

    Raises ValueError, KeyError, TypeError or RecursionError if it is not as `encode` writes it.
    """
    marks = _marks(text, first, stop)
    if not marks:
        raise ValueError("no tensor")
    names = [text.rindex(b'"', first, mark) for mark in marks]  # where each tensor's name begins
    opening = names[0] - len(_OPENING)
    if text[opening : names[0]] != _OPENING:
        raise ValueError("the first tensor does not follow the opening of all")
    # Each entry ends before the next name, but nothing marks the end of the last one. So that one is parsed.
    last_entry = marks[-1] + len(_ENTRY) - len(b'{"chunks": ')
    _, length = json.JSONDecoder().raw_decode(text[last_entry:stop].decode())
    end = last_entry + length
    if text[end : end + 1] != b"}":
        raise ValueError("the last tensor is not followed by the end of all")
    spans = {}
    for name, mark, following in zip(names, marks, [*names[1:], end + len(b", ")], strict=True):
        value = mark + len(b'": ')
        spans[json.loads(text[name : mark + 1])] = _span(text, value, following - len(b", "))
    # The same body with an empty object in place of the tensors.
    header = json.loads(text[first:opening] + _OPENING + text[end:stop])
    if header.pop("tensors") != {}:
        raise ValueError("there is something beside the tensors")
    return ManifestIndex(header, spans)


def _marks(text: bytes, first: int, stop: int) -> list[int]:
    """The position in text[first:stop] at which the name of each tensor ends."""
    marks = []
    at = text.find(_ENTRY, first, stop)
    while at >= 0:
        marks.append(at)
        at = text.find(_ENTRY, at + 1, stop)
    return marks


def _span(text: bytes, first: int, stop: int) -> EntryBytes:
    """The span of the entry text[first:stop]. Its chunks are not parsed."""
    end_of_chunks = text.rindex(_AFTER_CHUNKS, first, stop)
    rest = json.loads(b"{" + text[end_of_chunks + len(b"], ") : stop])
    shape = rest["shape"]
    if not all(type(size) is int for size in shape):
        raise TypeError("a shape holds integers")
    return EntryBytes(first, stop, zlib.crc32(memoryview(text)[first:stop]), str(rest["dtype"]), tuple(shape))
