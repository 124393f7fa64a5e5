"""Fields of JSON files of other programs: which kind of value each has, checked before any of them is read."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import ConfigError
from megapar.system.regular_files import read_regular


class Kind(NamedTuple):
    """Values that a field may have. `words` say it to people, after "should be". null is the absent field."""

    words: str
    fits: Callable[[Any], bool]
    required: bool = False

    @property
    def needed(self) -> "Kind":
        """This kind, of a field that must be there."""
        return self._replace(required=True)


LARGEST = 1 << 53
"""Whole numbers below it are exact in every program that reads JSON."""


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < LARGEST  # a bool is an int


def _number(value: Any) -> bool:
    # The comparison is false for NaN and infinity, which Python's JSON has.
    return type(value) in (int, float) and abs(value) < LARGEST


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _object(value: Any) -> bool:
    return isinstance(value, Mapping)


WHOLE = Kind("a whole number", _whole)
COUNT = Kind("a whole number from 1 on", lambda value: _whole(value) and value > 0)
NUMBER = Kind("a number", _number)
NOT_ZERO = Kind("a number other than 0", lambda value: _number(value) and value != 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
NAMES = Kind("a list of texts", _names)
NUMBERS = Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_whole, value)))
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object of fields", _object)


def whole_up_to(largest: int) -> Kind:
    """Whole numbers from 0 to `largest`."""
    return Kind(f"a whole number from 0 to {largest:,}", lambda value: _whole(value) and 0 <= value <= largest)


def either(*kinds: Kind) -> Kind:
    """The values of any of these kinds."""
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file. Raises ConfigError if the file is not readable, or is not an object of fields."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as JSON (brackets in brackets, thousands deep)") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {_shown(found)} should be {OBJECT.words}")
    return found


def problems(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Iterator[str]:
    """Yield a line for each field of another kind than it should be, and for each that must be there and is not."""
    for name, kind in kinds.items():
        value = fields.get(name)
        if value is None:
            if kind.required:
                yield f"{name} is missing; it should be {kind.words}"
        elif not kind.fits(value):
            yield f"{name}={_shown(value)} should be {kind.words}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
