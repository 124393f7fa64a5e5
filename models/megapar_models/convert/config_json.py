"""Conversion of Hugging Face's config.json to our model options and back.

Each family declares the names of its options at Hugging Face (`Family.hugging_face`). A field is
refused by name if it would change the result and our models do not have it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megapar.config.options import ModelConfig
from megapar.errors import ConfigError
from megapar_models.family import HuggingFace, typed, wrong_types
from megapar_models.registry import FAMILIES, find

# Tensors that old versions of transformers stored among the weights: causal masks and rotary wavelengths.
_DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def names_of(model: ModelConfig) -> HuggingFace:
    """Hugging Face's names of the model's family. Raises ConfigError if the family declares none."""
    names = find(model.family).hugging_face
    if names is None:
        raise ConfigError(f"model.family={model.family}: has no names at Hugging Face (Family.hugging_face)")
    return names


def canonical_name(name: str, names: HuggingFace) -> str | None:
    """The tables' name of a stored tensor, or None if the tensor holds no weights."""
    if _DERIVED.search(name):
        return None
    for theirs, ours in names.renamed.items():
        name = name.replace(theirs, ours)
    # GPT-2's own files lack the prefix that models with a head give to the names of the model below it.
    prefix = names.base_prefix
    if name.startswith((prefix, "lm_head.")):
        return name
    return f"{prefix}{name}"


def from_hugging_face(raw: Mapping[str, Any]) -> ModelConfig:
    """The model of a config.json. Raises ConfigError with every unsupported field."""
    type_name = raw.get("model_type")
    family, names = _of_type(type_name)
    model_type = names.model_types[str(type_name)]
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
    more, wrong = names.read(raw, str(type_name))
    values |= more
    problems += [*wrong, *wrong_types(values, FAMILIES[family].options)]
    if not problems:  # `judge` may rely on fields that are there and have the right types
        problems += names.judge(raw, str(type_name))
    if problems:
        raise ConfigError("\n".join(f"config.json: {problem}" for problem in problems))
    options = FAMILIES[family].options
    return options(family=family, **typed(values, options))


def warnings_of(raw: Mapping[str, Any]) -> list[str]:
    """Lines about fields of a supported config.json without an option of ours and without effect on the result."""
    return _of_type(raw.get("model_type"))[1].warnings(raw)


def _of_type(type_name: object) -> tuple[str, HuggingFace]:
    """The family of this `model_type`, and its names. Raises ConfigError if there is none."""
    known: list[str] = []
    for family, description in FAMILIES.items():
        names = description.hugging_face
        if names is None:
            continue
        if type_name in names.model_types:
            return family, names
        known += names.model_types
    raise ConfigError(f"config.json: model_type={type_name!r} is not supported; {', '.join(known)} are")


def _unsupported(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field with a value our models do not compute. A missing field is right."""
    for field, value in {**fixed, "quantization_config": None}.items():
        if raw.get(field, value) != value:
            yield f"{field}={raw[field]!r} is not supported; {value!r} is"


def to_hugging_face(model: ModelConfig) -> dict[str, Any]:
    """Return config.json of a validated model, as transformers 4 and 5 read it.

    Raises ConfigError if no model_type can describe the model.
    """
    names = names_of(model)
    return names.write(model, {theirs: getattr(model, ours) for theirs, ours in names.fields.items()})
