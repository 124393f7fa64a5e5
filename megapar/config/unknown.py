"""An unknown flag or key, and the options whose names are near it.

A misleading hint is worse than none. So a near name must be very near, and of many near names none is proposed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal


@dataclass(frozen=True)
class UnknownOption:
    """A name that is no option, as it was spelled, and its values as words.

    `style` says how an answer is spelled, and `types` has the annotations of the program's options, by dotted path.
    """

    name: str
    values: tuple[str, ...]
    style: Literal["flag", "toml"]
    types: Mapping[str, Any]


Hint = Callable[[UnknownOption], str]
"""Returns a text to follow "no such flag", such as "; did you mean train.steps?". "" if nothing is known."""


def nearest(unknown: UnknownOption) -> str:
    """Return a `Hint`'s text with the options whose names are near."""
    near = near_names(unknown.name.replace("-", "_"), list(unknown.types))
    return f"; did you mean {joined(near, 'or')}?" if near else ""


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """The names in `known` probably meant by `name`, the nearest first. Empty if there are more than three."""
    section, _, last = name.rpartition(".")
    words = words_of(last)
    found = []
    for path in known:
        path_section, _, path_last = path.rpartition(".")
        in_section = not section or _likeness(section, path_section) >= 0.75
        is_short = words < words_of(path_last)
        if last == path_last or (in_section and (is_short or _is_mistyped(last, path_last))):
            found.append(path)
    # A last part that is written right needs no other that only resembles it, except in the section that was named.
    if any(path.rpartition(".")[2] == last for path in found):
        found = [path for path in found if path.rpartition(".")[2] == last or path.rpartition(".")[0] == section]
    found.sort(key=lambda path: -_likeness(name, path))
    if len(found) <= 3:
        return found
    return []


def _is_mistyped(typed: str, meant: str) -> bool:
    """Whether two last parts differ by a few letters. A part with one more word is another name, not a mistake."""
    if _likeness(typed, meant) >= 0.9:
        return True
    typed_words, meant_words = typed.split("_"), meant.split("_")
    if len(typed_words) != len(meant_words):
        return False
    return all(_is_near(first, second) for first, second in zip(typed_words, meant_words, strict=True))


def _is_near(first: str, second: str) -> bool:
    """Whether two words are alike, or one is the beginning of the other, as seq and sequence."""
    shortest = min(len(first), len(second))
    return _likeness(first, second) >= 0.8 or (shortest >= 3 and first[:shortest] == second[:shortest])


def _likeness(first: str, second: str) -> float:
    """From 0, nothing in common, to 1, equal."""
    matcher = SequenceMatcher(None, first, second)
    # Lengths alone exclude most names, without a look at their letters: a name of thousands takes no time.
    if matcher.real_quick_ratio() >= 0.5:
        return matcher.ratio()
    return 0.0


def words_of(name: str) -> set[str]:
    """Return the words of a dotted name."""
    return set(name.replace(".", "_").split("_"))


def joined(texts: Sequence[str], word: str) -> str:
    """Return the texts as "a, b or c", for the word "or"."""
    if len(texts) > 1:
        return f" {word} ".join([", ".join(texts[:-1]), texts[-1]])
    return texts[0]
