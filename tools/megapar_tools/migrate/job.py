"""A running job of another framework, as the conversions of the table's rows see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Words = tuple[str, ...]
Ours = Mapping[str, Words]
"""Options of ours by dotted path, with their values as words. The key `base` is that of a TOML file."""

OFF = ("false", "no", "none", "off", "null")


class NoCounterpart(ValueError):  # noqa: N818 (no failure: an answer)
    """A value has no counterpart here. The text says why."""


def plain(name: str) -> str:
    """A name with underscores alone: programs take both - and _."""
    return name.replace("-", "_")


@dataclass(frozen=True)
class Job:
    """The options of a job: those given, and its framework's defaults, by plain names.

    `world` is its number of ranks and `samples` that of its data set, 0 if they are not known. `named` has the names
    of options with values that cannot be read.
    """

    given: Mapping[str, Words]
    defaults: Mapping[str, Words] = field(default_factory=dict)
    world: int = 0
    samples: int = 0
    named: frozenset[str] = frozenset()

    def names(self, name: str) -> bool:
        """Whether the job sets the option, to whatever value."""
        return self.has(name) or plain(name) in self.named

    def has(self, name: str) -> bool:
        """Whether the job sets the option."""
        return plain(name) in self.given

    def words(self, name: str) -> Words:
        """The values of an option, or else its default; empty if it has none."""
        name = plain(name)
        return self.given.get(name, self.defaults.get(name, ()))

    def text(self, name: str, default: str = "") -> str:
        """The values of an option as one text."""
        return " ".join(self.words(name)) or default

    def number(self, name: str, default: float = 0.0) -> float:
        """The value of an option. Raises NoCounterpart if it is no number."""
        text = self.text(name)
        return number(text) if text else default

    def whole(self, name: str, default: int = 0) -> int:
        """The value of an option. Raises NoCounterpart if it is no whole number."""
        return whole(self.text(name, str(default)))

    def is_on(self, name: str) -> bool:
        """Whether a switch is set: without a value, or with one that does not say no."""
        name = plain(name)
        if name not in self.given:
            return self.text(name, "false").lower() not in (*OFF, "0")
        return " ".join(self.given[name]).lower() not in (*OFF, "0")

    def product(self, *names: str) -> int:
        """The product of the sizes that are given; an absent one is 1."""
        result = 1
        for name in names:
            result *= max(self.whole(name, 1), 1)
        return result


def number(text: str) -> float:
    """Read a number, such as 1e-4 or 9_765_625. Raises NoCounterpart for any other text."""
    try:
        return float(text)
    except ValueError:
        raise NoCounterpart(f"{text[:40]!r} is no number") from None


def whole(text: str) -> int:
    """Read a whole number, such as 8 or 5e8. Raises NoCounterpart for any other text."""
    value = number(text)
    if not abs(value) < 2**53 or value != int(value):
        raise NoCounterpart(f"{text[:40]!r} is no whole number")
    return int(value)


def shown(value: float) -> str:
    """A number as a word, without the .0 of a whole one."""
    # Twelve digits leave out what binary fractions add to a product.
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else f"{value:.12g}"
