"""Words that messages share: options with their values, and the numbers that would work."""

from collections.abc import Iterable
from typing import Any

from megapar.config import Config, flatten


def problem(config: Config, options: str, text: str) -> str:
    values = flatten(config)
    return f"{', '.join(f'{path}={shown(values[path])}' for path in options.split())}: {text}"


def shown(value: Any) -> str:
    """A value as a flag takes it, but for booleans and empty ones."""
    if isinstance(value, tuple):
        return " ".join(map(shown, value)) or "(empty)"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" or not str(value).isprintable() else str(value)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def around(n: int, step: int) -> str:
    """The multiples of `step` next to `n`, 0 left out."""
    return listed([multiple for multiple in (n // step * step, -(-n // step) * step) if multiple])


def first_few(items: Iterable[str], most: int = 8, separator: str = ", ") -> str:
    """The first of `items`, and how many more there are."""
    found = list(items)
    more = len(found) - most
    return separator.join(found[:most]) + (f" and {more} more" if more > 0 else "")
