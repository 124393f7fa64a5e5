"""Hugging Face's config.json as options of ours and back, by what a family says of its names (`Family.hugging_face`).

A field that would change what is computed, and that our models do not have, is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megapar.config import ModelConfig
from megapar.errors import ConfigError
from megapar_models.family import HuggingFace, typed, wrong_types
from megapar_models.registry import FAMILIES, find

# Tables that old versions stored among the weights: causal masks and rotary wavelengths.
_DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def names_of(model: ModelConfig) -> HuggingFace:
    """Hugging Face's names of the model's family. Raises ConfigError if it says none."""
    names = find(model.family).hugging_face
    if names is None:
        raise ConfigError(f"model.family={model.family}: has no names at Hugging Face (Family.hugging_face)")
    return names


def canonical_name(name: str, names: HuggingFace) -> str | None:
    """The name that the tables use of a stored tensor; None for one that holds no weights.

    GPT-2's own files lack the prefix that models with a head give its names.
    """
    if _DERIVED.search(name):
        return None
    prefix = names.base_prefix
    return name if name.startswith((prefix, "lm_head.")) else f"{prefix}{name}"


def from_hugging_face(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ConfigError naming every field that we cannot be."""
    kind = raw.get("model_type")
    family, names = _of_type(kind)
    model_type = names.model_types[str(kind)]
    problems = list(_unsupported(raw, model_type.fixed))
    values: dict[str, Any] = {}
    for theirs, ours in names.fields.items():
        value = raw.get(theirs, model_type.defaults.get(theirs))
        if value is None and theirs not in model_type.defaults:
            problems.append(f"{theirs} is missing")
        elif ours == "hidden_act" and value not in names.activations:
            problems.append(f"{theirs}={value!r} is not supported; {', '.join(names.activations)} are")
        elif value is not None:
            values[ours] = names.activations[value] if ours == "hidden_act" else value
    more, wrong = names.read(raw, str(kind))
    values |= more
    problems += [*wrong, *wrong_types(values, ModelConfig)]
    if not problems:
        problems += names.judge(raw, str(kind))
    if problems:
        raise ConfigError("\n".join(f"config.json: {problem}" for problem in problems))
    return ModelConfig(family=family, **typed(values, ModelConfig))


def told(raw: Mapping[str, Any]) -> list[str]:
    """What of a supported config.json has no option of ours and does not matter to what the model computes."""
    return _of_type(raw.get("model_type"))[1].told(raw)


def _of_type(kind: object) -> tuple[str, HuggingFace]:
    """The family that has this `model_type`, and its names. Raises ConfigError if there is none."""
    known: list[str] = []
    for family, description in FAMILIES.items():
        names = description.hugging_face
        if names is not None and kind in names.model_types:
            return family, names
        known += names.model_types if names is not None else ()
    raise ConfigError(f"config.json: model_type={kind!r} is not supported; {', '.join(known)} are")


def _unsupported(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[str]:
    for field, value in {**fixed, "quantization_config": None}.items():
        if raw.get(field, value) != value:
            yield f"{field}={raw[field]!r} is not supported; {value!r} is"


def to_hugging_face(model: ModelConfig) -> dict[str, Any]:
    """config.json of a validated model, as transformers 4 and 5 read it. Raises ConfigError if no model_type is it."""
    names = names_of(model)
    return names.write(model, {theirs: getattr(model, ours) for theirs, ours in names.fields.items()})
