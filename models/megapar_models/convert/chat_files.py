"""What an export of a model of conversations holds for chats: the template, and what ends an answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar_tools.prepare.texts import end_of_turn, template_of

from megapar.data.prepared import CHAT
from megapar.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megapar.system.regular_files import read_regular
from megapar_models.convert.tokenizer_files import CONFIG, read_config

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


def write_chat_files(folder: Path, record: Mapping[str, Any], spec: str, tokenizer: Tokenizer | None) -> list[str]:
    """Write chat template and ending tokens of a training's conversations to an export; returns lines for the user.

    `record` is that of the training's texts (`megapar.data.prepared.record_of`); one without conversations changes
    nothing. `spec` names the tokenizer, which is None if its file was not found. A template that is in `folder` already
    is replaced if the training had another one.
    """
    if CHAT not in record:
        return []
    template = template_of(record, spec)
    if template is None:
        name = record[CHAT].get("template") or "a template"
        text = f"the model was trained on conversations in {name}, of which its checkpoint has no text"
        return [f"the export has no chat template: {text}; put {TEMPLATE} into its folder"]
    lines = _write_template(folder, template.source, template.place)
    ends = record[CHAT].get("end_tokens") or []
    text = end_of_turn(template)
    if not ends and text and isinstance(tokenizer, HuggingFaceTokenizer):
        ends = [number] if (number := tokenizer.id_of(text)) is not None else []
    if ends:
        known = [tokenizer.eod] if tokenizer is not None else []
        _change_generation(folder, lambda found: _with_ends(found, [*ends, *known]))
        lines.append(f"{GENERATION}: the ids {ends} end an answer, as in the conversations of the training")
    elif text:
        _change_generation(folder, lambda found: {**found, "stop_strings": [text]})
        why = f"{text} is no token of {spec}: {GENERATION} names it under stop_strings, which generate() obeys with "
        lines.append(f"{why}tokenizer=...")
    else:
        lines.append(f"no token ends an answer: the template {template.place} writes nothing behind one")
    return lines


def _write_template(folder: Path, source: str, origin: str) -> list[str]:
    """Write the template, unless the folder holds the same one."""
    config = read_config(folder)
    before = config.get("chat_template")
    if isinstance(before, list):  # several by name
        before = {item.get("name"): item.get("template") for item in before if isinstance(item, dict)}.get("default")
    if (folder / TEMPLATE).is_file():
        before = read_regular(folder / TEMPLATE).decode(errors="replace")
    if before == source:
        return []
    (folder / TEMPLATE).write_text(source)
    if "chat_template" in config:
        del config["chat_template"]
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    replaced = " It replaces another one, of the tokenizer's folder." if before else ""
    return [f"{TEMPLATE}: the chat template of the training, {origin}.{replaced}"]


def _with_ends(found: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    stated = found.get("eos_token_id")
    before = stated if isinstance(stated, list) else [] if stated is None else [stated]
    return {**found, "eos_token_id": list(dict.fromkeys([*before, *ends]))}


def _change_generation(folder: Path, change: Any) -> None:
    """Replace the settings of generation by what `change` makes of them."""
    path = folder / GENERATION
    found: dict[str, Any] = json.loads(read_regular(path)) if path.is_file() else {}
    path.write_text(json.dumps(change(found), indent=2) + "\n")
