"""How a text becomes tokens for the programs that ask a trained model, and how the texts of its training did.

The description beside prepared data (`megapar.data.prepared`) says how its texts became tokens. A checkpoint keeps that
record (`record_of`), because the data may be gone when somebody asks the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError
from megapar.data.prepared import CHAT, PARSE, START, TEXTS, record_of
from megapar.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megapar_tools.prepare.chat import BUILT_IN, ChatTemplate, load_template
from megapar_tools.prepare.chat_masks import rendered

StartToken = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of a program that asks a model: how a text becomes tokens."""

    special_tokens: Literal["auto", "text", "parse"] = "auto"
    """Special tokens in a text, such as <|im_start|>: text, or with parse (hf: and spm: only) their ids. auto: as in
    the training, so ids if its data are conversations."""
    start_token: StartToken = "auto"
    """The start token in front of each text: auto adds what the tokenizer's files put there, as transformers does."""


@dataclass(frozen=True)
class Texts:
    """A tokenizer with the ids `start` in front of each text.

    `prefix` is the context of a first token without any other, as lm-evaluation-harness chooses it. `notes` are lines
    for the user about what was chosen for them.
    """

    tokenizer: Tokenizer
    start: tuple[int, ...]
    prefix: int
    notes: tuple[str, ...] = ()

    def encode(self, text: str) -> NDArray[np.integer]:
        """The ids of `text` behind those of `start`, unless the text itself begins with these."""
        return with_start(self.tokenizer.encode(text), self.start)


def with_start(ids: NDArray[np.integer], start: tuple[int, ...]) -> NDArray[np.integer]:
    """`ids` behind `start`, unless they begin with it, as the text of a chat template may."""
    if not start or tuple(ids[: len(start)].tolist()) == start:
        return ids
    return np.concatenate([np.array(start, np.int64), ids])


def start_ids(spec: str, tokenizer: Tokenizer, choice: StartToken) -> tuple[int, ...]:
    """The ids in front of each text. Raises ConfigError for `always` if the tokenizer has no start token."""
    if choice == "never":
        return ()
    if choice == "auto" or tokenizer.start:
        return tokenizer.start
    if tokenizer.bos is None:
        raise ConfigError(
            f"--start_token always: {spec} names no start token; hf: tokenizers name it by their post-processor, or as "
            "bos_token in tokenizer_config.json"
        )
    return (tokenizer.bos,)


def saved_record(data: Mapping[str, Any], sources: Iterable[str]) -> dict[str, Any]:
    """The record in the data section of a checkpoint, or that of its data if an older version has saved it."""
    saved = data.get(TEXTS)
    if isinstance(saved, dict):
        return saved
    return record_of(sources)


def open_texts(spec: str, options: TextOptions, data: Mapping[str, Any], sources: tuple[str, ...]) -> Texts:
    """The tokenizer `spec` of a checkpoint as the options ask for it.

    `data` is the checkpoint's data section, and `sources` name the files of its training. Raises ConfigError for
    options that the tokenizer cannot follow.
    """
    record = saved_record(data, sources)
    notes = []
    parse = options.special_tokens == "parse"
    if options.special_tokens == "auto":
        # Published weights have no data. Those of a model that converses come with its template.
        parse = record.get(PARSE) == "parse" or (not sources and _beside(spec) is not None)
        if parse:
            notes.append("special tokens in a text are read as their ids, as in training (--special_tokens text: not)")
    tokenizer = load_tokenizer(spec, parse_special=parse)
    start = start_ids(spec, tokenizer, options.start_token)
    if options.start_token == "auto" and start:
        notes.append(f"each text begins with the ids {list(start)}, as {spec} says (--start_token never: without)")
    trained = record.get(START)
    if isinstance(trained, list) and trained != list(start):
        notes.append(f"each text begins with the ids {list(start)}; in training with {trained}: see --start_token")
    named = isinstance(tokenizer, HuggingFaceTokenizer) or bool(start)
    known = named and options.start_token != "never" and tokenizer.bos is not None
    prefix = tokenizer.bos if known and tokenizer.bos is not None else tokenizer.eod
    return Texts(tokenizer, start, prefix, tuple(notes))


def template_of(record: Mapping[str, Any], spec: str) -> ChatTemplate | None:
    """The chat template of a training's conversations by its record, or else the one beside the tokenizer `spec`.

    It is None if there is none. Descriptions of earlier versions name the template without its text.
    """
    chat = record.get(CHAT)
    if isinstance(chat, dict):
        variables = chat.get("special_tokens", {})
        if isinstance(chat.get("template_text"), str) and isinstance(variables, dict):
            tool_use = str(chat.get("template_text_for_tools", ""))
            return ChatTemplate(chat["template_text"], str(chat.get("template")), variables, tool_use)
        built_in = (ChatTemplate(source, name) for name, source in BUILT_IN.items())
        found = next((each for each in built_in if each.sha256 == chat.get("template_sha256")), None)
        return found or _beside(spec, str(chat.get("template_sha256")))
    return _beside(spec)


def _beside(spec: str, sha256: str = "") -> ChatTemplate | None:
    """The chat template beside the files of an hf: tokenizer, if there is one and its hash is `sha256` or unknown."""
    if not spec.startswith("hf:"):
        return None
    try:
        found = load_template("", spec)
    except (ConfigError, DataError):
        return None
    return found if sha256 in ("", found.sha256) else None


def end_of_turn(template: ChatTemplate) -> str:
    """The text with which the template ends an answer, without white space around it; "" if nothing does."""
    answer = "An answer."
    shown = rendered(template, [{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}])
    start, stop = shown.trained[-1] if shown.trained else (0, 0)
    return shown.text[start:stop].partition(answer)[2].strip()
