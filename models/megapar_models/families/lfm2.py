"""LFM2 (arXiv 2511.23404): Llama's layers, most of them with a gated short convolution in place of attention.

The other layers have grouped-query attention with norms of queries and keys. The weights are those of Llama
(megapar_models.families.llama), and those of a convolution (megapar_models.gated_convolution).

At Hugging Face: lfm2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megapar.config.messages import problem
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.gated_convolution import GatedConvolution
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.windows import FULL

CONV = "conv"


@dataclass(frozen=True)
class ConvolutionModel(ModelConfig):
    """The options of a family whose layers may have convolutions."""

    layer_types: tuple[str, ...] = ()
    """conv or full_attention for each layer; without any, all layers have attention."""
    conv_width: int = 3
    """Positions that a convolution reads, its own among them."""
    conv_bias: bool = False
    """Biases of convolutions and of the two projections around them."""


@dataclass(frozen=True)
class Lfm2Model(ConvolutionModel, RotaryModel):
    """The options of LFM2."""


def with_convolution(kind: LayerKind, model: ConvolutionModel, number: int) -> LayerKind:
    """Return the kind of layer `number`: `kind`, or one with a convolution if model.layer_types says so."""
    # A list of the wrong length is reported by `Layers`.
    if model.layer_types[number : number + 1] != (CONV,):
        return kind
    rule = GatedConvolution(model.conv_width, model.conv_bias)
    plain = LayerKind(norm=kind.norm, norms=kind.norms, mlp=kind.mlp, mixture=kind.mixture, router=kind.router)
    return replace(plain, mixer=rule)


class Lfm2Stage(Stage[Lfm2Model]):
    """Consecutive layers of LFM2."""

    @classmethod
    def layer_kind(cls, model: Lfm2Model, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), qk_norm=True)
        return with_convolution(kind, model, number)


@dataclass(frozen=True)
class Layers(Codec):
    """The mixer of each layer, and the width of convolutions."""

    allowed: Sequence[str] = (CONV, FULL)
    width: int = 3
    """transformers' width for an absent conv_L_cache."""

    def types(self, raw: Raw) -> Any:
        """Return what transformers takes for the types of the layers."""
        return raw.get("layer_types")

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        width, types, layers = raw.get("conv_L_cache", self.width), self.types(raw), raw["num_hidden_layers"]
        values = {"conv_width": width, "conv_bias": raw.get("conv_bias", False)}
        if width is None:
            return {}, ["conv_L_cache is missing"]
        if types is None or not {*types} <= {*self.allowed} or len(types) != layers:
            words = " or ".join(self.allowed)
            return {}, [f"layer_types={types!r} is not supported; {words} for each of {layers} layers is"]
        return {**values, "layer_types": tuple(types)}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        types = list(model.layer_types or [FULL] * model.num_hidden_layers)
        fields |= {"layer_types": types, "conv_L_cache": model.conv_width, "conv_bias": model.conv_bias}
        # transformers takes a token of its vocabulary for an absent padding token, and refuses one beyond this one.
        fields |= {"pad_token_id": None}

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        types = model.layer_types
        if unknown := sorted({*types} - {*self.allowed}):
            text = f"{', '.join(unknown)} unknown; use {', '.join(self.allowed)}"
            yield problem(config, "model.layer_types", text)
        if types and len(types) != model.num_hidden_layers:
            text = f"has {len(types)} layers; give a type for each of the {model.num_hidden_layers}"
            yield problem(config, "model.layer_types model.num_hidden_layers", text)


class TiedByAlias(Codec):
    """The name that the published files have for tie_word_embeddings, which transformers prefers."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        tied = raw.get("tie_embedding")
        return ({} if tied is None else {"tie_word_embeddings": tied}), []


class _Layers(Layers):
    def types(self, raw: Raw) -> Any:
        layers, attending = range(raw["num_hidden_layers"]), raw.get("full_attn_idxs")
        by_number = [FULL if attending is None or number in attending else CONV for number in layers]
        return by_number if raw.get("layer_types") is None else raw["layer_types"]


class _Widths(Codec):
    """The width of the MLP, which three fields adjust, and the widths of the published files that have one value."""

    always: ClassVar = {"block_dim": "hidden_size", "conv_dim": "hidden_size", "conv_dim_out": "hidden_size"}

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        width = raw.get("block_ff_dim", raw.get("intermediate_size"))
        multiple, factor = raw.get("block_multiple_of", 256), raw.get("block_ffn_dim_multiplier", 1.0)
        if width is None or multiple is None:
            return {}, [f"{'block_multiple_of' if width is not None else 'intermediate_size'} is missing"]
        if raw.get("block_auto_adjust_ff_dim", True):
            # In floating point, as transformers does.
            width = int(2 * width / 3)
            if factor is not None:
                width = -(-int(factor * width) // multiple) * multiple
        return {"intermediate_size": width}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        for name, size in {**self.always, "num_heads": "num_attention_heads"}.items():
            if raw.get(name, raw[size]) != raw[size]:
                yield f"{name}={raw[name]!r} is not supported unless it is {size}, {raw[size]}"

    def write(self, model: ModelConfig, fields: dict[str, Any]) -> None:
        fields |= {"intermediate_size": model.intermediate_size, "block_auto_adjust_ff_dim": False}


_LAYER = "model.layers.*"
MODULES = {
    "layers.*.attention_norm": f"{_LAYER}.operator_norm",
    "layers.*.mlp_norm": f"{_LAYER}.ffn_norm",
    **dict.fromkeys((f"layers.*.attention.{part}" for part in "bcx"), f"{_LAYER}.conv.in_proj"),
    "layers.*.attention.conv": f"{_LAYER}.conv.conv",
    "layers.*.attention.out": f"{_LAYER}.conv.out_proj",
    "layers.*.mlp.gate": f"{_LAYER}.feed_forward.w1",
    "layers.*.mlp.up": f"{_LAYER}.feed_forward.w3",
    "layers.*.mlp.down": f"{_LAYER}.feed_forward.w2",
    "norm": "model.embedding_norm",
}
OF_LFM2 = {
    "layers.*.attention.o": f"{_LAYER}.self_attn.out_proj",
    **{f"layers.*.attention.{name}_norm": f"{_LAYER}.self_attn.{name}_layernorm" for name in "qk"},
}
_FIXED = {"block_use_swiglu": True, "use_pos_enc": True}

LFM2 = Family(
    name="lfm2",
    stage=Lfm2Stage,
    activations=("silu",),
    options=Lfm2Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"lfm2": ModelType("Lfm2ForCausalLM", fixed=_FIXED)},
        codecs=(_Layers(), Rope(1e6), TiedByAlias(), _Widths()),
        modules={**MODULES, **OF_LFM2},
        fields={"hidden_act": None, "intermediate_size": None, "norm_eps": "rms_norm_eps"},
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8, "tie_word_embeddings": True},
        # Of the published files: another name of norm_eps, and the first weights.
        without_effect=(
            *("block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
            "conv_use_xavier_init",
        ),
    ),
)
