"""Chat templates (chat_template.jinja of Hugging Face): conversations as text, as transformers renders them.

`megapar_tools.prepare.chat_masks` finds which characters of the text are trained.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megapar.base.errors import ConfigError, DataError, reason_of
from megapar.data.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_file
from megapar.system.regular_files import read_regular
from megapar_tools.prepare.conversations import THOUGHTS, ConversationContext, Message
from megapar_tools.prepare.template_process import TemplateError, TemplateProcess

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
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `place` is its path, or its name among BUILT_IN, and `variables` are of the tokenizer.

    `tool_use` is the template of conversations with tools, if a tokenizer has one of its own for them. `now` is the
    time that `strftime_now` of a template writes. `process` renders, and may be shared.
    """

    source: str
    place: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    tool_use: str = ""
    now: datetime = field(default_factory=datetime.now)
    process: TemplateProcess = field(default_factory=TemplateProcess, repr=False, compare=False)

    def source_for(self, beside: ConversationContext) -> str:
        """The template of a conversation: as in transformers `tool_use` if there are tools, even no entry of them."""
        return self.tool_use if self.tool_use and beside.tools is not None else self.source

    def reads(self, word: str) -> bool:
        """Whether a word, such as the name of a message's key, stands in the template."""
        return re.search(rf"\b{re.escape(word)}\b", self.source + self.tool_use) is not None

    @property
    def sha256(self) -> str:
        return hashlib.sha256((self.source + self.tool_use).encode()).hexdigest()

    def text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
        beside: ConversationContext | None = None,
    ) -> str:
        """The conversation as text. Raises DataError if the template fails, or refuses it by raise_exception."""
        beside = beside or ConversationContext()
        found = {
            **self.variables,
            **beside.options,
            "messages": [_with_aliases(message) for message in messages],
            "tools": beside.tools,
            "documents": beside.documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self.process.render(self.source_for(beside), found, marks, self.now)
        except TemplateError as error:
            raise DataError(f"the template {self.place} {error}") from None


def _with_aliases(message: Message) -> Message:
    """A message with its thoughts under the names that templates read, as in transformers."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def load_template(spec: str, tokenizer_spec: str, tokenizer: Tokenizer | None = None, date: str = "") -> ChatTemplate:
    """The template of --template: a file, a name among BUILT_IN, or if it is "" that of the tokenizer's folder.

    `date` is the time of the template's clock, as ISO 8601; by default now. Raises ConfigError if there is no template,
    if it is none, or if it writes an end token that the tokenizer has no name for.
    """
    file = tokenizer_file(tokenizer_spec) if tokenizer_spec.startswith("hf:") else None
    folder = file.parent if file is not None else None
    config = _object(folder / "tokenizer_config.json") if folder is not None else {}
    source, place, tool_use = _found(spec, folder, config)
    if source is None:
        raise ConfigError(
            f"--tokenizer {tokenizer_spec}: has no chat template beside it; --template names a file, or chatml"
        )
    if folder is not None:
        variables = _special_tokens(config, _object(folder / "special_tokens_map.json"))
    else:
        variables = tokenizer.special_tokens if isinstance(tokenizer, SentencePieceTokenizer) else {}
    template = ChatTemplate(source, place, variables, tool_use, _moment(date))
    for text in filter(None, (source, tool_use)):
        try:
            template.process.check(text)
        except TemplateError as error:
            raise ConfigError(f"--template {place}: no jinja template: {error}") from None
    for name in ("bos_token", "eos_token"):
        if folder is None and name not in variables and template.reads(name):
            raise ConfigError(
                f"--template {place}: writes {name}, and the tokenizer {tokenizer_spec} has none that a text can hold; "
                "take a template without it, or the tokenizer as hf:FILE"
            )
    return template


def _found(spec: str, folder: Path | None, config: dict[str, Any]) -> tuple[str | None, str, str]:
    """The source of a template or None, its place, and the source of a template of its own for tools or ""."""
    if spec in BUILT_IN:
        return BUILT_IN[spec], spec, ""
    if spec:
        return _read(Path(spec)), spec, ""
    if folder is None:
        return None, "", ""
    path = folder / "chat_template.jinja"
    if path.exists():
        further = folder / "additional_chat_templates/tool_use.jinja"
        return _read(path), str(path), _read(further) if further.exists() else ""
    place = f"{folder}/tokenizer_config.json"
    found = config.get("chat_template")
    by_name: dict[Any, Any] = {"default": found}
    if isinstance(found, list):
        by_name = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    elif isinstance(found, dict):
        by_name = found
    default, tool_use = by_name.get("default"), by_name.get("tool_use")
    return default if isinstance(default, str) else None, place, tool_use if isinstance(tool_use, str) else ""


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the others, by the files of a tokenizer. Each is a text, or an object with it.

    `older` is special_tokens_map.json. As in transformers it decides unless the config lists all added tokens.
    """
    found = config if "added_tokens_decoder" in config else config | older
    texts = {}
    for name in _SPECIAL_TOKENS:
        value = found.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            texts[name] = text
    return texts


def _moment(date: str) -> datetime:
    try:
        return datetime.fromisoformat(date) if date else datetime.now()
    except ValueError:
        raise ConfigError(f"--date {date}: is no date as 2026-01-31, or 2026-01-31T12:00") from None


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template {path}: cannot be read: {reason_of(error)}; chatml is built in") from None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
    return found if isinstance(found, dict) else {}
