"""Describes a model family: its modules, its options, and its names in other frameworks."""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, get_type_hints

from torch import Tensor

from megapar.config.model_rules import ModelRules
from megapar.config.options import Config
from megapar_models.factory import Factory
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing, Pairs, PairsOf

Raw = Mapping[str, Any]  # the content of a config.json


def overlaid(raw: Raw, fields: Raw) -> Raw:
    """The config.json with other values of these fields. `raw` still notes which of its other fields are read."""
    return ChainMap(fields, raw)  # type: ignore[arg-type]


class Codec:
    """One subject of a config.json, such as rotary positions or experts: how its fields are read, written and refused.

    Codecs are frozen dataclasses. A subclass overrides what its subject needs.
    """

    reads_first: ClassVar[bool] = False
    """Whether problems of this subject stand before those of other codecs, whatever is written first."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        """Return values of our options beyond those in `HuggingFace.fields`, and problems."""
        return {}, []

    def judge(self, raw: Raw, model_type: str) -> Iterable[str]:
        """Yield further problems of a config.json whose fields are all present and understood."""
        return ()

    def warnings(self, raw: Raw, family: str) -> Iterable[str]:
        """Yield a line for each field without an option here and without effect on what the model computes."""
        return ()

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        """Complete the `fields` of a validated model's config.json; `model_type` is among them.

        Raises ConfigError if the model_type cannot describe the model.
        """

    def problems(self, config: Config, model: Any) -> Iterable[str]:
        """Yield a line for each problem of the options that this subject has here."""
        return ()


def _no_fields(_: Any) -> Raw:
    return {}


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of Hugging Face's config.json."""

    architecture: str
    """Its class in transformers, such as LlamaForCausalLM."""
    defaults: Raw = field(default_factory=dict)
    """transformers' defaults for absent fields, beside those of the family."""
    fixed: Raw = field(default_factory=dict)
    """Fields with a required value, if they are present. With another value the model computes something else."""
    codecs: tuple[Codec, ...] = ()
    """The codecs of this model_type, written behind those of the family."""
    scores_sequences: bool = False
    """Whether transformers has a class ForSequenceClassification, which is converted.

    Its head is `score`, [labels, h], without a bias and on the last token. With one label it is that of
    model.head=score.
    """
    judged_with: Callable[[Any], Raw] = _no_fields
    """Fields that transformers' config is given other values of before a conversion is compared with it.

    They are those by which it computes something else than the model's reference.
    """


def _no_pairs(_: Any) -> dict[str, Pairs]:
    return {}


def _no_modules(_: Any) -> dict[str, str]:
    return {}


def _nothing_ignored(_: Raw) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A family's names at Hugging Face, and the config.json files it can represent. Most families begin with `like`."""

    model_types: Mapping[str, ModelType]
    type_of: Callable[[Any], str] | None = None
    """The model_type to write for a model; None: the first. Raises ConfigError if none describes the model."""
    codecs: tuple[Codec, ...] = ()
    """What is read and written beyond `fields`, in the order of writing."""
    fields: Mapping[str, str]
    """From their fields of config.json to our options."""
    defaults: Raw = field(default_factory=dict)
    """transformers' defaults for absent fields. A size without a default must be in the file."""
    activations: Mapping[str, str]
    """From their names of activations to ours."""
    without_effect: Collection[str] = ()
    """Fields of a config.json without effect on what the model computes, beside WITHOUT_EFFECT."""
    modules: dict[str, str]
    """From our modules to theirs. The first * is the layer's number, the second one the expert's.

    One of theirs may hold several of ours, or those of all experts: then it has no second *. One of ours may also be
    several of theirs, such as a norm's weight for each head: a further * of theirs is the number of the group, and
    `layouts` says the groups. A key may also be one of our tensors, and its value the whole name of theirs.
    """
    modules_of: Callable[[Any], Mapping[str, str]] = _no_modules
    """Modules with other names in files of some models, by their options. A key with a layer's number goes before *."""
    tied: Mapping[str, str]
    """Redundant tensors in files of tied models, each with its original. The two must be equal."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Their tensors [experts, rows, columns] of all experts, each with the modules of an expert inside it.

    The rows of an expert are divided evenly among these modules, in order. Such a tensor is read as if the file held
    NAME.EXPERT.MODULE.weight for each expert and module. NAME is the tensor's name without its last component.
    """
    in_fp32: Collection[str] = ()
    """Tensors of ours that have fp32 in files of any dtype, beside the biases that select experts."""
    maybe_fp32: Collection[str] = ()
    """Tensors of ours that have fp32 in some files of another dtype. An export has them as the import found them."""
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
    mtp_names: Callable[[Any], Mapping[str, str]] = _no_modules
    """Beginnings of names by `modules` of tensors of multi-token prediction, each with that in files, by the model's
    options. The first that fits a name counts."""
    mtp_copies: Callable[[Any], Mapping[str, str]] = _no_modules
    """Copies of other tensors that files hold for layers of multi-token prediction, each with its original. A file may
    lack them, and must not hold others. An export writes them."""
    base_prefix: str = ""
    """The prefix missing from tensor names if a model was saved without its head."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        """Return the values of our options beyond those in `fields`, and problems."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for codec in self._to_read(model_type):
            more, wrong = codec.read(raw, model_type)
            values |= more
            problems += wrong
        return values, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield further problems of a config.json whose fields are all present and understood."""
        for codec in self._to_read(model_type):
            yield from codec.judge(raw, model_type)

    def warnings(self, raw: Raw, family: str = "") -> list[str]:
        """Return a line for each field that is left out without effect on what the model computes."""
        codecs = self._to_read(raw["model_type"])
        return list(chain.from_iterable(codec.warnings(raw, family) for codec in codecs))

    def write(self, model: Any) -> dict[str, Any]:
        """Return the config.json of a validated model. Raises ConfigError if no model_type describes it."""
        model_type = self.type_of(model) if self.type_of else next(iter(self.model_types))
        described = self.model_types[model_type]
        fields: dict[str, Any] = {"model_type": model_type, "architectures": [described.architecture]}
        fields |= {theirs: getattr(model, ours) for theirs, ours in self.fields.items()}
        for codec in (*self.codecs, *described.codecs):
            codec.write(model, fields)
        return fields

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        """Yield a line for each problem of the options that codecs read and write."""
        codecs = (*self.codecs, *chain.from_iterable(described.codecs for described in self.model_types.values()))
        yield from chain.from_iterable(codec.problems(config, model) for codec in _in_order(codecs))

    @property
    def sequence_classes(self) -> dict[str, str]:
        """The class with a head for whole sequences of each model_type that has one."""
        return {
            name: described.architecture.replace("ForCausalLM", "ForSequenceClassification")
            for name, described in self.model_types.items()
            if described.scores_sequences
        }

    def _to_read(self, model_type: str) -> list[Codec]:
        return _in_order((*self.codecs, *self.model_types[model_type].codecs))


def _in_order(codecs: Iterable[Codec]) -> list[Codec]:
    """Return the codecs in the order of reading."""
    return sorted(codecs, key=lambda codec: not codec.reads_first)


def same(*names: str) -> dict[str, str]:
    """Return `HuggingFace.fields` or `activations` with the same names here and there."""
    return {name: name for name in names}


def like(
    family: "Family",
    *,
    model_types: Mapping[str, ModelType],
    modules: Mapping[str, str | None] = MappingProxyType({}),
    fields: Mapping[str, str | None] = MappingProxyType({}),
    defaults: Raw = MappingProxyType({}),
    **others: Any,
) -> HuggingFace:
    """Return names at Hugging Face like those of another family, where nothing else is given.

    `modules`, `fields` and `defaults` are changed name by name, and None takes a name away. A field takes the place of
    the other field of the same option. What other arguments give replaces what `family` has.
    Model types, codecs, and fields without effect are those given alone.
    """
    base = family.hugging_face
    assert base is not None
    kept = {theirs: ours for theirs, ours in base.fields.items() if theirs not in fields}
    given = {ours: theirs for theirs, ours in fields.items() if ours is not None}
    kept = {given.pop(ours, theirs): ours for theirs, ours in kept.items()}
    merged = {ours: theirs for ours, theirs in {**base.modules, **modules}.items() if theirs is not None}
    own: dict[str, Any] = {"type_of": None, "codecs": (), "without_effect": (), **others}
    return replace(
        base,
        model_types=model_types,
        modules=merged,
        fields=kept | {theirs: ours for ours, theirs in given.items()},
        defaults={**base.defaults, **defaults},
        **own,
    )


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
