"""Describes a model family: its modules, its options, and its names in other frameworks."""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.model_rules import ModelRules
from megapar_models.factory import Factory
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing, Pairs, PairsOf

Raw = Mapping[str, Any]  # the content of a config.json


def overlaid(raw: Raw, fields: Raw) -> Raw:
    """The config.json with other values of these fields. `raw` still notes which of its other fields are read."""
    return ChainMap(fields, raw)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of Hugging Face's config.json."""

    defaults: Raw
    """transformers' defaults for absent fields. A size without a default here must be in the file."""
    fixed: Raw
    """Fields with a required value, if they are present. With another value the model computes something else."""


def _no_lines(*_: Any) -> list[str]:
    return []


def _no_pairs(_: Any) -> dict[str, Pairs]:
    return {}


def _no_modules(_: Any) -> dict[str, str]:
    return {}


def _nothing_ignored(_: Raw) -> tuple[str, ...]:
    return ()


def _nothing_further(_: Raw, __: str) -> tuple[dict[str, Any], list[str]]:
    return {}, []


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A family's names at Hugging Face, and the config.json files it can represent."""

    model_types: Mapping[str, ModelType]
    modules: dict[str, str]
    """From our modules to theirs. The first * is the layer's number, the second one the expert's.

    One of theirs may hold several of ours, or those of all experts: then it has no second *. One of ours may also be
    several of theirs, such as a norm's weight for each head: a further * of theirs is the number of the group, and
    `layouts` says the groups. A key may also be one of our tensors, and its value the whole name of theirs.
    """
    modules_of: Callable[[Any], Mapping[str, str]] = _no_modules
    """Modules that have other names in the files of some models: those of `modules` for the options of a model."""
    fields: Mapping[str, str]
    """From their fields of config.json to our options."""
    activations: Mapping[str, str]
    """From their names of activations to ours."""
    tied: Mapping[str, str]
    """Redundant tensors in files of tied models, each with its original. The two must be equal."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Their tensors [experts, rows, columns] of all experts, each with the modules of an expert inside it.

    The rows of an expert are divided evenly among these modules, in order. Such a tensor is read as if the file held
    NAME.EXPERT.MODULE.weight for each expert and module. NAME is the tensor's name without its last component.
    """
    in_fp32: Collection[str] = ()
    """Tensors of ours that have fp32 in files of any dtype, beside the biases that select experts."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Their tensors of a single number that is not trained, each with the number. * is the layer's number."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of stored names, each with its counterpart in `modules`."""
    layouts: Mapping[str, Packing] = field(default_factory=dict)
    """How their modules or tensors hold several of ours, or are transposed."""
    pairs: PairsOf = _no_pairs
    """The rotary pairs of our modules that theirs store beside each other."""
    ignored: Callable[[Raw], Collection[str]] = _nothing_ignored
    """Beginnings of the names of tensors left out, such as `mtp.`: those of other parts than the language model."""
    without_effect: Collection[str] = ()
    """Fields of a config.json without effect on what the model computes, beside WITHOUT_EFFECT."""
    sequence_classes: Mapping[str, str] = field(default_factory=dict)
    """The class with a head for whole sequences of some `model_types`, such as LlamaForSequenceClassification.

    The head is `score`, [labels, h], without a bias and on the last token. With one label it is that of
    model.head=score.
    """
    base_prefix: str = ""
    """The prefix missing from tensor names if a model was saved without its head."""
    write: Callable[[Any, dict[str, Any]], dict[str, Any]]
    """Make the config.json of a validated model from its `fields`. Raises ConfigError if no model_type fits."""
    read: Callable[[Raw, str], tuple[dict[str, Any], list[str]]] = _nothing_further
    """From a config.json and its model_type: values of our options beyond those in `fields`, and problems."""
    judge: Callable[[Raw, str], Iterable[str]] = _no_lines
    """Further problems of a config.json. It is called only if all fields are present and understood."""
    warnings: Callable[[Raw], list[str]] = _no_lines
    """Warnings about fields of a config.json without an option here and without effect on what the model computes."""


@dataclass(frozen=True)
class Megatron:
    """The arguments that make Megatron-LM's GPT model this family."""

    swiglu: bool
    normalization: str
    position_embedding_type: str
    add_bias_linear: bool


@dataclass(frozen=True, kw_only=True)
class Family(ModelRules):
    """All the project knows of a model family.

    A family outside this repository needs only `stage`. It needs names in other frameworks only for conversions.
    """

    stage: type[Stage[Any]]
    factory: Callable[..., Factory] = Factory
    """Makes the `Factory` of a rank. functools.partial(Factory, beside=...) adds adapters by the names of matrices."""
    reference: Callable[[Any, Mapping[str, Tensor], Tensor], Tensor] | None = None
    """Logits [b, s, v] of a model with these logical tensors for tokens [b, s], in plain PyTorch: tests use it."""
    hugging_face: HuggingFace | None = None
    megatron: Megatron | None = None


def dropout_warnings(raw: Raw, family: str, *names: str) -> list[str]:
    """A line for each of these dropouts that a config.json has, in a family that trains without."""
    text = f"is not read: family {family} trains without dropout"
    return [f"config.json: {name}={raw[name]} {text}" for name in names if raw.get(name)]


def refuse_uneven_heads(model: ModelConfig, model_type: str) -> None:
    """Raise ConfigError for a width that does not divide by the heads, as transformers does for this model_type."""
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size}, model.num_attention_heads={model.num_attention_heads}: "
            f"transformers refuses a {model_type} whose width does not divide by its heads"
        )


def wrong_types(values: Mapping[str, Any], section: type) -> Iterator[str]:
    """Yield a problem for each of `values` of another type than its field in the dataclass `section`."""
    for name, expected in get_type_hints(section).items():
        if name not in values:
            continue
        value = values[name]
        allowed: Any = object
        if expected is float:
            allowed = (int, float)  # JSON may spell a float as a whole number
        elif expected in (int, bool):
            allowed = expected
        # In Python a bool is an int as well, so it must be told apart.
        if not isinstance(value, allowed) or isinstance(value, bool) != (expected is bool):
            yield f"{name}={value!r} should be {expected.__name__}"


def typed(values: Mapping[str, Any], section: type) -> dict[str, Any]:
    """`values` with JSON's whole numbers as floats, if the option of `section` is a float."""
    types = get_type_hints(section)
    return {name: float(value) if types[name] is float else value for name, value in values.items()}
