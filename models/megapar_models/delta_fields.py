"""Layers of linear attention beside those of full attention: their options, and their fields in a config.json.

All families of gated delta nets share this module: Qwen3-Next, Qwen3.5 and OLMo Hybrid.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.delta_net import GatedDelta
from megapar_models.family import Codec, Raw, same
from megapar_models.norms import NormRule
from megapar_models.rotary import RotaryModel
from megapar_models.windows import FULL

LINEAR = "linear_attention"


@dataclass(frozen=True)
class DeltaModel(RotaryModel):
    """The options of a family with gated delta nets."""

    layer_types: tuple[str, ...] = ()
    """linear_attention or full_attention for each layer; without any, each fourth layer has full attention."""
    linear_num_key_heads: int = 16
    """Heads of queries and keys of linear attention, each shared by a group of value heads."""
    linear_num_value_heads: int = 32
    """Heads of values of linear attention, each with a state; a multiple of parallel.tp."""
    linear_key_head_dim: int = 128
    """Width of a query and a key of linear attention."""
    linear_value_head_dim: int = 128
    """Width of a value of linear attention."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the short convolution of queries, keys and values reads, the token itself among them."""


_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
SIZE_FIELDS = same(*_SIZES)
SIZE_DEFAULTS: Mapping[str, int] = {name: getattr(DeltaModel, name) for name in _SIZES}


class LayersByType(Protocol):
    """The options of a model with layers of two types."""

    @property
    def layer_types(self) -> tuple[str, ...]: ...
    @property
    def num_hidden_layers(self) -> int: ...


def types_of(model: LayersByType) -> tuple[str, ...]:
    """Return the type of each layer."""
    return model.layer_types or full_each(4, model.num_hidden_layers)


def full_each(interval: int, layers: int) -> tuple[str, ...]:
    """Return a type for each layer: those numbered by a multiple of `interval`, from 1, have full attention."""
    return tuple(LINEAR if number % interval else FULL for number in range(1, layers + 1))


def is_linear(model: LayersByType, number: int) -> bool:
    """Whether the layer has linear attention."""
    # A list of the wrong length is reported by `DeltaLayers.problems`.
    return types_of(model)[number : number + 1] == (LINEAR,)


def delta_rule(model: DeltaModel, norm: NormRule, *, negative_eigenvalues: bool = False) -> GatedDelta:
    """Return the rule of the model's layers of linear attention, with the norm of their outputs."""
    return GatedDelta(
        key_heads=model.linear_num_key_heads,
        value_heads=model.linear_num_value_heads,
        key_width=model.linear_key_head_dim,
        value_width=model.linear_value_head_dim,
        conv_width=model.linear_conv_kernel_dim,
        norm=norm,
        negative_eigenvalues=negative_eigenvalues,
    )


# Hugging Face

_LAYER = "model.layers.*"
_OWN = ("q", "k", "v", "gate", "o")
"""Modules of ours that layers of full attention have too, with other names in files."""


def linear_names(theirs: Mapping[str, str]) -> dict[str, str]:
    """Return `HuggingFace.modules` of layers of linear attention without those of `linear_names_of`.

    `theirs` has the name of each of our modules in `linear_attn`.
    """
    whole = {name: f"{_LAYER}.linear_attn.{name}" for name in ("A_log", "dt_bias")}
    named = whole | {ours: f"{_LAYER}.linear_attn.{name}" for ours, name in theirs.items() if ours not in _OWN}
    return {f"layers.*.attention.{ours}": name for ours, name in named.items()}


def linear_names_of(model: DeltaModel, theirs: Mapping[str, str]) -> dict[str, str]:
    """Return `HuggingFace.modules_of`: modules that have other names in layers of full attention."""
    numbers = [number for number, kind in enumerate(types_of(model)) if kind == LINEAR]
    return {
        f"layers.{number}.attention.{ours}": f"{_LAYER}.linear_attn.{theirs[ours]}"
        for number in numbers
        for ours in _OWN
    }


IN_FP32 = ("A_log", "dt_bias", "norm.weight")
"""Tensors of linear attention that some files have in fp32, whatever the dtype of the others is."""
MAYBE_IN_FP32: Collection[str] = tuple(f"layers.*.attention.{name}" for name in IN_FP32)


@dataclass(frozen=True)
class DeltaLayers(Codec):
    """Which layers have linear attention: a list of types, or in files without one a rule of transformers."""

    both: bool = False
    """Whether a model has layers of both types."""
    interval: str = field(default="full_attention_interval")
    """The field with the number of layers of which the last has full attention; "": there is none."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        layers = raw["num_hidden_layers"]
        every = raw.get(self.interval, 4) if self.interval else 4
        usual = full_each(every, layers)
        if self.both and FULL not in usual:
            usual = (*usual[:-1], FULL)
        stated = raw.get("layer_types")
        types = usual if stated is None else tuple(stated)
        if not {*types} <= {LINEAR, FULL} or len(types) != layers:
            text = f"is not supported; a list of {LINEAR} and {FULL} for each of the {layers} layers is"
            return {}, [f"layer_types={list(types)!r} {text}"]
        if self.both and len({*types}) < 2:
            return {}, [f"layer_types={list(types)!r} is not supported; layers of both types are"]
        return {"layer_types": () if types == full_each(4, layers) else types}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        fields |= {"layer_types": list(types_of(model))}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        types, layers = types_of(model), model.num_hidden_layers
        if unknown := sorted({*types} - {LINEAR, FULL}):
            yield problem(config, "model.layer_types", f"{', '.join(unknown)} unknown; use {LINEAR} and {FULL}")
        if len(types) != layers:
            text = f"has {len(types)} layers; give a type for each of the {layers}, or none"
            yield problem(config, "model.layer_types model.num_hidden_layers", text)
        for name in _SIZES:
            if getattr(model, name) < 1:
                yield problem(config, f"model.{name}", "must be at least 1")
