"""Reads the training command out of a launch script by bash's grammar, without running anything.

tree-sitter parses the script, and this module follows the tree: variables, arrays, functions, `if` and `case` with
tests of texts and numbers, here-documents, and the commands in `bash -c`, `eval` and `sbatch <<EOF`. A script is read
as it would run without arguments and with an empty environment, but for the variables given. What needs more, such as
$(hostname), stays in a value as a mark that names its line.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Query, QueryCursor

from megapar.base.errors import ConfigError
from megapar.system.regular_files import read_regular
from megapar_tools.migrate.expansion import FIRST, Expander, computed, refused, text_of

LARGEST_SCRIPT = 1 << 20  # bytes
_NESTED = 4  # commands in commands, as of bash -c
_STATEMENTS = 300_000  # functions that call functions make many of a few
_SECONDS = 5  # for the grammar
_BASH = Language(tree_sitter_bash.language())
_BLOCKS = 50  # blocks in blocks
_SILENT = ("echo", "printf", "cat", "ls", "cp", "mkdir", "cd", "rm", "tee", "which")
_READS = ("read", "mapfile", "readarray", "getopts", "let")  # commands that set the variables that they name
_SHELL = re.compile(r"(.*/)?(ba|z|da)?sh$")
_TAKES_SCRIPT = re.compile(r"(.*/)?(sbatch|srun|qsub|bsub|ssh|(ba|z|da)?sh)$")
_TESTS = (
    "test_command",
    "negated_command",
    "list",
    "parenthesized_expression",
    "unary_expression",
    "binary_expression",
)


@dataclass(frozen=True)
class Launch:
    """A command that starts a program: the words before the program, its name, and the words behind it.

    `documents` has the files that the script writes, by name. `notes` say what of the script is not certain.
    """

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]
    line: int
    expander: Expander
    documents: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def unresolved(self, word: str) -> str:
        """Return what keeps `word` from being known, with its line; "" if it is known."""
        return self.expander.unresolved(word)


@dataclass
class _Script:
    """Goes through the statements of a script once, in order.

    `condition` is why nobody knows whether the statement runs, "" if it does.
    """

    file: str
    expander: Expander
    launches: list[Launch] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    condition: str = ""
    texts: int = 0  # around this one
    blocks: int = 0
    statements: int = 0

    def read(self, text: str, first_line: int, command: str = "") -> None:
        """Read a script, or one in a command of a script."""
        if self.texts > _NESTED:
            raise refused(self.file, first_line, f"commands lie in commands too deeply: {command[:40]}")
        before, self.expander.first_line = self.expander.first_line, first_line
        self.texts += 1
        tree = _parsed(text, self.file, first_line)
        for node in _wrong_in(tree):
            why = f"is not bash: {' '.join(text_of(node).split())[:60]}" if text_of(node) else f"lacks a {node.type}"
            self.notes.append(f"line {self.expander.line(node)} {why}")
        self.block(tree.children)
        for name in [name for name in self.functions if name not in self.called]:
            _call(self, name, ())  # so that no command is lost
        self.texts -= 1
        self.expander.first_line = before

    def block(self, nodes: Iterable[Node], condition: str = "") -> bool | None:
        """Read statements in order, under a condition that nobody knows; returns the result of the last one."""
        self.blocks += 1
        outer, self.condition = self.condition, self.condition or condition
        result: bool | None = True
        for node in nodes:
            self.statements += 1
            if self.blocks > _BLOCKS or self.statements > _STATEMENTS:
                why = "blocks lie in blocks too deeply" if self.blocks > _BLOCKS else f"runs {_STATEMENTS:,} statements"
                raise refused(self.file, self.expander.line(node), why)
            if node.is_named:
                result = self.statement(node)
        self.blocks -= 1
        self.condition = outer
        return result

    def statement(self, node: Node) -> bool | None:
        """Read a statement; returns its result as && and || ask for it, None if only a run decides."""
        match node.type:
            case "command":
                return _command(self, node)
            case "declaration_command" | "variable_assignments":
                return self.block(child for child in node.children if child.type == "variable_assignment")
            case "variable_assignment":
                _assign(self, node)
            case "unset_command" if not self.condition:
                for name in node.named_children:
                    self.expander.variables.pop(text_of(name), None)
            case "list" | "test_command" | "negated_command":
                return _test(self, node)
            case "redirected_statement":
                return _redirected(self, node)
            case "if_statement":
                _branches(self, node)
            case "while_statement":
                _loop(self, node)
            case "for_statement" | "c_style_for_statement":
                _loop_over(self, node)
            case "case_statement":
                _case(self, node)
            case "function_definition":
                self.functions[text_of(node.child_by_field_name("name") or node)] = node
            case "compound_statement" | "parenthesized_expression" if text_of(node).startswith("(("):
                _count(self, text_of(node), self.expander.line(node))
                return None
            case "compound_statement" | "subshell" | "pipeline" | "do_group":
                return self.block(node.children)
            case "ERROR":
                self.block(node.children)
        return True


# Tests


def _test(script: _Script, node: Node, *, of_branch: bool = False) -> bool | None:
    """Return the result of a test; None if only a run decides. In && and || a command is thought to succeed."""
    children = [child for child in node.children if child.type not in ("[", "[[", "]", "]]", "(", ")", "comment")]
    sign = text_of(children[1]).strip() if len(children) == 3 else ""
    script.blocks += 1
    if script.blocks > _BLOCKS:
        raise refused(script.file, script.expander.line(node), "tests lie in tests too deeply")
    result: bool | None
    if node.type not in _TESTS:
        result = _result(script, node, of_branch)
    elif sign in ("&&", "||") and node.type in ("list", "binary_expression"):
        result = _joined(script, children[0], sign, children[2], of_branch)
    elif node.type == "negated_command" or (len(children) == 2 and text_of(children[0]).strip() == "!"):
        result = _test(script, children[-1], of_branch=of_branch)
        result = result if result is None else not result
    elif len(children) == 1:
        inner = children[0]
        result = _test(script, inner) if inner.type in _TESTS else _compared(script, children)
    else:
        result = _compared(script, children)
    script.blocks -= 1
    return result


def _result(script: _Script, node: Node, of_branch: bool) -> bool | None:
    """Read a command that stands for a test."""
    words = text_of(node).split()
    if words[:1] == ["test"] and node.type == "command":
        texts = [script.expander.text(argument, in_test=True) for argument in node.children_by_field_name("argument")]
        return None if any(map(script.expander.unresolved, texts)) else compare(texts)
    if words in (["true"], [":"], ["false"]):
        return words != ["false"]
    if node.type == "compound_statement" and text_of(node).startswith("(("):
        value = script.expander.sum(text_of(node)[2:-2], script.expander.line(node))
        return bool(int(value)) if value.lstrip("-").isdecimal() else script.statement(node)
    result = script.statement(node)
    return None if of_branch and node.type not in _TESTS else result


def _joined(script: _Script, left: Node, sign: str, right: Node, of_branch: bool) -> bool | None:
    """Read && and ||."""
    first = _test(script, left, of_branch=of_branch)
    decides = sign == "||"
    if first is decides:
        return first
    outer = script.condition
    if first is None:
        script.condition = script.condition or _asked(script, left)
    second = _test(script, right, of_branch=of_branch)
    script.condition = outer
    return second if first is not None or second is decides else None


def _compared(script: _Script, children: Sequence[Node]) -> bool | None:
    """Return the result of a test of texts and numbers, such as `-z X` and `X == Y*`."""
    is_pattern = len(children) == 3 and text_of(children[1]).strip() in ("==", "=", "!=")
    words = [
        script.expander.text(child, in_test=True, as_pattern=is_pattern and number == 2)
        for number, child in enumerate(children)
    ]
    return None if any(map(script.expander.unresolved, words)) else compare(words)


def _asked(script: _Script, *nodes: Node) -> str:
    """Return a condition for a message, with its line."""
    text = " ".join(" ".join(map(text_of, nodes)).split())
    return f"{text[:60]}, line {script.expander.line(nodes[0])}"


# Blocks


def _branches(script: _Script, node: Node) -> None:
    """Read the branches of an `if` that may run. Where all others end the script, the last one is certain."""
    possible: list[tuple[str, list[Node]]] = []
    asked = ""
    clauses = [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]
    for clause in clauses:
        children = clause.children
        tests = [child for child in takewhile(lambda child: child.type != "then", children) if child.is_named]
        body = children[next((n for n, c in enumerate(children) if c.type in ("then", "else")), 0) + 1 :]
        body = [child for child in body if child.type not in ("elif_clause", "else_clause", "fi")]
        is_else = clause.type == "else_clause"
        results = [] if is_else else [_test(script, test, of_branch=True) for test in tests]
        result = True if is_else else results[-1] if results else None
        if result is None and not asked:
            asked = _asked(script, *tests)
        if result is not False:
            possible.append((asked, body))
        if result is True:
            break
    else:
        possible.append((asked, []))
    staying = [body for _, body in possible if not _ends(body)]
    for asked, body in possible:
        is_certain = not asked or (len(staying) == 1 and body is staying[0])
        if is_certain and asked and body:
            script.notes.append(f"read as the branch that does not end the script: if {asked}")
        script.block(body, "" if is_certain else asked)


def _loop(script: _Script, node: Node) -> None:
    """Read the body of `while` and `until`, if it begins: nobody knows how often it runs."""
    condition = node.child_by_field_name("condition")
    result = _test(script, condition, of_branch=True) if condition else None
    until = text_of(node).startswith("until")
    body = node.child_by_field_name("body")
    if body and (result is None or result != until):
        script.block([body], _asked(script, condition or node))


def _loop_over(script: _Script, node: Node) -> None:
    """Read the body of `for` once, with a mark for its variable."""
    variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    asked = " ".join(takewhile(lambda word: word not in ("do", "{"), text_of(node)[:200].split()))
    if variable:
        name, line = text_of(variable), script.expander.line(node)
        script.expander.variables[name] = [script.expander.mark(f"{name} of a loop: {asked[:60].rstrip(';')}", line)]
    if body:
        script.block([body], f"{asked[:60].rstrip(';')}, line {script.expander.line(node)}")


def _case(script: _Script, node: Node) -> None:
    """Read the branches of a `case` that may run."""
    value = node.child_by_field_name("value")
    word = script.expander.text(value, in_test=True) if value else ""
    asked = _asked(script, value or node)
    is_sure = not script.expander.unresolved(word)
    for item in node.children:
        if item.type != "case_item":
            continue
        nodes = item.children_by_field_name("value")
        patterns = [script.expander.text(pattern, in_test=True, as_pattern=True) for pattern in nodes]
        closing = next((number for number, child in enumerate(item.children) if child.type == ")"), 0)
        body = item.children[closing + 1 :]
        # fnmatch goes back by single stars, so that no pattern takes longer than its letters x those of the word.
        if "*" in patterns or (not script.expander.unresolved(word) and any(_matches(word, p) for p in patterns)):
            script.block(body, "" if is_sure else f"case {asked}")
            return
        if script.expander.unresolved("".join([word, *patterns])):
            is_sure = False
            script.block(body, f"case {asked}")


# Commands


def _redirected(script: _Script, node: Node) -> bool | None:
    """Read a statement with redirections: a here-document is a script of its command, or a file."""
    body = node.child_by_field_name("body")
    redirects = node.children_by_field_name("redirect")
    for redirect in redirects:
        if redirect.type == "heredoc_redirect":
            _document(script, body, redirect, redirects)
    return script.statement(body) if body and body.type not in _TESTS else _test(script, body) if body else True


def _document(script: _Script, body: Node | None, redirect: Node, redirects: Sequence[Node]) -> None:
    """Read a here-document."""
    parts = {child.type: child for child in redirect.children}
    inner = parts.get("heredoc_body")
    words = _words(script, body) if body and body.type == "command" else []
    if inner is None:
        return
    start = text_of(parts["heredoc_start"])
    text = script.expander.spliced(inner) if re.fullmatch(r"\w+", start) else text_of(inner)
    if any(_TAKES_SCRIPT.match(word) for word in words[:1]):
        script.read(text, script.expander.line(inner), words[0])
    files = [*redirects, *redirect.children_by_field_name("redirect")]
    targets = [f.child_by_field_name("destination") for f in files if f.type == "file_redirect"]
    names = [script.expander.text(target) for target in targets if target]
    _written(script, [*names, *(words[1:] if words[:1] == ["tee"] else [])], text, script.expander.line(inner))


def _written(script: _Script, names: Iterable[str], text: str, line: int) -> None:
    """Keep the text of a file that the script writes."""
    for name in names:
        script.documents[name] = text
        if script.condition:
            script.notes.append(f"line {line} writes {name} under a condition that only a run decides")


def _words(script: _Script, node: Node) -> list[str]:
    """Return the words of a command."""
    kinds = ("variable_assignment", "comment")
    parts = [part for part in node.named_children if part.type not in kinds and not part.type.endswith("_redirect")]
    return [word for part in parts for word in script.expander.fields(part)]


def _command(script: _Script, node: Node) -> bool | None:
    """Read a simple command: assignments, and a program that it starts."""
    name = node.child_by_field_name("name")
    for child in node.named_children:
        if child.type == "variable_assignment":
            _assign(script, child)
        if child.type == "herestring_redirect" and name and _SHELL.match(text_of(name)):
            script.read(script.expander.text(child.named_children[-1]), script.expander.line(child), text_of(name))
    if name is None or text_of(name) in _SILENT:
        return True
    words, line = _words(script, node), script.expander.line(name)
    while words[:1] in (["exec"], ["time"], ["command"]):
        words.pop(0)
    if not words or words[0] in _SILENT:
        return True
    if words[0] in script.functions:
        _call(script, words[0], words[1:])
    elif words[0] in ("source", "."):
        script.notes.append(f"line {line} reads another script, whose variables are not known: {words[-1]}")
    elif words[0] in _READS:
        for word in words[1:]:
            _count(script, f"{word}=" if word.isidentifier() else word, line)
    elif words[0] == "set" and "--" in words:
        script.expander.variables |= _positional(words[words.index("--") + 1 :])
    elif (text := _inner(words)) is not None:
        script.read(text, line, words[0])
    elif launch := _launch(words, line, script):
        script.launches.append(launch)
    return True


def _call(script: _Script, name: str, words: Sequence[str]) -> None:
    """Read the body of a function with its arguments."""
    script.called.add(name)
    outer = {**script.expander.variables}
    places = _positional(words)
    script.expander.variables |= places
    body = script.functions[name].child_by_field_name("body")
    script.block([body] if body else [])
    for place in places:
        script.expander.variables.pop(place, None)
        if place in outer:
            script.expander.variables[place] = outer[place]


def _count(script: _Script, text: str, line: int) -> None:
    """Forget the variables that a sum sets, or a command that reads input."""
    for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
        script.expander.variables[name] = [script.expander.mark(f"{name} is set by {text[:40]}", line)]


def _assign(script: _Script, node: Node) -> None:
    """Set a variable. Under a condition that nobody knows each value is marked."""
    named, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    line = script.expander.line(node)
    if named is None or named.type == "subscript":
        _count(script, text_of(node).partition("[")[0] + "=", line)
        return
    name, is_array = text_of(named), value is not None and value.type == "array"
    appends = any(child.type == "+=" for child in node.children)
    if value is None:
        values = [] if is_array else [""]
    elif is_array:
        parts = [part for part in value.named_children if part.type != "comment"]
        values = [word for part in parts for word in script.expander.fields(part)]
    else:
        values = [script.expander.text(value)]
    if script.condition:
        why = f"{name} is set under a condition that only a run decides: {script.condition}"
        # The condition's own line is the one to look at.
        what, _, number = why.rpartition(", line ")
        mark = script.expander.mark(what, int(number))
        old = [] if appends else script.expander.variables.get(name, [])
        # Flags of before may be those that are used, so none is lost.
        values = [*(value for value in old if value.lstrip().startswith("--")), *values]
        values = [" ".join(f"{word}{mark}" for word in value.split()) for value in values]
        values = values if is_array else [" ".join(values)]
    script.expander.assign(name, values, appends=appends, is_array=is_array, line=line)


def _parsed(text: str, file: str, line: int) -> Node:
    """Return the tree of a script, around three weaknesses of the grammar."""
    # The grammar cuts $A/$B.c behind the second $, and reads ${A}/${B}.c well.
    text = re.sub(r"(?<![\\$])\$([A-Za-z_]\w*|\d)", r"${\1}", text)
    tree = _tree(text.encode(), file, line)
    if tree.has_error:
        # Published scripts name what is to be filled in as <PATH_OF_DATA>.
        filled = _tree(re.sub(r"<(\w[^<>\n|&;$'\"()]*)>", r"'<\1>'", text).encode(), file, line)
        tree = tree if filled.has_error else filled
    # A=1 B=2 at the end of a line is taken for the beginning of the next line's command.
    assigned = Query(_BASH, "(command (variable_assignment) @last . name: (command_name))")
    source = tree.text or b""
    for _ in range(2):
        ends = {node.end_byte for node in QueryCursor(assigned).captures(tree).get("last", [])}
        ends = {end for end in ends if source[end : end + 200].lstrip(b" \t")[:1] == b"\n"}
        if not ends:
            break
        source = b";".join(source[start:end] for start, end in pairwise([0, *sorted(ends), len(source)]))
        tree = _tree(source, file, line)
    return tree


def _tree(source: bytes, file: str, line: int) -> Node:
    """Return the tree of a text. Raises ConfigError where the grammar needs too long, as of 20,000 open brackets."""
    parser, end = Parser(_BASH), time.process_time() + _SECONDS
    try:
        parser.parse(lambda at, _: source[at : at + 65536], progress_callback=lambda at, _: time.process_time() > end)
    except ValueError:
        raise refused(file, line, f"cannot be read as bash within {_SECONDS} seconds") from None
    return parser.parse(source).root_node


def _wrong_in(node: Node) -> list[Node]:
    """Return up to three places of a tree that the grammar does not understand."""
    found: list[Node] = []
    queue = [node]
    while queue and len(found) < 3:
        node = queue.pop()
        if (node.is_error and text_of(node).strip()) or node.is_missing:
            found.append(node)
        elif node.has_error:
            queue += [child for child in reversed(node.children) if child.has_error or child.is_missing]
    return found


def _positional(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the positional parameters of a function or a script, by name."""
    numbered = {str(number): [word] for number, word in enumerate(words, 1)}
    return {**numbered, "@": [*words], "*": [" ".join(words)], "#": [str(len(words))]} if words else {}


def _ends(body: Sequence[Node]) -> bool:
    """Return whether the last statement of a branch ends the script."""
    last = [text_of(node).split()[:1] for node in body if node.is_named and node.type != "comment"][-1:]
    return last in ([["exit"]], [["return"]])


def _inner(words: Sequence[str]) -> str | None:
    """Return the script in a command: the words behind `eval`, or the text behind bash -c. None if there is none."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for number, word in enumerate(words):
        if _SHELL.match(word):
            options = [*takewhile(lambda word: word.startswith("-"), words[number + 1 :])]
            behind = words[number + 1 + len(options) :]
            if behind and any(re.fullmatch(r"-[a-z]*c", option) for option in options):
                return behind[0]
    return None


def _matches(word: str, pattern: str) -> bool:
    """Return whether a word matches a pattern of bash. Braces and classes of letters are read as fnmatch reads them."""
    return fnmatchcase(word, re.sub(r"\\(.)", r"[\1]", pattern))


def compare(words: Sequence[str]) -> bool | None:
    """Return the result of a test of texts and whole numbers; None for tests of files."""
    if len(words) == 1:
        return words[0] not in ("", "-n")
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return _matches(left, right) == (sign != "!=")
    numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
    if sign not in numbers or not (re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right)):
        return None
    return bool(computed(f"{int(left)} {numbers[sign]} {int(right)}"))


def _launch(words: Sequence[str], line: int, script: _Script) -> Launch | None:
    """Return the command as a launch, if it names a program and flags behind it."""
    named = [script.expander.plain(word) for word in words]
    programs = [number for number, word in enumerate(named) if word.endswith(".py")]
    if not programs:
        modules = [number + 1 for number, word in enumerate(words[:-1]) if word == "-m"]
        programs = [n for n in modules[-1:] if not words[n].startswith("torch.distributed")]
    if not programs:
        return None
    behind = tuple(words[programs[0] + 1 :])
    if not any(word.startswith("--") or script.expander.unresolved(word) for word in behind):
        return None
    notes = [f"line {line} stands under a condition that only a run decides: {script.condition}"]
    return Launch(
        tuple(words[: programs[0]]),
        words[programs[0]],
        behind,
        line,
        script.expander,
        script.documents,
        tuple(notes if script.condition else ()),
    )


def read_launch(file: str | Path, variables: Mapping[str, str] | None = None) -> Launch:
    """Return the command with the most flags in a launch script. Raises ConfigError, one line with the file."""
    try:
        data = read_regular(file, LARGEST_SCRIPT)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()} (a launch script is read)") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is no text; a launch script is read") from None
    return launch_of(text, str(file), variables or {})


def launch_of(text: str, file: str, variables: Mapping[str, str]) -> Launch:
    """Return the launch in the text of a script, as `read_launch` does."""
    if "\0" in text:
        raise ConfigError(f"{file}: is no text; a launch script is read")
    if FIRST in text:
        raise ConfigError(f"{file}: holds the letter U+{ord(FIRST):04X}, which stands for something else here")
    expander = Expander(file, variables)
    script = _Script(file, expander)
    script.read(text, 1)
    if not script.launches:
        why = "".join(f" ({note})" for note in script.notes[:1])
        raise ConfigError(
            f"{file}: holds no command with a program (NAME.py) and its flags{why}; give the command behind --"
        )

    def flags(launch: Launch) -> int:
        return sum(word.startswith("--") for word in launch.words)

    # Of equal commands the last one: scripts print or test a command before they run it.
    best = max(reversed(script.launches), key=flags)
    if not flags(best):
        reasons = (expander.unresolved(word) for word in best.words)
        reason = next(filter(None, reasons), "it has none")
        raise ConfigError(f"{file}:{best.line}: the flags of {best.program} cannot be read: {reason}")
    return replace(best, notes=(*best.notes, *dict.fromkeys(script.notes)))
