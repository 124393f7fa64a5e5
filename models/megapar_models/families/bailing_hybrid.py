"""Ling 3.0: Kimi's delta attention, and latent attention with a gate by head in some layers.

The weights are those of Kimi Linear (megapar_models.families.kimi_linear), but for one matrix in the place of two for
decays and for gates, and layers.N.attention.gate.weight [heads, h] of latent attention.

At Hugging Face: bailing_hybrid. Layers of multi-token prediction are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_FUNCTION
from megapar_models.codecs import Dropouts, Written
from megapar_models.delta_fields import LINEAR, full_each, types_of
from megapar_models.delta_net import GatedDelta
from megapar_models.families.deepseek import latent_scale
from megapar_models.families.kimi_linear import (
    IN_FP32,
    KIMI_LINEAR,
    AliasedExperts,
    KimiLayers,
    KimiLinearModel,
    KimiLinearStage,
    delta_modules,
    delta_net,
    with_aliases,
)
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope, factor_warnings, split_rope
from megapar_models.tensor_layouts import Pairs


@dataclass(frozen=True)
class BailingHybridModel(KimiLinearModel, RotaryModel):
    """The options of Ling 3.0. model.head_dim is the width of the rotated part of a latent head."""

    kda_decay_bound: float = field(default=0.0, metadata=OF_FUNCTION)
    """Decays of delta nets are above exp of minus this number, such as 5, by a sigmoid: exp(-bound sigmoid(exp(A) x)).
    0: they have no bound, and are exp(-exp(A) softplus(x))."""


class BailingHybridStage(KimiLinearStage[BailingHybridModel]):
    """Consecutive layers of Ling 3.0."""

    @classmethod
    def layer_kind(cls, model: BailingHybridModel, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        if isinstance(kind.mixer, GatedDelta):
            return kind
        return replace(kind, head_gate=True, rotary=Rotary.of(model), attention_scale=latent_scale(model))

    @classmethod
    def delta_net(cls, model: BailingHybridModel) -> GatedDelta:
        return replace(delta_net(model), decay_floor=-model.kda_decay_bound)


@dataclass(frozen=True)
class _Rope(Rope):
    """The rotary table of latent attention."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        # The share of a head of a delta net that is as wide as the rotated part: transformers does not read it,
        raw, beside = split_rope(with_aliases(raw)[0], "partial_rotary_factor")
        values, problems = super().read(raw, model_type)
        share = beside.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        # unless wavelengths are scaled.
        if share not in (None, 1.0) and not problems and values["rope_scaling"].rope_type != "default":
            problems = [f"partial_rotary_factor={share!r} is not supported beside scaled wavelengths; leave it out"]
        return values, problems

    def warnings(self, raw: Raw, family: str) -> list[str]:
        return factor_warnings(split_rope(with_aliases(raw)[0], "partial_rotary_factor")[0])


@dataclass(frozen=True)
class _Layers(KimiLayers):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        layers, interval = raw["num_hidden_layers"], raw.get("layer_group_size") or 6
        safe, bound = raw.get("kda_safe_gate", True), raw.get("kda_lower_bound", -5.0)
        problems = []
        if safe and not (isinstance(bound, (int, float)) and bound < 0):
            problems = [f"kda_lower_bound={bound!r} is not supported beside kda_safe_gate; numbers below 0 are"]
        # transformers writes the names of our options, and prefers them.
        values = {
            "linear_num_heads": raw.get("linear_num_heads", raw["num_attention_heads"]),
            "linear_head_dim": raw.get("linear_head_dim", raw.get("head_dim", 128)),
            "linear_conv_kernel_dim": raw.get("linear_conv_kernel_dim", raw.get("short_conv_kernel_size", 4)),
            "layer_types": tuple(raw.get("layer_types") or full_each(interval, layers)),
            "kda_decay_bound": -float(bound) if safe and not problems else 0.0,
        }
        return values, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what other programs compute of a published file, and transformers does not."""
        yield from super().judge(raw, model_type)
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            limits = raw.get(name)
            if limits is not None and not (isinstance(limits, list) and not any(limits)):
                yield (
                    f"{name} is not supported: no rule here bounds SwiGLU by layer; vLLM applies the limits, and "
                    "transformers ignores them: with null in their place, the model is that of transformers"
                )
        width = raw.get("moe_intermediate_size", 768)
        if raw.get("moe_shared_expert_intermediate_size", width) != width:
            yield "moe_shared_expert_intermediate_size is not supported unless it is moe_intermediate_size"
        rotated = raw.get("qk_rope_head_dim", 64)
        if raw.get("rotary_dim", rotated) != rotated:
            yield "rotary_dim is not supported unless it is qk_rope_head_dim"

    def write(self, model: BailingHybridModel, fields: dict[str, Any]) -> None:
        if model.q_lora_rank:
            text = "queries of bailing_hybrid of transformers have no latent"
            raise ConfigError(f"model.q_lora_rank={model.q_lora_rank}: {text}")
        super().write(model, fields)
        types = types_of(model)
        intervals = range(1, len(types) + 2)
        fields |= {
            "layer_types": [*types],
            "head_dim": model.linear_head_dim,
            "linear_num_heads": model.linear_num_heads,
            "short_conv_kernel_size": model.linear_conv_kernel_dim,
            "kda_safe_gate": model.kda_decay_bound > 0,
            "kda_lower_bound": -model.kda_decay_bound or -5.0,
            "moe_shared_expert_intermediate_size": model.moe.moe_intermediate_size,
        }
        if fits := [n for n in intervals if tuple(full_each(n, len(types))) == types]:
            fields["layer_group_size"] = fits[0]


def _pairs(model: BailingHybridModel) -> dict[str, Pairs]:
    """Theirs have the two numbers of a rotary pair beside each other. Queries of delta nets have no pairs."""
    nope = model.qk_nope_head_dim
    of_heads = Pairs(nope + model.head_dim, nope, model.head_dim)
    latent = [number for number, kind in enumerate(types_of(model)) if kind != LINEAR]
    return {
        "layers.*.attention.kv_a": Pairs(0, model.kv_lora_rank, model.head_dim),
        **{f"layers.{number}.attention.q": of_heads for number in latent},
    }


_MOE: dict[str, Any] = {"num_local_experts": 512, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_MOE |= {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_EXPERTS = AliasedExperts(
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 2, "n_shared_experts": 1},
    moe=_MOE,
    written=("num_experts", "num_shared_experts", "num_nextn_predict_layers"),
    longest=262144,
)
# Of the published files. transformers reads none of them.
_PUBLISHED: dict[str, Any] = {
    **{"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise", "use_mla_nope": False},
    **{"scoring_func": "sigmoid", "score_function": "sigmoid", "topk_method": "noaux_tc", "router_dtype": "fp32"},
    **{"moe_router_enable_expert_bias": True, "rope_interleave": True, "use_qk_norm": True, "group_norm_size": 1},
    **{"use_bias": False, "use_qkv_bias": False, "q_lora_rank": None},
}
_FIXED = {
    **{"attention_dropout": 0.0, "tie_word_embeddings": False, "use_kda_lora": False, "scale_router_input": False},
    **{"use_nGPT": False, "value_norm": False, "up_proj_norm": False, "num_kv_heads_for_linear_attn": 0},
    **{"mla_use_nope": False, "mlp_bias": False, "moe_layer_freq": 1, **_PUBLISHED},
}
_LAYER = "model.layers.*"
_MLP = f"{_LAYER}.mlp"
_ATTENTION = f"{_LAYER}.attention"
_MATRICES = ("gate", "up", "down")

BAILING_HYBRID = Family(
    name="bailing_hybrid",
    stage=BailingHybridStage,
    activations=("silu",),
    options=BailingHybridModel,
    even_head_dim=True,
    hugging_face=like(
        KIMI_LINEAR,
        model_types={"bailing_hybrid": ModelType("BailingHybridForCausalLM", fixed=_FIXED)},
        codecs=(
            *(_EXPERTS, _Rope(6000000.0), _Layers(), Written(_PUBLISHED)),
            Dropouts(("embedding_dropout", "output_dropout")),
        ),
        modules={
            "embedding": "model.word_embeddings",
            **delta_modules(_ATTENTION),
            **{f"layers.*.attention.{name}": f"{_ATTENTION}.{name}_proj" for name in "qkv"},
            "layers.*.attention.o": f"{_ATTENTION}.dense",
            "layers.*.attention.decay": f"{_ATTENTION}.f_proj",
            "layers.*.attention.gate": f"{_ATTENTION}.g_proj",
            "layers.*.attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
            "layers.*.attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
            "layers.*.attention.kv_b": f"{_ATTENTION}.kv_b_proj",
            **dict.fromkeys(f"layers.*.attention.{name}_{part}" for name in ("decay", "gate") for part in "ab"),
            **dict.fromkeys(f"layers.*.attention.{name}" for name in ("q_a", "q_a_norm", "q_b")),
            "layers.*.mlp.router": f"{_MLP}.gate",
            "layers.*.mlp.router.bias": f"{_MLP}.gate.expert_bias",
            **{f"layers.*.mlp.experts.*.{name}": f"{_MLP}.experts.*.{name}_proj" for name in _MATRICES},
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_experts.{name}_proj" for name in _MATRICES},
        },
        stacked={f"{_MLP}.experts.gate_up_proj": ("gate_proj", "up_proj"), f"{_MLP}.experts.down_proj": ("down_proj",)},
        # As transformers calls them in memory.
        renamed={
            **{".self_attn.": ".attention.", ".attention.o_proj.": ".attention.dense.", ".forget_gate.": "."},
            **{"model.embed_tokens.": "model.word_embeddings.", ".e_score_correction_bias": ".expert_bias"},
        },
        layouts={},
        in_fp32=(*IN_FP32, *(f"layers.*.attention.conv_{name}.weight" for name in "qkv")),
        defaults={"rms_norm_eps": 1e-6},
        # Of further layers and losses, and of older models of this name.
        without_effect=("mtp_loss_scaling_factor", "mtp_use_kda", "seq_aux", "max_window_layers", "linear_silu"),
        pairs=_pairs,
    ),
)
