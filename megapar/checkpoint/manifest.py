"""The text of manifest.json, indexed without parsing all of it.

The file is one line of JSON with sorted keys: {"body": {..., "tensors": {NAME: {"chunks": ..., "dtype": ..., "shape":
...}, ...}, "trainer": ...}, "sha256": "..."}. Nearly all of it are the tensors' chunks: 83 MB for a model of 70 billion
parameters on 4,096 ranks, over a gigabyte as Python objects. A rank needs the chunks of a few tensors, so this module
finds where the text of each tensor lies, and parses everything else.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_HEAD = b'{"body": '
_SEAL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\s*\Z')
_SEAL_BYTES = 200  # more than the seal takes, with blanks behind it
_OPENING = b'"tensors": {'
_ENTRY = b'": {"chunks": '  # between a tensor's name and its chunks
_AFTER_CHUNKS = b'], "dtype": '


class Span(NamedTuple):
    """Where a tensor's entry lies in the file, and what it says besides its chunks."""

    first: int  # byte
    stop: int  # byte
    crc32: int
    dtype: str
    shape: tuple[int, ...]


class ManifestIndex(NamedTuple):
    """The body without its tensors, and where those are."""

    facts: dict[str, Any]
    spans: dict[str, Span]


def encode(body: Mapping[str, Any]) -> str:
    """The one text of a body: what its SHA-256 is taken of."""
    return json.dumps(body, sort_keys=True)


def seal(body: Mapping[str, Any]) -> str:
    """The text of the whole file."""
    text = encode(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{_HEAD.decode()}{text}, "sha256": "{digest}"}}'


def index(text: bytes) -> ManifestIndex | None:
    """The index of a file whose SHA-256 is right and whose text is as `seal` writes it; None of any other file."""
    sealed = _SEAL.search(text, max(0, len(text) - _SEAL_BYTES))
    if not text.startswith(_HEAD) or sealed is None:
        return None
    body = memoryview(text)[len(_HEAD) : sealed.start()]
    if hashlib.sha256(body).hexdigest() != sealed[1].decode():
        return None
    try:
        return _index(text, len(_HEAD), sealed.start())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # a text that somebody else wrote: the caller parses all of it, and says what is wrong


def _index(text: bytes, first: int, stop: int) -> ManifestIndex:
    """Index text[first:stop], a body. Raises an error where it is not as `encode` writes it."""
    marks = _marks(text, first, stop)
    if not marks:
        raise ValueError("no tensor")
    names = [text.rindex(b'"', first, mark) for mark in marks]  # where each tensor's name begins
    opening = names[0] - len(_OPENING)
    if text[opening : names[0]] != _OPENING:
        raise ValueError("the first tensor does not follow the opening of all")
    _, length = json.JSONDecoder().raw_decode(text[marks[-1] + len(_ENTRY) - len(b'{"chunks": ') : stop].decode())
    end = marks[-1] + len(_ENTRY) - len(b'{"chunks": ') + length
    if text[end : end + 1] != b"}":
        raise ValueError("the last tensor is not followed by the end of all")
    spans = {}
    for name, mark, following in zip(names, marks, [*names[1:], end + len(b", ")], strict=True):
        value = mark + len(b'": ')
        spans[json.loads(text[name : mark + 1])] = _span(text, value, following - len(b", "))
    facts = json.loads(text[first:opening] + _OPENING + text[end:stop])
    if facts.pop("tensors") != {}:
        raise ValueError("there is something beside the tensors")
    return ManifestIndex(facts, spans)


def _marks(text: bytes, first: int, stop: int) -> list[int]:
    """Where the name of each tensor ends."""
    found = []
    at = text.find(_ENTRY, first, stop)
    while at >= 0:
        found.append(at)
        at = text.find(_ENTRY, at + 1, stop)
    return found


def _span(text: bytes, first: int, stop: int) -> Span:
    end_of_chunks = text.rindex(_AFTER_CHUNKS, first, stop)
    rest = json.loads(b"{" + text[end_of_chunks + len(b"], ") : stop])
    shape = rest["shape"]
    if not all(type(size) is int for size in shape):
        raise TypeError("a shape holds integers")
    return Span(first, stop, zlib.crc32(memoryview(text)[first:stop]), str(rest["dtype"]), tuple(shape))
