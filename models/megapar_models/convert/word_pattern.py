"""Patterns to cut text into words, from tiktoken's regular expressions to those of the `tokenizers` library.

tiktoken uses Rust's fancy-regex, and tokenizers uses Oniguruma with Ruby's syntax. Both search from the left and try
alternatives in order, but they read some constructs differently. Constructs read alike by both are kept. Some others
are written in another way. The rest is refused by name.
"""

import re
from typing import NamedTuple


class InexpressibleError(Exception):
    """A tokenizer without a known equal tokenizer.json. The message has the reason."""


# General categories of Unicode, and a script. Both libraries take the same characters for each of them
# (tiktoken 0.14, tokenizers 0.23). \w is not among the classes: of it they have two opinions.
_CATEGORIES = {
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No"),
    *("P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "Han"),
}
_CLASSES = "sSdD"
_CONTROLS = "rntfv"
_ESCAPABLE = r"""\.+*?()|[]{}^$#&-~/'"!%,:;=@ """
_OPERATORS = r"\.+*?()|[]{}^$&-~"

_PROPERTY = re.compile(r"\\([pP])(?:\{(\w+)\}|(\w))")
_NUMBER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|[xu]\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4}))")
_QUANTIFIER = re.compile(r"([*+?]|\{(\d+)(,\d*)?\})([?+]?)")
_ANY_CASE = re.compile(r"\(\?i:((?:[A-Za-z'|]|\[[A-Za-z]+\])+)\)")
_GROUPS = {"(?:": "(?:", "(?>": "(?>", "(?=": "(?=", "(?!": "(?!", "(": "(?:"}  # longest first, except the last


class _Part(NamedTuple):
    """A part of a pattern in Oniguruma's syntax. `empty`: it may match no character."""

    text: str
    empty: bool


def oniguruma(pattern: str) -> str:
    """The pattern for the `tokenizers` library with the matches of `pattern` in tiktoken.

    Raises InexpressibleError if `pattern` has a construct without a known equal, or if it may match no character.
    """
    reader = _Reader(pattern)
    whole = reader.alternatives()
    if reader.at < len(pattern):
        raise reader.unknown(pattern[reader.at])
    if whole.empty:
        raise InexpressibleError("its pattern may match no character")
    return whole.text


class _Reader:
    """Reads a pattern from the left. `at` is the position of the next character."""

    def __init__(self, pattern: str):
        self._pattern = pattern
        self.at = 0

    def unknown(self, construct: str) -> InexpressibleError:
        return InexpressibleError(
            f"{construct} at character {self.at + 1} of its pattern is not known to mean the same in tiktoken and in "
            "the tokenizers library"
        )

    def alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return _Part("|".join(part.text for part in parts), any(part.empty for part in parts))

    def _sequence(self) -> _Part:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return _Part("".join(part.text for part in parts), all(part.empty for part in parts))

    def _atom(self) -> _Part:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _Part(self._set(), False)
        if char == "\\":
            # Ruby's \A and \z are the ends of the text in both libraries.
            for anchor in (r"\A", r"\z"):
                if self._take(anchor):
                    return _Part(anchor, True)
            return _Part(self._escape(), False)
        # Ruby's ^ and $ are the ends of each line, Rust's those of the text.
        if self._take("^"):
            return _Part(r"\A", True)
        if self._take("$"):
            return _Part(r"\z", True)
        if char in "*+?{}]":
            raise self.unknown(char)
        self.at += 1
        return _Part(char, False)  # a dot too: any character but a newline

    def _group(self) -> _Part:
        any_case = _ANY_CASE.match(self._pattern, self.at)
        if any_case:
            return self._any_case(any_case)
        opening = next(opening for opening in _GROUPS if self._pattern.startswith(opening, self.at))
        if opening == "(" and self._pattern.startswith("(?", self.at):
            raise self.unknown(self._pattern[self.at : self.at + 4])
        self._take(opening)
        inside = self.alternatives()
        if not self._take(")"):
            raise self.unknown("a group without an end")
        looks_ahead = opening in ("(?=", "(?!")
        return _Part(f"{_GROUPS[opening]}{inside.text})", inside.empty or looks_ahead)

    def _any_case(self, found: re.Match[str]) -> _Part:
        # Oniguruma also takes one character for two, such as U+FB06 for "st". Rust does not.
        body = found[1].lower()
        if re.search(r"ss|ff|fi|fl|st|[a-z]\[|\][a-z\[]", body):
            raise self.unknown(found[0])
        self.at = found.end()
        return _Part(found[0], "" in body.split("|"))

    def _repeated(self, atom: _Part) -> _Part:
        found = _QUANTIFIER.match(self._pattern, self.at)
        if not found:
            return atom
        count, least, greatest, manner = found.groups()
        # The libraries leave a loop over nothing in different ways. Ruby reads {2}? as an option.
        if atom.empty or (least and not greatest and manner == "?"):
            raise self.unknown(found[0])
        second = _QUANTIFIER.match(self._pattern, found.end())
        if second:
            raise self.unknown(f"{found[0]}{second[0]}")
        self.at = found.end()
        empty = count in "*?" or (least is not None and int(least) == 0)
        if manner == "+":
            # Ruby reads {1,3}+ as a repetition of {1,3}. An atomic group is what Rust means, in every syntax.
            return _Part(f"(?>{atom.text}{count})", empty)
        return _Part(f"{atom.text}{count}{manner}", empty)

    def _set(self) -> str:
        """Read a set of characters, such as [^a-z\\s]."""
        start = self.at
        self._take("[")
        text = "[^" if self._take("^") else "["
        first = True
        while first or not self._take("]"):
            char = self._next()
            two = self._pattern[self.at : self.at + 2]
            # Sets within sets, intersections and differences.
            if char in ("", "[") or (first and char == "]") or two in ("&&", "--", "~~"):
                raise self.unknown(f"{self._pattern[start : self.at + 2]} (a set)")
            begin = self._member()
            if self._next() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self._take("-")
                end = self._member()
                if "\\" in (begin[:1], end[:1]) and not (_is_char(begin) and _is_char(end)):
                    raise self.unknown(f"{begin}-{end}")
                begin = f"{begin}-{end}"
            text += begin
            first = False
        return f"{text}]"

    def _member(self) -> str:
        if self._next() == "\\":
            return self._escape()
        char = self._next()
        if char in ("", "["):
            raise self.unknown("a set within a set")
        self.at += 1
        return _literal(char)

    def _escape(self) -> str:
        escaped = self._pattern[self.at + 1 : self.at + 2]
        found = _PROPERTY.match(self._pattern, self.at)
        if found:
            name = found[2] or found[3]
            if name not in _CATEGORIES:
                raise self.unknown(found[0])
            self.at = found.end()
            return f"\\{found[1]}{{{name}}}"
        found = _NUMBER.match(self._pattern, self.at)
        if found:
            self.at = found.end()
            return _literal(chr(int(found[1] or found[2] or found[3], 16)))
        if not escaped or escaped not in f"{_CLASSES}{_CONTROLS}{_ESCAPABLE}":
            raise self.unknown(f"\\{escaped}")
        self.at += 2
        return _literal(escaped) if escaped in _ESCAPABLE else f"\\{escaped}"

    def _next(self) -> str:
        """The next character, or "" at the end."""
        return self._pattern[self.at : self.at + 1]

    def _take(self, text: str) -> bool:
        """Go past `text` if it comes next. Return whether it did."""
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True


def _is_char(member: str) -> bool:
    """Whether a member of a set is one character, not a class of them."""
    return len(member) == 1 or (len(member) == 2 and member[1] not in _CLASSES)


def _literal(char: str) -> str:
    """The character as Oniguruma takes it for itself, within a set and outside."""
    if char in _OPERATORS:
        return f"\\{char}"
    return char
