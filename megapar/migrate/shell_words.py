"""Words of bash: cuts a script into words and separators, and expands variables in words.

Nothing is run, and no file is read. What would need it becomes a mark inside the value: a number between two letters
that no script holds. `Expander.unresolved` says what a mark stands for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megapar.base.errors import ConfigError

LARGEST_VALUE = 1 << 20  # letters
_LARGEST_WORK = 1 << 24  # letters of all values that are made
FIRST, _LAST = "\ue000", "\ue001"
_MARK = re.compile(f"{FIRST}(\\d+){_LAST}")
_OPERATORS = re.compile(r";;|&&|\|\||\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>?|>>|>&|<&|>\||[<>])")
_CLOSING = {"(": ")", "{": "}"}


class Token(NamedTuple):
    """A word or a separator as it is written, or an array that is assigned: NAME=( ... ), with its words in `items`."""

    kind: Literal["word", "op", "array"]
    text: str
    line: int
    items: tuple["Token", ...] = ()


def refused(file: str, line: int, why: str) -> ConfigError:
    """The error about a line of a script."""
    return ConfigError(f"{file}:{line}: {why}")


# Words and separators


def tokens_of(text: str, file: str, first_line: int = 1) -> list[Token]:
    """Cut a script into tokens. Comments, redirections and here-documents are left out."""
    return list(_Cutter(text, file, first_line).tokens())


@dataclass
class _Cutter:
    text: str
    file: str
    first_line: int
    at: int = 0
    documents: list[str] = field(default_factory=list)  # ends of here-documents that begin at the next line
    skips_word: bool = False
    _counted: tuple[int, int] = (0, 0)  # a place, and the line breaks before it

    def line(self) -> int:
        place, count = self._counted
        if self.at >= place:
            count += self.text.count("\n", place, self.at)
            self._counted = (self.at, count)
        return self.first_line + count

    def tokens(self, closing: str = "") -> Iterator[Token]:
        """Yield tokens up to the end, or up to the parenthesis that closes an array."""
        opened = self.line()
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif closing and letter == closing:
                self.at += 1
                return
            elif closing and letter == "\n":
                self.at += 1
            elif found := _REDIRECTION.match(self.text, self.at):
                self.at = found.end()
                self._redirected(found[1])
            elif found := _OPERATORS.match(self.text, self.at):
                line = self.line()
                self.at = found.end()
                if found[0] == "\n":
                    self._skip_documents()
                yield Token("op", found[0], line)
            else:
                yield from self._word()
        if closing:
            raise refused(self.file, opened, "an array that begins here is not closed")

    def _redirected(self, sign: str) -> None:
        """Leave out the word behind a redirection."""
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        start = self.at
        for _ in self._word():
            pass
        if sign in ("<<", "<<-"):
            self.documents.append(re.sub(r"[\"'\\]", "", self.text[start : self.at]))

    def _skip_documents(self) -> None:
        for end in self.documents:
            found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            self.at = found.end() if found else len(self.text)
        self.documents.clear()

    def _word(self) -> Iterator[Token]:
        start, line = self.at, self.line()
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\r\n;&|<>)" or (letter == "(" and not self._begins_array(start)):
                break
            if letter == "(":
                self.at += 1
                items = tuple(token for token in self.tokens(")") if token.kind == "word")
                yield Token("array", self.text[start : self.text.index("(", start)], line, items)
                return
            self.at = _after(self.text, self.at, self.file, line)
        if self.at > start:
            yield Token("word", self.text[start : self.at], line)
        elif self.at < len(self.text) and self.text[self.at] in "<>":
            self.at += 1

    def _begins_array(self, start: int) -> bool:
        return re.fullmatch(r"[A-Za-z_]\w*\+?=", self.text[start : self.at]) is not None


def _after(text: str, at: int, file: str, line: int) -> int:
    """The place behind the letter, quoted text or expansion at `at`."""
    letter = text[at]
    if letter == "\\":
        return min(at + 2, len(text))
    if letter == "'":
        return _closed(text.find("'", at + 1), file, line, "a quote") + 1
    if letter == '"':
        return _quoted(text, at, file, line)
    if letter == "`":
        return _closed(text.find("`", at + 1), file, line, "a backquote") + 1
    if letter == "$" and text[at + 1 : at + 2] in _CLOSING:
        return _balanced(text, at + 1, file, line)
    return at + 1


def _quoted(text: str, at: int, file: str, line: int) -> int:
    place = at + 1
    while place < len(text) and text[place] != '"':
        place = place + 1 if text[place] == "'" else _after(text, place, file, line)
    return _closed(place if place < len(text) else -1, file, line, "a quote") + 1


def _balanced(text: str, at: int, file: str, line: int) -> int:
    """The place behind the bracket that closes the one at `at`."""
    opening, closing, depth, place = text[at], _CLOSING[text[at]], 0, at
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1
        elif letter == "'":
            place = _closed(text.find("'", place + 1), file, line, "a quote")
        elif letter in (opening, closing):
            depth += 1 if letter == opening else -1
            if not depth:
                return place + 1
        place += 1
    raise refused(file, line, f"{opening} is not closed")


def _closed(end: int, file: str, line: int, what: str) -> int:
    if end < 0:
        raise refused(file, line, f"{what} that begins here is not closed")
    return end


# Expansion


class Expander:
    """Expands words with the variables assigned so far. `variables` are those of the environment."""

    def __init__(self, file: str, variables: Mapping[str, str]):
        self.file = file
        self.variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.marks: list[str] = []
        self.work = 0

    def mark(self, what: str, line: int) -> str:
        """A text that stands for `what`, which only a run of the script knows."""
        self.marks.append(f"{what}, line {line}")
        return f"{FIRST}{len(self.marks) - 1}{_LAST}"

    def unresolved(self, word: str) -> str:
        """What the first mark of a word stands for; "" without a mark."""
        found = _MARK.search(word)
        return self.marks[int(found[1])] if found and int(found[1]) < len(self.marks) else ""

    def assign(self, name: str, values: list[str], *, appends: bool, is_array: bool, line: int) -> None:
        """Set a variable, or append to it."""
        old = self.variables.get(name, []) if appends else []
        new = [*old, *values] if is_array else ["".join([*old[:1], *values]), *old[1:]]
        self._limit(sum(map(len, new)), line)
        self.variables[name] = new

    def text(self, token: Token, *, in_test: bool = False) -> str:
        """A word as a single text. In a test, what is set nowhere is empty, as where the script starts."""
        return " ".join(self._expanded(token, splits=False, in_test=in_test))

    def fields(self, token: Token) -> list[str]:
        """A word as the words that it becomes: unquoted values are cut at spaces, arrays are as many as they hold."""
        if token.kind == "array":
            return []
        return self._expanded(token, splits=True, in_test=False)

    def _limit(self, size: int, line: int) -> None:
        self.work += size
        if size > LARGEST_VALUE or self.work > _LARGEST_WORK:
            raise refused(self.file, line, f"a value grows beyond {LARGEST_VALUE:,} letters")

    def _expanded(self, token: Token, *, splits: bool, in_test: bool) -> list[str]:
        """Expand a word. Quoted parts stay whole."""
        found = _Fields()
        text, at, quoted = token.text, 0, False
        while at < len(text):
            letter = text[at]
            if letter == '"':
                quoted, at = not quoted, at + 1
                found.add("")
            elif letter == "'" and not quoted:
                end = text.find("'", at + 1)
                found.add(text[at + 1 : end])
                at = end + 1
            elif letter == "\\" and (not quoted or text[at + 1 : at + 2] in tuple('$"\\`\n')):
                found.add(text[at + 1 : at + 2].replace("\n", ""))
                at += 2
            elif letter not in "$`":
                end = re.compile(r"[^\"'\\$`]+|.", re.DOTALL).match(text, at).end()  # type: ignore[union-attr]
                found.add(text[at:end])
                at = end
            else:
                at, values = self._expansion(token, at, in_test=in_test)
                for number, value in enumerate(values):
                    if number:
                        found.end()
                    found.add_split(value) if splits and not quoted else found.add(value)
        found.end()
        self._limit(sum(map(len, found.words)), token.line)
        return found.words

    def _expansion(self, token: Token, at: int, *, in_test: bool) -> tuple[int, list[str]]:
        """(the end behind, the values) of the expansion at `at`."""
        text, line = token.text, token.line
        if text[at] == "`":
            end = text.find("`", at + 1)
            return end + 1, [self.mark(text[at : end + 1][:60], line)]
        if text.startswith("$((", at):
            end = _balanced(text, at + 1, self.file, line)
            return end, [self._sum(text[at + 3 : end - 2], line)]
        if text.startswith("$(", at):
            end = _balanced(text, at + 1, self.file, line)
            return end, [self.mark(text[at:end][:60], line)]
        if text.startswith("${", at):
            end = _balanced(text, at + 1, self.file, line)
            return end, self._braced(text[at + 2 : end - 1], line, in_test=in_test)
        found = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, at)
        if not found:
            return at + 1, ["$"]
        return found.end(), self._value(found[1], line, in_test=in_test)[:1]

    def _value(self, name: str, line: int, *, in_test: bool) -> list[str]:
        if name in self.variables:
            return self.variables[name] or [""]
        if in_test:
            return [""]
        what = f"argument {name} of the script" if name.isdigit() else f"${name}, set nowhere in the script"
        return [self.mark(what, line)]

    def _braced(self, inner: str, line: int, *, in_test: bool) -> list[str]:
        """${...}: a variable, all or one of an array, or a default."""
        found = re.fullmatch(r"(\w+)(?:\[([@*]|\d{1,6})\])?(?:(:?[-=+])(.*))?", inner, re.DOTALL)
        if not found:
            return [self.mark(f"${{{inner[:50]}}}", line)]
        name, index, sign, word = found.groups()
        values = self.variables.get(name)
        if sign:
            is_set = values is not None and (not sign.startswith(":") or any(values))
            if sign.endswith("+"):
                values = None if not is_set else [self.text(Token("word", word, line))]
                return values or [""]
            if not is_set:
                values = [self.text(Token("word", word, line), in_test=in_test)]
                if sign.endswith("="):
                    self.assign(name, values, appends=False, is_array=False, line=line)
                return values
        if values is None:
            return self._value(name, line, in_test=in_test)
        if index in ("@", "*"):
            return values if index == "@" else [" ".join(values)]
        number = int(index or 0)
        return [values[number] if number < len(values) else ""]

    def _sum(self, inner: str, line: int) -> str:
        """$((...)) of whole numbers and variables."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._value(m[1], line, in_test=False)[0], inner)
        text = re.sub(r"\$(\d)", lambda m: self._value(m[1], line, in_test=False)[0], text)
        if self.unresolved(text):
            return _MARK.search(text)[0]  # type: ignore[index]
        value = _computed(text)
        return self.mark(f"$(({inner[:50]}))", line) if value is None else str(value)


@dataclass
class _Fields:
    """The words that a word becomes; `current` is the one that is not at its end yet."""

    words: list[str] = field(default_factory=list)
    current: str | None = None

    def add(self, part: str) -> None:
        """Append to the current word."""
        self.current = (self.current or "") + part

    def add_split(self, value: str) -> None:
        """Append an unquoted value, which is cut at its spaces."""
        if value[:1].isspace():
            self.end()
        for number, piece in enumerate(value.split()):
            if number:
                self.end()
            self.add(piece)
        if value[-1:].isspace():
            self.end()

    def end(self) -> None:
        """End the current word, if there is one."""
        if self.current is not None:
            self.words.append(self.current)
        self.current = None


def _computed(text: str) -> int | None:
    """The value of a sum of whole numbers as bash computes it. None if it is something else."""
    numbers = re.findall(r"\d+|[-+*/%()]", text)
    if "".join(numbers) != re.sub(r"\s", "", text) or len(text) > 200 or any(len(n) > 18 for n in numbers):
        return None
    place = 0

    def term(level: int) -> int:
        nonlocal place
        if level == 2:
            return factor()
        value = term(level + 1)
        while place < len(numbers) and numbers[place] in (("+", "-"), ("*", "/", "%"))[level]:
            sign, place = numbers[place], place + 1
            other = term(level + 1)
            if sign in "/%":
                quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
                value = quotient if sign == "/" else value - quotient * other
            else:
                value = {"+": value + other, "-": value - other, "*": value * other}[sign]
        return value

    def factor() -> int:
        nonlocal place
        sign, place = numbers[place], place + 1
        if sign == "(":
            value = term(0)
            place += 1
            return value
        return -factor() if sign == "-" else factor() if sign == "+" else int(sign)

    try:
        value = term(0)
    except (IndexError, ZeroDivisionError, ValueError):
        return None
    return value if place == len(numbers) and abs(value) < 2**63 else None
