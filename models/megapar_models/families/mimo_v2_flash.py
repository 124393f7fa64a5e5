"""MiMo-V2-Flash: key/value heads that differ by layer, values narrower than keys, sinks, and DeepSeek-V3's experts.

Layers with a window have twice as many key/value heads as the others, sinks, and a rotary table of their own. The
weights are those of Qwen3-MoE without shared experts (megapar_models.families.qwen3_moe). With n query heads and kv
key/value heads of layer N, of width d, and of width e for values, these differ:

    layers.N.attention.v.weight    [kv e, h]    cut by output
    layers.N.attention.o.weight    [h, n e]     cut by input
    layers.N.attention.sinks       [n]          cut by heads; in layers with a window

At Hugging Face: mimo_v2_flash. FP8 weights are dequantized when they are read. Its config.json does not say how many
layers of multi-token prediction a folder holds. They have a window, and a plain MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.deepseek import prediction_modules
from megapar_models.families.laguna import ExpertsByLayer
from megapar_models.families.mixtral import MixtralModel
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts
from megapar_models.family import Codec, Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import HeadSizes, LayerKind
from megapar_models.moe import router_rule
from megapar_models.multi_token import MTPRule
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import PartialLocalRope
from megapar_models.stage import Stage
from megapar_models.windows import (
    FULL,
    SLIDING,
    ListedWindows,
    PartialLocalRopeModel,
    full_every,
    is_full,
    partial_rotary_of,
    window_of,
)


@dataclass(frozen=True)
class MimoModel(MixtralModel, PartialLocalRopeModel):
    """The options of MiMo-V2-Flash."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    v_head_dim: int = 0
    """Width of a head's value; 0: that of its query and key."""
    swa_num_key_value_heads: int = 0
    """Key/value heads of layers with a window; 0: as many as the other layers have."""
    attention_value_scale: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of values."""
    attention_bias: bool = False
    """Biases of the query, key and value projections."""

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.v_head_dim or self.head_dim


class MimoStage(Stage[MimoModel]):
    """Consecutive layers of MiMo-V2-Flash."""

    @classmethod
    def layer_kind(cls, model: MimoModel, number: int) -> LayerKind:
        full, keys = is_full(model, number), model.num_key_value_heads
        if not full:
            keys = model.swa_num_key_value_heads or keys
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=partial_rotary_of(model, number),
            window=window_of(model, number),
            head_sizes=HeadSizes(model.num_attention_heads, keys, model.head_dim, model.value_width),
            sizes_from="model.num_attention_heads model.num_key_value_heads model.swa_num_key_value_heads",
            qkv_bias=model.attention_bias,
            sinks=not full,
            value_factor=model.attention_value_scale,
        )
        if number in model.moe.mlp_only_layers:
            return kind
        rule = replace(router_rule(model.moe), group_score="best_2")
        return replace(kind, mlp="mixture", mixture=model.moe, router=rule)

    @classmethod
    def mtp_rule(cls, model: MimoModel) -> MTPRule | None:
        numbers = range(model.num_hidden_layers)
        kind = cls.layer_kind(model, next((number for number in numbers if not is_full(model, number)), 0))
        return MTPRule(kind=replace(kind, mlp="dense", mixture=None, router=None))


def _prediction_names(model: MimoModel) -> dict[str, str]:
    """Return the names of layers of multi-token prediction in files, which count them from 0."""
    found = {}
    for depth in range(model.num_nextn_predict_layers):
        ours, theirs = f"model.layers.{model.num_hidden_layers + depth}.", f"model.mtp.layers.{depth}."
        found[f"{ours}post_attention_layernorm."] = f"{theirs}pre_mlp_layernorm."
        found[f"{ours}shared_head.norm."] = f"{theirs}final_layernorm."
        found[ours] = theirs
    return found


class _Heads(Codec):
    """Heads by layer, values, and what published files state beside what transformers reads."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        scale, keys = raw.get("attention_value_scale", 0.707), raw.get("num_key_value_heads", 4)
        if keys is None:
            return {}, ["num_key_value_heads=null is not supported; layers with a window have twice the number"]
        own = 2 * keys if SLIDING in _WINDOWS.types(raw) else 0
        return {"attention_value_scale": 1.0 if scale is None else scale, "swa_num_key_value_heads": own}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        types = [int(kind == SLIDING) for kind in _WINDOWS.types(raw)]
        dense = _EXPERTS.read(raw, model_type)[0]["moe"].mlp_only_layers
        tables = (raw.get("rope_parameters") or _ROPE).get(SLIDING) or _ROPE[SLIDING]
        expected = {
            "swa_num_attention_heads": raw["num_attention_heads"],
            "swa_num_key_value_heads": 2 * (raw.get("num_key_value_heads", 4) or 0),
            "swa_head_dim": raw.get("head_dim", 192),
            "swa_v_head_dim": raw.get("v_head_dim", 128),
            "swa_rope_theta": tables.get("rope_theta", 1e4),
            "layernorm_epsilon": raw.get("rms_norm_eps", 1e-5),
            "hybrid_layer_pattern": types,
            "moe_layer_freq": [int(number not in dense) for number in range(len(types))],
        }
        for name, value in expected.items():
            if raw.get(name) not in (None, value):
                yield f"{name}={raw[name]!r} is not supported; transformers, which does not read it, has {value!r}"

    def write(self, model: MimoModel, fields: dict[str, Any]) -> None:
        own = model.swa_num_key_value_heads or model.num_key_value_heads
        if SLIDING in fields["layer_types"] and own != 2 * model.num_key_value_heads:
            raise ConfigError(
                f"model.swa_num_key_value_heads={model.swa_num_key_value_heads}: mimo_v2_flash of transformers has "
                "twice model.num_key_value_heads"
            )
        fields |= {"attention_value_scale": model.attention_value_scale, "v_head_dim": model.value_width}

    def problems(self, config: Config, model: MimoModel) -> Iterator[str]:
        if model.swa_num_key_value_heads and not model.sliding_window:
            text = "no layer has a window; set model.sliding_window, or leave it at 0"
            yield problem(config, "model.swa_num_key_value_heads model.sliding_window", text)


class _Windows(ListedWindows):
    """Windows, whose length published files state without the token's own key."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        window, others = raw.get("sliding_window", self.window), raw.get("sliding_window_size")
        raw = overlaid(raw, {"sliding_window": window if others is None else others + 1})
        return super().read(raw, model_type)


def _types(layers: int) -> list[str]:
    """The first layer and each sixth read all keys."""
    return [FULL, *full_every(6, layers)[1:]]


_NAMES = same("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group")
_NAMES |= {"n_routed_experts": "num_experts", "topk_group": "topk_group"}
_DEFAULTS: dict[str, Any] = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_DEFAULTS |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_EXPERTS = ExpertsByLayer(
    names=_NAMES,
    aliases=same("num_experts") | {"num_local_experts": "num_experts"},
    defaults=_DEFAULTS,
    always={"scoring_func": "sigmoid", "shared_expert_gate": False},
    has_bias=True,
)
_ROPE: dict[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}
_WINDOWS = _Windows(129, usual=_types)
_FIXED: dict[str, Any] = {"attention_dropout": 0.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_FIXED |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None}

MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    stage=MimoStage,
    activations=("silu",),
    options=MimoModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"mimo_v2_flash": ModelType("MiMoV2FlashForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, PartialLocalRope(5e6, windows=_WINDOWS, stated=_ROPE, part=0.334), _Heads()),
        modules={
            "layers.*.attention.sinks": "model.layers.*.self_attn.attention_sink_bias",
            "layers.*.mlp.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
            **dict.fromkeys(f"layers.*.mlp.shared.{name}" for name in ("gate", "up", "down")),
            "layers.*.mlp.shared_gate": None,
            **dict.fromkeys(f"layers.*.attention.{letter}_norm" for letter in "qk"),
        },
        renamed={".self_attn.sinks": ".self_attn.attention_sink_bias"},  # what transformers calls it in memory
        fields={**same("attention_bias"), "v_head_dim": "v_head_dim"},
        defaults={
            **{"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128},
            "attention_bias": False,
        },
        activations=same("silu"),
        ignored=lambda raw: ("model.mtp.",),
        modules_of=prediction_modules,
        mtp_names=_prediction_names,
        without_effect=("attention_chunk_size",),  # the length of chunks that no version of its model reads
    ),
)
