"""Expands the words of a bash script, as tree-sitter's grammar cuts them, by the variables assigned so far.

Nothing is run, and no file is read. What would need a run becomes a mark inside the value: a number between two letters
that no script holds. `Expander.unresolved` returns what a mark stands for, with its line.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from typing import Any

from tree_sitter import Node

from megapar.base.errors import ConfigError

LARGEST_VALUE = 1 << 20  # letters
_LARGEST_WORK = 1 << 24  # letters of all values that are made
_NESTED = 50  # expansions in expansions
FIRST, _LAST = "\ue000", "\ue001"
MARK = f"(?:{FIRST}\\d+{_LAST})"
_MARK = re.compile(f"{FIRST}(\\d+){_LAST}")
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution")
_QUOTED = ("string", "raw_string", "ansi_c_string", "translated_string")
_PARTS = (*_EXPANSIONS, *_QUOTED, "concatenation")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}  # of $'...'


def refused(file: str, line: int, why: str) -> ConfigError:
    """Return the error about a line of a script."""
    return ConfigError(f"{file}:{line}: {why}")


def text_of(node: Node) -> str:
    """Return the source text of a node."""
    return (node.text or b"").decode()


def _spaces_of(text: str) -> int:
    """Return the number of spaces and continued line ends that the grammar counts to the expansion behind them."""
    return re.match(r"(?:\s|\\\n)*", text).end()  # type: ignore[union-attr]


@dataclass
class _Fields:
    """The words that one word of a script becomes; `current` is the word that is not at its end yet."""

    words: list[str] = field(default_factory=list)
    current: list[str] | None = None  # its parts

    def add(self, part: str) -> None:
        """Append to the current word."""
        self.current = [] if self.current is None else self.current
        self.current.append(part)

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
            self.words.append("".join(self.current))
        self.current = None


class Variables:
    """Holds the values of variables, and marks for what nobody knows. `variables` are those of the environment."""

    def __init__(self, file: str, variables: Mapping[str, str]):
        self.file = file
        self.variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.marks: list[str] = []
        self.work = 0

    def mark(self, what: str, line: int) -> str:
        """Return a text that stands for `what`, which only a run of the script knows."""
        self.marks.append(f"{' '.join(what.split())}, line {line}")
        return f"{FIRST}{len(self.marks) - 1}{_LAST}"

    def unresolved(self, word: str) -> str:
        """Return what the first mark of a word stands for; "" without a mark."""
        found = _MARK.search(word)
        return self.marks[int(found[1])] if found and int(found[1]) < len(self.marks) else ""

    def plain(self, word: str) -> str:
        """Return a word without the marks at its end, which a condition adds to each word of a value."""
        return re.sub(f"(?:{_MARK.pattern})+$", "", word)

    def assign(self, name: str, values: list[str], *, appends: bool, is_array: bool, line: int) -> None:
        """Set a variable, or append to it."""
        old = self.variables.get(name, []) if appends else []
        new = [*old, *values] if is_array else ["".join([*old[:1], *values]), *old[1:]]
        self.limit(sum(map(len, new)), line)
        self.variables[name] = new

    def limit(self, size: int, line: int) -> None:
        """Count letters that are made. Raises ConfigError if a value grows without bound."""
        self.work += size
        if size > LARGEST_VALUE or self.work > _LARGEST_WORK:
            raise refused(self.file, line, f"a value grows beyond {LARGEST_VALUE:,} letters")

    def variable(self, name: str, line: int, in_test: bool) -> list[str]:
        """Return the values of a variable: a mark if nobody set it, or in a test an empty text."""
        if name in self.variables:
            return self.variables[name] or [""]
        if in_test:
            return [""]
        what = f"argument {name} of the script" if name.isdigit() else f"${name}, set nowhere in the script"
        return [self.mark(what, line)]


class Expander(Variables):
    """Expands words with the variables assigned so far."""

    first_line = 1  # of the text that is read
    depth = 0  # of expansions in expansions

    def line(self, node: Node) -> int:
        """Return the line of the script where a node begins."""
        text = text_of(node)
        return self.first_line + node.start_point.row + text.count("\n", 0, _spaces_of(text))

    def fields(self, node: Node) -> list[str]:
        """Return the words that a word becomes: unquoted values are cut at spaces, arrays are as many as they hold."""
        return self._expanded([node], splits=True)

    def text(self, node: Node, *, in_test: bool = False, as_pattern: bool = False) -> str:
        """Return a word as a single text. In a test, what is set nowhere is empty, as where the script starts.

        As a pattern, quoted letters stand for themselves.
        """
        return " ".join(self._expanded([node], in_test=in_test, as_pattern=as_pattern))

    def spliced(self, node: Node) -> str:
        """Return a here-document with its expansions."""
        parts = [part for part in node.children if part.type in _EXPANSIONS]
        return "".join(self._between(node, parts, 0, len(node.text or b""), escapes='$`\\"'))

    def _expanded(
        self, nodes: Sequence[Node], *, splits: bool = False, in_test: bool = False, as_pattern: bool = False
    ) -> list[str]:
        found = _Fields()
        if self.depth == _NESTED:
            raise refused(self.file, self.line(nodes[0]), "expansions lie in expansions too deeply")
        self.depth += 1
        for node in nodes:
            self._add(node, found, splits, in_test, as_pattern)
        self.depth -= 1
        found.end()
        self.limit(sum(map(len, found.words)), self.line(nodes[0]) if nodes else 0)
        return found.words

    def _add(self, node: Node, found: _Fields, splits: bool, in_test: bool, as_pattern: bool) -> None:
        """Append what a part of a word becomes."""
        kind, text = node.type, text_of(node)
        literal: Callable[[str], str] = escape if as_pattern else str
        if kind in ("concatenation", "command_name"):
            for part in node.children:
                self._add(part, found, splits, in_test, as_pattern)
        elif kind in ("string", "translated_string"):
            parts = [part for part in node.children if part.type in _EXPANSIONS]
            found.add("")
            for number, value in enumerate(self._quoted(node, parts, in_test)):
                if number:
                    found.end()
                found.add(literal(value))
        elif kind == "raw_string":
            found.add(literal(text[text.index("'") + 1 : -1]))
        elif kind == "ansi_c_string":
            found.add(
                literal(
                    re.sub(
                        r"\\(.)", lambda m: _LETTERS.get(m[1], m[1]), text[text.index("'") + 1 : -1], flags=re.DOTALL
                    )
                )
            )
        elif kind in _EXPANSIONS:
            for number, value in enumerate(self._values(node, in_test)):
                if number:
                    found.end()
                found.add_split(value) if splits else found.add(value)
        elif node.is_error:
            found.add(self.mark(text[:60], self.line(node)))
        else:
            found.add(text if as_pattern else re.sub(r"\\(\n?)(.?)", r"\2", text, flags=re.DOTALL))

    def _quoted(self, node: Node, parts: Sequence[Node], in_test: bool) -> list[str]:
        """Return the texts of a quoted word: one, or with "${NAME[@]}" as many as the array holds."""
        start = text_of(node).index('"') + 1
        pieces = self._between(node, parts, start, len(node.text or b"") - 1, escapes='$`"\\', in_test=in_test)
        words: list[list[str]] = [[]]
        for number, piece in enumerate(pieces):
            # Each second piece is that of an expansion; only "${NAME[@]}" has several values.
            values = piece.split("\0") if number % 2 else [piece]
            words[-1].append(values[0])
            words += [[value] for value in values[1:]]
        return ["".join(parts) for parts in words]

    def _between(
        self, node: Node, parts: Sequence[Node], start: int, end: int, *, escapes: str, in_test: bool = False
    ) -> list[str]:
        """Return the text of a node from `start` to `end` in bytes, cut at its parts, with their values in between."""
        source, pieces, place = node.text or b"", [], start
        unescaped = re.compile(rf"\\(?:\n|([{re.escape(escapes)}]))")
        for part in parts:
            inner = text_of(part)
            before = source[place : part.start_byte - node.start_byte].decode() + inner[: _spaces_of(inner)]
            pieces += [unescaped.sub(lambda m: m[1] or "", before), "\0".join(self._values(part, in_test))]
            place = part.end_byte - node.start_byte
        return [*pieces, unescaped.sub(lambda m: m[1] or "", source[place:end].decode())]

    def _values(self, node: Node, in_test: bool) -> list[str]:
        """Return the values of an expansion: one, or those of an array."""
        text, line = text_of(node)[_spaces_of(text_of(node)) :], self.line(node)
        if node.type == "simple_expansion":
            return self.variable(text[1:], line, in_test)[: None if text == "$@" else 1]
        if node.type == "expansion":
            return self._braced(node, text, line, in_test)
        if node.type == "arithmetic_expansion":
            return [self.sum(text[3:-2] if text.startswith("$((") else text[2:-1], line)]
        return [self.mark(text[:60], line)]

    def _braced(self, node: Node, text: str, line: int, in_test: bool) -> list[str]:
        """Return the values of ${...}: a variable, all or one of an array, or a default."""
        if counted := re.fullmatch(r"\$\{#(\w+)\[[@*]\]\}", text):
            return [str(len(self.variables.get(counted[1], [])))]
        found = re.match(r"\$\{(\w+|[@*#])(?:\[([@*]|\d{1,6})\])?(:?[-=+?])?", text)
        if not found or (not found[3] and found.end() != len(text) - 1):
            return [self.mark(text[:60], line)]
        name, index, sign = found.groups()
        values = self.variables.get(name)
        is_set = values is not None and (not (sign or "").startswith(":") or any(values))
        if sign and is_set == sign.endswith("+"):
            signs = [part.end_byte for part in node.children if part.type == sign]
            behind = [part for part in node.named_children if signs and part.start_byte >= signs[0]]
            if sign.endswith("?"):
                return [self.mark(text[:60], line)]
            value = " ".join(self._expanded(behind, in_test=in_test)) if behind else ""
            if sign.endswith("="):
                self.assign(name, [value], appends=False, is_array=False, line=line)
            return [value]
        if values is None:
            return [""] if sign else self.variable(name, line, in_test)
        if index == "@" or name == "@":
            return values or [""]
        if index == "*":
            return [" ".join(values)]
        number = int(index or 0)
        return [values[number] if number < len(values) else ""]

    def sum(self, inner: str, line: int) -> str:
        """Return the value of $((...)), of whole numbers and variables; a mark if nobody knows it."""
        text = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?|\$\{?(\d)\}?", lambda m: self.variable(m[1] or m[2], line, False)[0], inner
        )
        if found := _MARK.search(text):
            return found[0]
        value = computed(text)
        return self.mark(f"$(({inner[:50]}))", line) if value is None else str(value)


def _divided(left: int, right: int) -> int:
    """Divide as bash does, which rounds toward zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATIONS: Mapping[type, Callable[[Any, Any], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.Mod: lambda left, right: left - right * _divided(left, right),
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def computed(text: str) -> int | None:
    """Return the value of a sum or comparison of whole numbers as bash computes it. None if it is something else."""
    try:
        value = _evaluated(ast.parse(" ".join(text.split())[:200], mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return None
    return int(value) if len(text) <= 200 and abs(value) < 2**63 else None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**18:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _evaluated(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATIONS[type(node.ops[0])](_evaluated(node.left), _evaluated(node.comparators[0]))
    raise ValueError("no sum")
