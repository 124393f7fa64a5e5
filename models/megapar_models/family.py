"""What a model family is: its modules, the options that it reads, and its names in other frameworks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from megapar.config import ModelConfig
from megapar.model_rules import ModelRules
from megapar_models.stage import Stage

Raw = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of Hugging Face's config.json."""

    defaults: Raw
    """What an absent field means to transformers. Sizes that are not here must be there."""
    fixed: Raw
    """Fields that must have this value where they stand: with another, other things are computed."""


def _no_lines(*_: Any) -> list[str]:
    return []


def _nothing_further(_: Raw, __: str) -> tuple[dict[str, Any], list[str]]:
    return {}, []


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A family's names at Hugging Face, and which config.json files it can represent."""

    model_types: Mapping[str, ModelType]
    modules: dict[str, str]
    """Our modules to theirs; * is the layer's number. Several of ours may have one of theirs, which stacks them."""
    fields: Mapping[str, str]
    """Their fields of config.json to our options."""
    activations: Mapping[str, str]
    """Their names of activations to ours."""
    tied: Mapping[str, str]
    """Tensors that a file of a tied model may hold besides, each with the one that it equals."""
    transposed: Collection[str] = ()
    """Their modules whose weights are [in, out]."""
    base_prefix: str = ""
    """What the names of a model without its head lack."""
    write: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]]
    """config.json of a validated model and the `fields` of it. Raises ConfigError if no model_type is it."""
    read: Callable[[Raw, str], tuple[dict[str, Any], list[str]]] = _nothing_further
    """Of a config.json and its model_type: values of further options of ours, and problems."""
    judge: Callable[[Raw, str], Iterable[str]] = _no_lines
    """Further problems of a config.json whose fields are all there and understood."""
    told: Callable[[Raw], list[str]] = _no_lines
    """What of a config.json has no option of ours and does not matter to what the model computes."""


@dataclass(frozen=True)
class Megatron:
    """The args of Megatron-LM that make its GPT model this family."""

    swiglu: bool
    normalization: str
    position_embedding_type: str
    add_bias_linear: bool


@dataclass(frozen=True, kw_only=True)
class Family(ModelRules):
    """All that the project knows of a model family. One outside this tree needs no more than `stage`, and names in
    other frameworks only to be converted."""

    stage: type[Stage]
    hugging_face: HuggingFace | None = None
    megatron: Megatron | None = None


def wrong_types(values: Mapping[str, Any], section: type) -> Iterator[str]:
    """A problem for each of `values` that is not what `section`, a dataclass of options, has under its name."""
    for name, kind in get_type_hints(section).items():
        value = values.get(name)
        allowed = (int, float) if kind is float else kind if kind in (int, bool) else object
        if name in values and (not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool)):
            yield f"{name}={value!r} should be {kind.__name__}"


def typed(values: Mapping[str, Any], section: type) -> dict[str, Any]:
    """JSON's whole numbers as floats where options are floats."""
    types = get_type_hints(section)
    return {name: float(value) if types[name] is float else value for name, value in values.items()}
