"""Conversations as text, by chat templates, and which characters of the text are trained.

A template is Hugging Face's (chat_template.jinja). The trained characters are those of the assistant's turns, with what
ends a turn. A template marks them by `{% generation %}`. Without that tag they are found by prefixes: a conversation
cut before and behind a turn must be a beginning of the whole one.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megapar.data.conversations import Message
from megapar.errors import ConfigError, DataError, reason_of
from megapar.system.regular_files import read_regular

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
BUILT_IN = {"chatml": CHATML}

Turns = Literal["all", "last"]
# A template adds it where an answer has no thoughts. It is no answer.
_NO_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` as a block of text. With marks around it, if the environment has some."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        marks: Any = self.environment.globals["generation_marks"]
        first, last = marks
        return f"{first}{caller()}{last}"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans [start, stop) of its characters that are trained."""

    text: str
    trained: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `place` is its path, or its name among BUILT_IN, and `variables` are of the tokenizer."""

    source: str
    place: str
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself what the assistant generates."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, marks: tuple[str, str] = ("", "")
    ) -> str:
        """The conversation as text. Raises DataError if the template fails, or refuses it by raise_exception."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "generation_marks": marks}
        try:
            template = environment.from_string(self.source)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self.variables)
        except jinja2.TemplateError as error:
            raise DataError(f"the template {self.place} refuses it: {error}") from None
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            raise DataError(f"the template {self.place} fails: {reason_of(error)}") from None

    def rendered(self, messages: Sequence[Message], turns: Turns = "all") -> Rendered:
        """The text of a conversation with its trained spans.

        Raises DataError if the template cannot be masked: if the text before a turn depends on what comes after it.
        """
        text = self.text(messages)
        found = self._marked_spans(messages, text) if self.has_marks else self._spans_by_prefixes(messages, text, turns)
        if turns == "last":
            found = found[-1:]
        return Rendered(text, found)

    def _marked_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        # Letters that no message can have by chance. They are looked for in the text, so they must not be in it.
        key = hashlib.sha256(text.encode()).hexdigest()
        first, last = f"<{key}[", f"]{key}>"
        pieces = re.split(f"({re.escape(first)}|{re.escape(last)})", self.text(messages, marks=(first, last)))
        spans, at, start = [], 0, 0
        for piece in pieces:
            if piece == first:
                start = at
            elif piece == last:
                spans.append((start, at))
            else:
                at += len(piece)
        if "".join(piece for piece in pieces if piece not in (first, last)) != text:
            raise DataError(f"the template {self.place} changes what is between generation tags; it cannot be masked")
        return spans

    def _spans_by_prefixes(self, messages: Sequence[Message], text: str, turns: Turns) -> list[tuple[int, int]]:
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for number in numbers[-1:] if turns == "last" else numbers:
            before = self.text(messages[:number], add_generation_prompt=True)
            through = self.text(messages[: number + 1])
            if not text.startswith(through) or not through.startswith(before):
                raise DataError(
                    f"the template {self.place} cannot be masked: what it writes up to message {number + 1} changes "
                    "with what follows; mark the assistant's text in it with {% generation %}, or train --turns last"
                )
            start = len(before) + _no_thoughts(through[len(before) :], messages[number])
            spans.append((start, _end(through, messages[number])))
        return spans


def _no_thoughts(turn: str, message: Message) -> int:
    """How many letters of a turn are empty thoughts that the template has added."""
    found = _NO_THOUGHTS.match(turn)
    if found is None or _NO_THOUGHTS.match(message["content"]):
        return 0
    return found.end()


def _end(text: str, message: Message) -> int:
    """Where the trained text of the last turn ends: behind what ends the turn, without white space behind that.

    Without any such text white space ends the turn.
    """
    stripped = text.rstrip()
    return len(text) if stripped.endswith(message["content"].rstrip()) else len(stripped)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    # jinja2's own filter would escape HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def load_template(spec: str, tokenizer: str) -> ChatTemplate:
    """The template of --template: a file, a name among BUILT_IN, or if it is "" that of the tokenizer's folder.

    Raises ConfigError if there is none, or if it is no template.
    """
    folder = Path(tokenizer.removeprefix("hf:")).parent if tokenizer.startswith("hf:") else None
    config: dict[str, Any] = {}
    if folder is not None and (folder / "tokenizer_config.json").exists():
        config = _object(folder / "tokenizer_config.json")
    variables = {name: text for name, text in _special_tokens(config).items() if text}
    if spec in BUILT_IN:
        return _checked(ChatTemplate(BUILT_IN[spec], spec, variables))
    if spec:
        return _checked(ChatTemplate(_read(Path(spec)), spec, variables))
    if folder is not None and (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        return _checked(ChatTemplate(_read(path), str(path), variables))
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    if isinstance(found, str):
        return _checked(ChatTemplate(found, f"{folder}/tokenizer_config.json", variables))
    raise ConfigError(f"--tokenizer {tokenizer}: has no chat template beside it; --template names a file, or chatml")


def _checked(template: ChatTemplate) -> ChatTemplate:
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    try:
        environment.parse(template.source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"--template {template.place}: no jinja template: {error}") from None
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the others of a tokenizer_config.json: each is a text, or an object with it."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config.get(name) for name in names}
    return {name: value.get("content", "") if isinstance(value, dict) else value or "" for name, value in found.items()}


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template {path}: cannot be read: {reason_of(error)}; chatml is built in") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
    return found if isinstance(found, dict) else {}
