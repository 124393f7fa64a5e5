"""Reads the training command out of a launch script, without running anything.

A subset of bash is read: variables, arrays, quotes, continued lines, ${X:-default}, sums, `if`
and `case` with tests of texts and numbers, and the command in `bash -c` and `eval`. A script is read as it would run
without arguments and with an empty environment, but for the variables given. What needs more, such as $(hostname),
stays in a value as a mark that names its line.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megapar.base.errors import ConfigError
from megapar.migrate.shell_words import FIRST, Expander, Token, refused, tokens_of
from megapar.system.regular_files import read_regular

LARGEST_SCRIPT = 1 << 20  # bytes
_NESTED = 4  # commands in commands, as of bash -c
_BLOCKS = 50  # blocks in blocks
_KEYWORDS = ("then", "do", "else", "{", "!", "time", "exec", "export", "declare", "local", "readonly", "typeset")
_SILENT = ("echo", "printf", "cat", "ls", "cp", "mkdir", "cd", "source", ".", "rm", "tee", "set", "which")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True)
class Launch:
    """A command that starts a program: the words before the program, its name, and the words behind it."""

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]
    line: int
    expander: Expander

    def unresolved(self, word: str) -> str:
        """What keeps `word` from being known, with its line; "" if it is known."""
        return self.expander.unresolved(word)


@dataclass
class _Frame:
    """An open `if`, `case`, loop or function. `active` is whether its commands run; None if that is not known."""

    kind: str
    active: bool | None
    done: bool | None = False  # whether an earlier branch was taken
    tests: list[tuple[str, list[Token]]] = field(default_factory=list)
    word: str = ""
    waits: bool = True  # for `then` or `do`, or in a case for a pattern


@dataclass
class _Script:
    """Goes through the commands of a script once, in order."""

    file: str
    expander: Expander
    depth: int = 0
    frames: list[_Frame] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    succeeded: bool | None = True  # what && and || ask: a test's result; other commands are thought to succeed

    def run(self, text: str, first_line: int = 1) -> None:
        command: list[Token] = []
        before = ";"
        for token in [*tokens_of(text, self.file, first_line), Token("op", "\n", 0)]:
            if token.kind != "op":
                command.append(token)
                continue
            if command and command[0].text == "case" and len(command) > 3:
                self.command(command[:3], before)
                command = command[3:]
            if not self._pattern(command, token):
                self.command(command, before)
            before, command = token.text, []

    def active(self) -> bool | None:
        """Whether commands run here. None: nobody knows."""
        states = [frame.active for frame in self.frames]
        return False if False in states else None if None in states else True

    # Blocks

    def command(self, command: list[Token], before: str) -> None:
        """A simple command, or the part of a compound one up to the next separator."""
        rest = deque(command)
        while rest and rest[0].kind == "word":
            word = rest[0].text
            frame = self.frames[-1] if self.frames else None
            if word in ("if", "while", "until", "elif"):
                self._open(word, rest.popleft())
                before = ";"
                continue
            if word in ("for", "select", "function"):
                self._push(_Frame(word, None if word != "function" else True, waits=False), rest[0])
                return
            if word == "case" and len(rest) > 1:
                value = self.expander.text(rest[1], in_test=True)
                self._push(_Frame("case", False, word=value), rest[0])
                return
            if word in ("fi", "done", "esac", "}"):
                self._close(word)
                rest.popleft()
                continue
            if word in ("then", "do") and frame is not None and frame.waits and frame.kind != "case":
                self._decide(frame)
            elif word == "else" and frame is not None:
                frame.active = None if frame.done is None else not frame.done
            elif frame is not None and frame.waits and frame.kind not in ("case", "function"):
                frame.tests.append((before, list(rest)))
                return
            elif word not in _KEYWORDS:
                break
            rest.popleft()
        if rest:
            self._joined(list(rest), before)

    def _joined(self, command: list[Token], before: str) -> None:
        """A simple command behind a separator."""
        active = self.active()
        if before in ("&&", "||"):
            follows = self.succeeded if before == "&&" or self.succeeded is None else not self.succeeded
            active = False if False in (active, follows) else None if None in (active, follows) else True
        if active is not False:
            is_test = command[0].text in ("[", "[[", "test")
            self.succeeded = self._test(command) if is_test else True
            if not is_test:
                self._simple(command, is_certain=active is True)

    def _open(self, word: str, token: Token) -> None:
        if word != "elif":
            self._push(_Frame(word, True), token)
            return
        if not self.frames or self.frames[-1].kind != "if":
            raise refused(self.file, token.line, "elif without if")
        frame = self.frames[-1]
        frame.tests, frame.waits = [], True
        frame.active = frame.done is not True

    def _push(self, frame: _Frame, token: Token) -> None:
        if len(self.frames) == _BLOCKS:
            raise refused(self.file, token.line, "blocks lie in blocks too deeply")
        self.frames.append(frame)

    def _close(self, word: str) -> None:
        kinds = {"fi": ("if",), "esac": ("case",), "done": ("while", "until", "for", "select"), "}": ("function",)}
        if self.frames and self.frames[-1].kind in kinds[word]:
            self.frames.pop()

    def _decide(self, frame: _Frame) -> None:
        """At `then` and `do`: whether the commands behind it run. A loop that runs, runs nobody knows how often."""
        frame.waits = False
        result = self._tested(frame.tests)
        if frame.kind in ("while", "until"):
            begins = result if frame.kind == "while" or result is None else not result
            frame.active = False if begins is False else None
            return
        earlier = frame.done
        frame.active = False if earlier is True else None if earlier is None and result is not False else result
        if earlier is not True:
            frame.done = True if result is True else None if None in (earlier, result) else False

    def _pattern(self, command: list[Token], token: Token) -> bool:
        """Read the patterns of a case. Whether `command` was one."""
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.kind != "case":
            return False
        if token.text == ";;":
            if not frame.waits:
                self.command(command, ";")
            frame.waits, frame.active = True, False
            return True
        if not frame.waits or (command and command[0].text == "esac"):
            return False
        if token.text in ("|", ")") and command:
            pattern = self.expander.text(command[0], in_test=True)
            known = not self.expander.unresolved(frame.word + pattern)
            matches = re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), frame.word)
            hit = bool(matches) if known else None
            if frame.active is not True and not frame.done and hit is not False:
                frame.active = hit if frame.done is False else None
            if token.text == ")":
                frame.waits = False
                frame.done = frame.active if frame.active is not False else frame.done
        return True

    # Tests

    def _tested(self, tests: Sequence[tuple[str, list[Token]]]) -> bool | None:
        """The result of tests joined by && and ||; None if a command decides it."""
        result: bool | None = None
        for number, (before, command) in enumerate(tests):
            value = self._test(command)
            if number == 0 or before not in ("&&", "||"):
                result = value
            elif before == "&&":
                result = False if False in (result, value) else None if None in (result, value) else True
            else:
                result = True if True in (result, value) else None if None in (result, value) else False
        return result

    def _test(self, command: Sequence[Token]) -> bool | None:
        words = [self.expander.text(token, in_test=True) for token in command if token.kind == "word"]
        negated = words[:1] == ["!"]
        words = words[negated:]
        if words[:1] not in (["["], ["[["], ["test"]) and words[-1:] != ["]]"]:
            return None
        words = [word for word in words if word not in ("[", "[[", "test", "]", "]]")]
        if words[:1] == ["!"]:
            negated, words = not negated, words[1:]
        if any(self.expander.unresolved(word) for word in words):
            return None
        result = _compared(words)
        return result if result is None else result != negated

    # Commands

    def _simple(self, command: list[Token], *, is_certain: bool) -> None:
        """Assignments, or a command that starts a program."""
        count = 0
        while count < len(command) and (command[count].kind == "array" or _ASSIGNED.match(command[count].text)):
            self._assign(command[count], is_certain=is_certain)
            count += 1
        command = command[count:]
        if not command or (command[0].kind == "word" and command[0].text in _SILENT):
            return
        words = [word for token in command for word in self.expander.fields(token)]
        line = command[0].line
        nested = next((i for i, word in enumerate(words) if word in ("-c", "-lc", "eval")), None)
        is_shell = nested is not None and (words[nested] == "eval" or re.search(r"(ba|z)?sh$", words[nested - 1]))
        if nested is not None and is_shell and words[nested + 1 :]:
            if self.depth == _NESTED:
                raise refused(self.file, line, "commands lie in commands too deeply")
            text = " ".join(words[nested + 1 :]) if words[nested] == "eval" else words[nested + 1]
            inner = _Script(self.file, self.expander, self.depth + 1)
            inner.run(text, line)
            self.launches += inner.launches
            return
        launch = _launch(words, line, self.expander)
        if launch is not None:
            self.launches.append(launch)

    def _assign(self, token: Token, *, is_certain: bool) -> None:
        found = _ASSIGNED.match(token.text)
        assert found
        name, appends = found[1], bool(found[2])
        if token.kind == "array":
            values = [word for item in token.items for word in self.expander.fields(item)]
        else:
            values = [self.expander.text(Token("word", token.text[found.end() :], token.line))]
        if not is_certain:
            why = f"{name} is set under a condition that only a run decides"
            mark = self.expander.mark(why, token.line)
            old = [] if appends else self.expander.variables.get(name, [])
            # Flags of before may be those that are used, so none is lost.
            values = [*(value for value in old if value.lstrip().startswith("--")), *values]
            values = [" ".join(f"{word}{mark}" for word in value.split()) for value in values]
            values = values if token.kind == "array" else [" ".join(values)]
        self.expander.assign(name, values, appends=appends, is_array=token.kind == "array", line=token.line)


def _compared(words: Sequence[str]) -> bool | None:
    """The result of a test of texts and whole numbers; None for tests of files."""
    if len(words) == 1:
        return words[0] not in ("", "-n")
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return (left == right) == (sign != "!=")
    numbers = {"-eq": 0, "-ne": 0, "-gt": 1, "-lt": -1, "-ge": 1, "-le": -1}
    if sign not in numbers or not (re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right)):
        return None
    order = (int(left) > int(right)) - (int(left) < int(right))
    if sign == "-ne":
        return order != 0
    return order == numbers[sign] or (order == 0 and sign in ("-ge", "-le"))


def _launch(words: Sequence[str], line: int, expander: Expander) -> Launch | None:
    """The command as a launch, if it names a program and flags behind it."""
    programs = [number for number, word in enumerate(words) if word.endswith(".py")]
    if not programs:
        modules = [number + 1 for number, word in enumerate(words[:-1]) if word == "-m"]
        programs = [n for n in modules[-1:] if not words[n].startswith("torch.distributed")]
    if not programs:
        return None
    behind = tuple(words[programs[0] + 1 :])
    if not any(word.startswith("--") or expander.unresolved(word) for word in behind):
        return None
    return Launch(tuple(words[: programs[0]]), words[programs[0]], behind, line, expander)


def read_launch(file: str | Path, variables: Mapping[str, str] | None = None) -> Launch:
    """The command with the most flags in a launch script. Raises ConfigError: one line with the file and line."""
    try:
        data = read_regular(file, LARGEST_SCRIPT)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()} (a launch script is read)") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is no text; a launch script is read") from None
    return launch_of(text, str(file), variables or {})


def launch_of(text: str, file: str, variables: Mapping[str, str]) -> Launch:
    """`read_launch` of a text."""
    if "\0" in text:
        raise ConfigError(f"{file}: is no text; a launch script is read")
    if FIRST in text:
        raise ConfigError(f"{file}: holds the letter U+{ord(FIRST):04X}, which stands for something else here")
    expander = Expander(file, variables)
    script = _Script(file, expander)
    script.run(text)
    if not script.launches:
        raise ConfigError(
            f"{file}: holds no command with a program (NAME.py) and its flags; give the command behind --"
        )

    def flags(launch: Launch) -> int:
        return sum(word.startswith("--") for word in launch.words)

    # Of equal commands the last one: scripts print or test a command before they run it.
    best = max(reversed(script.launches), key=flags)
    if not flags(best):
        reasons = (expander.unresolved(word) for word in best.words)
        reason = next(filter(None, reasons), "it has none")
        raise ConfigError(f"{file}:{best.line}: the flags of {best.program} cannot be read: {reason}")
    return best
