"""Checks the types of values out of files that anybody may have written, before they are shown or computed with.

Python reads numbers of any length, and NaN, from JSON. Further on they would be an error of an array, of a date or of a
page. So a value counts as a number if a double holds it, and as a whole number if 64 bits do.
"""

import json
import math
from pathlib import Path
from typing import Any

from megapar.base.errors import DataError, reason_of
from megapar.system.regular_files import SMALL, read_regular

Shape = type | list["Shape"] | dict[str, "Shape"]
"""int, float (whole numbers too), str or dict. [shape] is a list of such values, {key: shape} an object whose keys of
these names, if they are there, have such values."""

_KINDS = {
    int: "a whole number of 64 bits",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
}
_SHOWN = 60  # letters of a value


def mismatch(value: Any, shape: Shape, path: str = "") -> str:
    """What is wrong with the value in words, "" if it has the shape. `path` is its place in the file."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{path or 'it'} is not a list"
        return next(filter(None, (mismatch(part, shape[0], f"{path}[{i}]") for i, part in enumerate(value))), "")
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{path or 'it'} is not an object"
        parts = ((key, value[key], of) for key, of in shape.items() if key in value)
        return next(filter(None, (mismatch(part, of, f"{path}.{key}".lstrip(".")) for key, part, of in parts)), "")
    if is_of(value, shape):
        return ""
    return f"{path or 'it'} is {_short(value)}, not {_KINDS[shape]}"


def is_of(value: Any, kind: type) -> bool:
    """Whether the value is an int of 64 bits, a float that is finite (or such an int), or an instance of `kind`."""
    if kind is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind is float:
        # An integer above the largest double is larger than infinity to Python, and no float.
        return is_of(value, int) or (type(value) is float and math.isfinite(value))
    return isinstance(value, kind)


def _short(value: Any) -> str:
    if type(value) is int and not is_of(value, int):
        return "a longer number"  # Python refuses to write one of more than 4,300 digits
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_bytes(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """The bytes of a file. `flags` are further ones of os.open.

    Raises DataError with the file's name if it cannot be read, or has more bytes. A missing file raises
    FileNotFoundError.
    """
    try:
        return read_regular(path, max_bytes, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: {reason_of(error)}") from error


def read_json(path: Path, shape: Shape, *, flags: int = 0) -> Any:
    """The value of a JSON file. `flags` are further ones of os.open.

    Raises DataError with the file's name if it cannot be read, is no JSON, or has another shape. A missing file raises
    FileNotFoundError.
    """
    try:
        value = json.loads(read_bytes(path, SMALL, flags))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {' '.join(str(error).split())}") from error
    if problem := mismatch(value, shape):
        raise DataError(f"{path}: {problem}")
    return value
