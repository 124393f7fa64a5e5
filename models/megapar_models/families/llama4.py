"""Llama 4 (Meta, 2025): layers that attend within chunks, layers without positions, and experts on weighted inputs.

Most layers have rotary positions and attend within chunks of a document. The others see no positions and all keys, and
a factor of queries grows with the position. A token goes to its experts by sigmoid scores, which multiply what the
experts read, and through a shared expert. The weights are those of Mixtral (megapar_models.families.mixtral).

At Hugging Face: llama4_text, also the text of llama4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION, MaybeMixtureModel, MoEConfig
from megapar.config.options import Config
from megapar_models.codecs import Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind, Temperature
from megapar_models.moe_fields import Balanced, read_moe, refuse_unwritable
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing, Pairs
from megapar_models.windows import FULL

CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class Llama4Experts(MoEConfig):
    """A mixture in each layer, or in each second or later one."""

    interleave_moe_layer_step: int = 1
    """Each layer numbered by a multiple of it has experts, counted from 1. The others have an MLP of width
    model.intermediate_size."""


@dataclass(frozen=True)
class Llama4Model(MaybeMixtureModel, RotaryModel):
    """The options of Llama 4."""

    moe: Llama4Experts = field(default_factory=Llama4Experts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases of all projections of attention."""
    use_qk_norm: bool = field(default=True, metadata=OF_FUNCTION)
    """A norm without weight of queries and keys behind the rotation, in layers with rotary positions."""
    no_rope_layers: tuple[int, ...] = field(default=(), metadata=OF_FUNCTION)
    """1 for each layer with rotary positions and 0 for each layer without; empty: each fourth layer has none."""
    attention_chunk_size: int = field(default=0, metadata=OF_FUNCTION)
    """Tokens of a chunk, counted from the start of a document; 0: there are no chunks."""
    layer_types: tuple[str, ...] = field(default=(), metadata=OF_FUNCTION)
    """chunked_attention or full_attention for each layer; empty: layers with rotary positions have chunks."""
    attn_scale: float = field(default=0.0, metadata=OF_FUNCTION)
    """Queries of layers without positions are multiplied by 1 + attn_scale ln(1 + floor((position + 1) / floor_scale)).
    0: they have no factor."""
    floor_scale: int = field(default=8192, metadata=OF_FUNCTION)
    """Positions over which the factor of queries stays the same."""


def has_rope(model: Llama4Model, number: int) -> bool:
    """Whether a layer has rotary positions."""
    # A list of the wrong length is reported by the family.
    listed = model.no_rope_layers[number : number + 1] or (int((number + 1) % _NOPE_EACH != 0),)
    return listed != (0,)


def has_chunks(model: Llama4Model, number: int) -> bool:
    """Whether a layer attends within chunks."""
    listed = model.layer_types[number : number + 1]
    return listed == (CHUNKED,) if listed else has_rope(model, number)


def has_experts(model: Llama4Model, number: int) -> bool:
    """Whether a layer has experts."""
    return model.experts is not None and (number + 1) % model.moe.interleave_moe_layer_step == 0


class Llama4Stage(Stage[Llama4Model]):
    """Consecutive layers of Llama 4."""

    @classmethod
    def layer_kind(cls, model: Llama4Model, number: int) -> LayerKind:
        rotates = has_rope(model, number)
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            chunk=model.attention_chunk_size if has_chunks(model, number) else 0,
            rotary=Rotary.of(model) if rotates else None,
            qk_norm=model.use_qk_norm and rotates,
            qk_norm_rule=NormRule(model.rms_norm_eps, weighted=False),
            qk_norm_after_rotary=True,
        )
        if not rotates and model.attn_scale:
            kind = replace(kind, temperature=Temperature(model.attn_scale, model.floor_scale, first=1))
        if has_experts(model, number):
            return replace(kind, mlp="mixture", mixture=model.moe, weighted_inputs=True)
        return kind


# Hugging Face


@dataclass(frozen=True)
class _Layers(Codec):
    """Which layers have rotary positions and chunks, and the factor of queries in the others."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", _NOPE_EACH)
        if not interval:
            return {}, [f"no_rope_layer_interval={interval!r} should be a whole number from 1 on"]
        stated = raw.get("no_rope_layers") or [int((number + 1) % interval != 0) for number in range(layers)]
        roped = [int(bool(rotates)) for rotates in stated]
        if len(roped) < layers:
            return {}, [f"no_rope_layers={stated!r} should have 0 or 1 for each of {layers} layers"]
        types = raw.get("layer_types") or [CHUNKED if rotates else FULL for rotates in roped[:layers]]
        if not set(types) <= {CHUNKED, FULL}:
            return {}, [f"layer_types={types!r} is not supported; lists of {CHUNKED} and {FULL} are"]
        chunk = raw.get("attention_chunk_size", 8192)
        if CHUNKED in types and not chunk:
            return {}, [f"attention_chunk_size={chunk!r} should be a whole number from 1 on: layers have {CHUNKED}"]
        scale, tuned = raw.get("attn_scale", 0.1), raw.get("attn_temperature_tuning", True)
        values: dict[str, Any] = {
            "no_rope_layers": tuple(roped[:layers]),
            "layer_types": tuple(types),
            "attention_chunk_size": chunk if CHUNKED in types else 0,
            "attn_scale": scale if tuned else 0.0,
            "floor_scale": raw.get("floor_scale", 8192),
        }
        return values, []

    def write(self, model: Llama4Model, fields: dict[str, Any]) -> None:
        numbers = range(model.num_hidden_layers)
        fields |= {
            "no_rope_layers": [int(has_rope(model, number)) for number in numbers],
            "layer_types": [CHUNKED if has_chunks(model, number) else FULL for number in numbers],
            "attention_chunk_size": model.attention_chunk_size or None,
            "attn_temperature_tuning": model.attn_scale != 0,
            "attn_scale": model.attn_scale,
            "floor_scale": model.floor_scale,
        }
        if not model.attention_chunk_size:
            fields["layer_types"] = [FULL for _ in numbers]

    def problems(self, config: Config, model: Llama4Model) -> Iterator[str]:
        layers = model.num_hidden_layers
        for name, known in (("no_rope_layers", {0, 1}), ("layer_types", {CHUNKED, FULL})):
            listed = getattr(model, name)
            if listed and (len(listed) != layers or not set(listed) <= known):
                text = f"give {' or '.join(sorted(map(str, known)))} for each of the {layers} layers, or nothing"
                yield problem(config, f"model.{name} model.num_hidden_layers", text)
        if model.attention_chunk_size < 0:
            yield problem(config, "model.attention_chunk_size", "must be at least 0, which means no chunks")
        if CHUNKED in model.layer_types and not model.attention_chunk_size:
            text = f"{CHUNKED} needs chunks of at least 1 token"
            yield problem(config, "model.layer_types model.attention_chunk_size", text)
        if model.floor_scale < 1:
            yield problem(config, "model.floor_scale", "must be at least 1")


class _Experts(Balanced):
    """The layers with experts, and their widths: the shared expert is as wide as the others."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        layers, step = raw["num_hidden_layers"], raw.get("interleave_moe_layer_step", 1)
        numbers = raw.get("moe_layers")
        moe, problems = read_moe(raw, _NAMES, _DEFAULTS)
        if numbers == []:
            return {}, []
        if numbers is not None:
            step = numbers[0] + 1
        if not step or (numbers is not None and numbers != [*range(step - 1, layers, step)]):
            text = f"moe_layers={numbers!r}, interleave_moe_layer_step={step!r}"
            return {}, [f"{text} is not supported unless each layer of a multiple of a number has experts"]
        moe |= {**_ALWAYS, "shared_expert_intermediate_size": moe.get("moe_intermediate_size", 0)}
        return {"moe": Llama4Experts(**moe, interleave_moe_layer_step=step)}, problems

    def write(self, model: Llama4Model, fields: dict[str, Any]) -> None:
        moe, layers = model.moe, model.num_hidden_layers
        if model.experts is None:
            fields |= {"moe_layers": [], "interleave_moe_layer_step": 1}
            return
        step = moe.interleave_moe_layer_step
        if moe.shared_expert_intermediate_size != moe.moe_intermediate_size or moe.shared_expert_gate:
            raise ConfigError(
                "model.moe.shared_expert_intermediate_size, model.moe.shared_expert_gate: the shared expert of "
                f"llama4_text of transformers is as wide as the others, {moe.moe_intermediate_size}, and has no gate"
            )
        width = moe.shared_expert_intermediate_size
        always = {**_ALWAYS, "shared_expert_intermediate_size": width}
        refuse_unwritable(model, fields["model_type"], always, ())
        fields |= {theirs: getattr(moe, ours) for theirs, ours in _NAMES.items()}
        fields |= {"interleave_moe_layer_step": step, "moe_layers": [*range(step - 1, layers, step)]}

    def problems(self, config: Config, model: Llama4Model) -> Iterator[str]:
        step = model.moe.interleave_moe_layer_step
        if not 1 <= step <= model.num_hidden_layers and model.experts is not None:
            text = f"must be from 1 to model.num_hidden_layers {model.num_hidden_layers}"
            yield problem(config, "model.moe.interleave_moe_layer_step", text)


_NOPE_EACH = 4  # transformers' layers without positions, if no field says which
_NAMES = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}
_NAMES |= same("num_experts_per_tok", "router_aux_loss_coef")
_DEFAULTS: dict[str, Any] = {"num_local_experts": 16, "num_experts_per_tok": 1}
_DEFAULTS |= {"intermediate_size": 8192, "router_aux_loss_coef": 0.001}
_ALWAYS = {"scoring_func": "sigmoid", "norm_topk_prob": False}
_FIXED = {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "for_llm_compressor": False}
_LAYER = "model.layers.*"
_MLP = f"{_LAYER}.feed_forward"
_MATRICES = ("gate", "up", "down")


def _pairs(model: Llama4Model) -> dict[str, Pairs]:
    """Theirs have the two numbers of a rotary pair beside each other. Without a rotation their order is no matter."""
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.head_dim))


LLAMA4 = Family(
    name="llama4",
    stage=Llama4Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Llama4Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"llama4_text": ModelType("Llama4ForCausalLM", fixed=_FIXED)},
        codecs=(_Experts(), Rope(500000.0), _Layers(), Written({"router_jitter_noise": 0.0})),
        modules={
            **{f"layers.*.mlp.{name}": f"{_MLP}.{name}_proj" for name in _MATRICES},
            "layers.*.mlp.router": f"{_MLP}.router",
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_expert.{name}_proj" for name in _MATRICES},
            **{f"layers.*.mlp.experts.*.{name}.weight": f"{_MLP}.experts.gate_up_proj" for name in ("gate", "up")},
            "layers.*.mlp.experts.*.down.weight": f"{_MLP}.experts.down_proj",
        },
        layouts={
            f"{_MLP}.experts.gate_up_proj": Packing(transposed=True),
            f"{_MLP}.experts.down_proj": Packing(transposed=True),
        },
        fields={**same("attention_bias", "use_qk_norm"), "intermediate_size_mlp": "intermediate_size"},
        defaults={
            **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False},
            **{"use_qk_norm": True, "intermediate_size_mlp": 16384},
        },
        pairs=_pairs,
    ),
)
