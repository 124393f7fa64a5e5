"""Parts of error messages: options with their values, and numbers to try."""

from collections.abc import Iterable
from math import isqrt
from typing import Any

from megapar.config.options import Config, ParallelConfig, flatten


def problem(config: Config, options: str, text: str) -> str:
    """A message such as "parallel.tp=3, parallel.pp=1: TEXT". `options` are dotted paths with blanks between them."""
    values = flatten(config)
    given = ", ".join(f"{path}={shown(values[path])}" for path in options.split())
    return f"{given}: {text}"


def shown(value: Any) -> str:
    """A value in the words of a flag, such as "3 4 4 2" for a tuple or a list.

    Booleans are shown as true and false, although they are set by the name of the flag alone.
    """
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value)) or "(empty)"
    if isinstance(value, bool):
        return str(value).lower()
    # Quotes make an empty text visible, and escape line breaks: a message is one line.
    if value == "" or not str(value).isprintable():
        return repr(value)
    return str(value)


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun, such as "1 rank" and "1,024 ranks". `plural` is the singular and "s" by default."""
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,} {noun}"


def layout_in_words(parallel: ParallelConfig) -> str:
    """The sizes of the rank grid, such as "tp 2 x pp 4 x dp 8" or "tp 1 x pp 1 x dp 4, experts over ep 4".

    cp is named if it is more than 1, the grid of experts if it differs from that of the other weights.
    """
    names = [name for name in ("tp", "cp", "pp", "dp") if name != "cp" or parallel.cp > 1]
    grid = " x ".join(f"{name} {getattr(parallel, name)}" for name in names)
    if parallel.etp not in (0, parallel.tp):
        return f"{grid}, experts over ep {parallel.ep} x etp {parallel.etp}"
    if parallel.ep > 1:
        return f"{grid}, experts over ep {parallel.ep}"
    return grid


def divisors(n: int) -> list[int]:
    """All divisors of `n` in ascending order, found up to its square root: `n` may be what somebody has mistyped."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def listed(numbers: list[int]) -> str:
    """Numbers as text, such as "1, 2 or 4"."""
    *others, last = map(str, numbers)
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


def around(n: int, step: int) -> str:
    """The multiples of `step` just below and above `n` as text. 0 is left out, as no size may be 0."""
    below = n // step * step
    above = -(-n // step) * step
    return listed([multiple for multiple in (below, above) if multiple])


def first_few(items: Iterable[str], limit: int = 8, separator: str = ", ") -> str:
    """The first `limit` of `items` as text, and how many more there are."""
    all_items = list(items)
    more = len(all_items) - limit
    text = separator.join(all_items[:limit])
    if more > 0:
        text += f" and {more} more"
    return text
