"""Codecs of a config.json for what many families share: dropouts, options of one value, fields that never differ."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar_models.family import Codec, Raw

GELUS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
GELUS |= {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2", "silu": "silu"}
"""The activations of MLPs without a gate, by their names at Hugging Face."""
# What transformers writes into any object of a config.json.
_OF_OBJECTS = (
    *("id2label", "label2id", "return_dict", "transformers_version", "dtype", "torch_dtype"),
    *("tie_word_embeddings", "max_length", "num_beams", "num_beam_groups", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "num_return_sequences"),
)


@dataclass(frozen=True)
class Dropouts(Codec):
    """Dropouts of files whose family trains without any."""

    names: tuple[str, ...]
    written: bool = False
    """Whether the fields are written, as 0.0: transformers takes another value for absent ones."""

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        for name in self.names:
            if raw.get(name):
                yield f"config.json: {name}={raw[name]} is not read: family {family} trains without dropout"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if self.written:
            fields |= dict.fromkeys(self.names, 0.0)


@dataclass(frozen=True)
class Written(Codec):
    """Fields with the same values in every file."""

    fields: Mapping[str, Any]

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= self.fields


@dataclass(frozen=True)
class ZeroAsNull(Codec):
    """Fields whose value null means none, where 0 does here."""

    names: tuple[str, ...]

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {name: fields[name] or None for name in self.names}


@dataclass(frozen=True)
class FurtherTokens(Codec):
    """The number of layers of multi-token prediction. What a folder holds goes before it (`convert.other_parts`)."""

    field: str = "num_nextn_predict_layers"
    alias: str = ""
    """Another name of the field, which is read too."""
    absent: int = 0
    """transformers' number, if the field is absent."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = raw.get(self.field, raw.get(self.alias, self.absent))
        return {"num_nextn_predict_layers": stated or 0}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields[self.field] = model.num_nextn_predict_layers


@dataclass(frozen=True)
class Always(Codec):
    """Options with the same values in every model, which have no fields. Heads are together as wide as the model."""

    values: Mapping[str, Any] = field(default_factory=dict)
    key_per_head: bool = False
    """Whether there are as many key/value heads as heads."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {**self.values}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        heads = {"num_key_value_heads": model.num_attention_heads} if self.key_per_head else {}
        demand(model, fields["model_type"], **heads, **self.values)


def unknown_in(name: str, stated: Raw, known: Collection[str]) -> list[str]:
    """Return a line for each field of the object `name` of a config.json that is not `known`, unless it is off."""
    unknown = {field: value for field, value in stated.items() if value and field not in (*known, *_OF_OBJECTS)}
    return [f"{name}: {field}={value!r} is not known" for field, value in unknown.items()]


def demand(model: ModelConfig, model_type: str, **values: Any) -> None:
    """Raise ConfigError for options with other values than every model of this model_type has."""
    width = model.hidden_size // model.num_attention_heads
    for name, value in {**values, "head_dim": width}.items():
        if getattr(model, name) != value:
            raise ConfigError(f"model.{name}={getattr(model, name)}: {model_type} of Hugging Face has {value}")


@dataclass(frozen=True)
class EvenHeads(Codec):
    """Refuses to write a width that does not divide by the heads: transformers does, also if head_dim is given."""

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if model.hidden_size % model.num_attention_heads:
            raise ConfigError(
                f"model.hidden_size={model.hidden_size}, model.num_attention_heads={model.num_attention_heads}: "
                f"transformers refuses a {fields['model_type']} whose width does not divide by its heads"
            )
