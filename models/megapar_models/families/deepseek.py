"""DeepSeek-V3 (arXiv 2412.19437), and with options DeepSeek-V2 (2405.04434), Kimi K2, Moonlight and GLM-4.7-Flash.

Layers have latent attention (megapar_models.latent_attention has the names of its weights). The first of them have the
MLP of Llama, the others Mixtral's experts and a shared expert.

With sigmoid scores the router is V3's: the score of a group is the sum of its two best. With softmax it is V2's: the
score of a group is its best, and the scores of experts in other groups become 0.

The family of DeepSeek-V2 and V3: its options, and its names at Hugging Face.

It reads `model_type` deepseek_v3 (also R1 and Moonlight), kimi_k2 (the same under another name), deepseek_v2, and
glm4_moe_lite. FP8 weights are dequantized when they are read. Layers of multi-token prediction are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config
from megapar_models.families.llama import MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import Latent, LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import mixture_warnings, read_moe
from megapar_models.norms import NormRule
from megapar_models.rope import read_rope, scaling_problems, stated_rope, write_rope
from megapar_models.rotary import yarn_mscale
from megapar_models.tensor_layouts import Pairs

# Of the norms of latents, whatever model.rms_norm_eps says: so has the code of every model of this family.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class DeepseekExperts(MoEConfig):
    """A mixture whose first layers have no experts."""

    first_k_dense_replace: int = 0
    """The first layers, as many as this, have a plain MLP of width model.intermediate_size in place of experts."""


@dataclass(frozen=True)
class DeepseekModel(MixtralModel):
    """The options of DeepSeek-V2 and V3. model.head_dim is the width of the rotated part of a head."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    q_lora_rank: int = 0
    """Width of the latent of queries; 0: queries are projected directly."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Width of the part of a head's query and key that is not rotated."""
    v_head_dim: int = 128
    """Width of a head's value."""
    attention_bias: bool = False
    """Biases on the projections to latents and on the output projection."""

    @property
    def key_width(self) -> int:
        """The width of a head's query and key, with both of their parts."""
        return self.qk_nope_head_dim + self.head_dim

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.v_head_dim


class DeepseekStage(MixtralStage[DeepseekModel]):
    """Consecutive layers of DeepSeek-V2 or V3."""

    @classmethod
    def layer_kind(cls, model: DeepseekModel, number: int) -> LayerKind:
        rope = model.rope_scaling
        scale = (model.qk_nope_head_dim + model.head_dim) ** -0.5
        if rope.rope_type == "yarn" and rope.mscale_all_dim:
            scale *= yarn_mscale(max(rope.factor, 1.0), rope.mscale_all_dim) ** 2
        latent = Latent(
            q_rank=model.q_lora_rank,
            kv_rank=model.kv_lora_rank,
            nope_width=model.qk_nope_head_dim,
            rope_width=model.head_dim,
            value_width=model.v_head_dim,
            norm=NormRule(LATENT_EPS),
        )
        kind = replace(
            super().layer_kind(model, number),
            mixer="latent",
            latent=latent,
            attention_scale=scale,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )
        return with_experts(kind, model.moe, number)


def with_experts(kind: LayerKind, moe: DeepseekExperts, number: int) -> LayerKind:
    """`kind` with the MLP of layer `number`: a plain one in the first layers, or experts with DeepSeek's router."""
    if number < moe.first_k_dense_replace:
        return replace(kind, mlp="dense", mixture=None)
    rule = router_rule(moe)
    if moe.scoring_func == "sigmoid":
        return replace(kind, mixture=moe, router=replace(rule, group_score="best_2"))
    return replace(kind, mixture=moe, router=replace(rule, group_score="best", zero_other_groups=True))


_MODULES = {
    "layers.*.attention.q_a": "model.layers.*.self_attn.q_a_proj",
    "layers.*.attention.q_a_norm": "model.layers.*.self_attn.q_a_layernorm",
    "layers.*.attention.q_b": "model.layers.*.self_attn.q_b_proj",
    "layers.*.attention.kv_a": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "layers.*.attention.kv_a_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "layers.*.attention.kv_b": "model.layers.*.self_attn.kv_b_proj",
}
EXPERT_MODULES = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.mlp.experts.*.gate": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.mlp.experts.*.up": "model.layers.*.mlp.experts.*.up_proj",
    "layers.*.mlp.experts.*.down": "model.layers.*.mlp.experts.*.down_proj",
    "layers.*.mlp.shared.gate": "model.layers.*.mlp.shared_experts.gate_proj",
    "layers.*.mlp.shared.up": "model.layers.*.mlp.shared_experts.up_proj",
    "layers.*.mlp.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
}
STACKED = {
    "model.layers.*.mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "model.layers.*.mlp.experts.down_proj": ("down_proj",),
}
DEFAULTS = {"hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.02}
_LATENT = {
    **{name: name for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "attention_bias")},
    "qk_rope_head_dim": "head_dim",
}
_DEFAULTS = DEFAULTS | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEFAULTS |= {"attention_bias": False, "rms_norm_eps": 1e-6, "num_key_value_heads": None}
FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1}
_FIXED = FIXED | {"rope_interleave": True, "mlp_bias": False}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_MODEL_TYPES = {
    "deepseek_v3": ModelType(_DEFAULTS, _FIXED | SIGMOID),
    "kimi_k2": ModelType(_DEFAULTS, _FIXED | SIGMOID),
    # The program of transformers never divides the weights by their sum.
    "deepseek_v2": ModelType(_DEFAULTS, _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False}),
    "glm4_moe_lite": ModelType(
        _DEFAULTS | {"rms_norm_eps": 1e-5, "qk_nope_head_dim": 192, "v_head_dim": 256}, _FIXED | SIGMOID
    ),
}
# Of config.json: sizes and rules of experts. Several of them are in no file of the first models.
MOE = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    **{name: name for name in ("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")},
    **{name: name for name in ("n_group", "topk_group")},
}
_V3 = {"norm_topk_prob": True, "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": 1536}
_V2 = {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 2, "q_lora_rank": 1536}
_V3_MOE: dict[str, Any] = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_V3_MOE |= {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_V2_MOE: dict[str, Any] = {"n_routed_experts": 64, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}
_V2_MOE |= {"n_group": 1, "topk_group": 1}
_LITE = _V3 | {"q_lora_rank": 768}
_LITE_MOE = _V3_MOE | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
_LITE_MOE |= {"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}
# transformers' defaults of fields beyond `fields`, by model_type: of the model, and of its experts.
_BEYOND: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (_V3, _V3_MOE),
    "kimi_k2": (_V3, _V3_MOE),
    "deepseek_v2": (_V2, _V2_MOE),
    "glm4_moe_lite": (_LITE, _LITE_MOE),
}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, latents and experts from a config.json; returns option values and problems."""
    defaults, moe_defaults = _BEYOND[model_type]
    values, problems = read_rope(raw, default_theta=10000.0)
    values["q_lora_rank"] = raw.get("q_lora_rank", defaults["q_lora_rank"]) or 0
    experts, wrong = read_experts(raw, defaults, moe_defaults, sigmoid=model_type != "deepseek_v2")
    dense, wrong_layers = _dense_layers(raw, defaults, model_type)
    if dense is not None:
        experts["first_k_dense_replace"] = dense
    if model_type == "deepseek_v2" and raw.get("topk_method", "greedy") == "greedy":
        experts |= {"n_group": 1, "topk_group": 1}
    values["moe"] = DeepseekExperts(**experts)
    return values, [*problems, *wrong, *wrong_layers]


def read_experts(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], moe_defaults: Mapping[str, Any], *, sigmoid: bool
) -> tuple[dict[str, Any], list[str]]:
    """Options of `DeepseekExperts` from a config.json, and problems. V3's router with `sigmoid`, else V2's."""
    experts, problems = read_moe(raw, MOE, moe_defaults)
    shared = raw.get("n_shared_experts", defaults["n_shared_experts"])
    normed = raw.get("norm_topk_prob", defaults["norm_topk_prob"])
    first = raw.get("first_k_dense_replace", defaults["first_k_dense_replace"])
    if not isinstance(shared, int) or not isinstance(first, int) or not isinstance(normed, bool):
        stated = f"n_shared_experts={shared!r}, first_k_dense_replace={first!r}, norm_topk_prob={normed!r}"
        return {}, [*problems, f"{stated} should be two whole numbers and a bool"]
    experts |= {"norm_topk_prob": normed, "first_k_dense_replace": first, "balance": "global"}
    experts["shared_expert_intermediate_size"] = shared * experts.get("moe_intermediate_size", 0)
    if sigmoid:
        experts |= {"scoring_func": "sigmoid", "balance": "bias"}
    return experts, problems


def _dense_layers(raw: Mapping[str, Any], defaults: Mapping[str, Any], model_type: str) -> tuple[int | None, list[str]]:
    """The first layers without experts by mlp_layer_types of GLM-4.7-Flash, and problems. None: another field says."""
    if model_type != "glm4_moe_lite":
        return None, []
    types = raw.get("mlp_layer_types") or ["dense"]
    dense = types.count("dense")
    if "dense" in types[dense:]:
        return None, ["mlp_layer_types is not supported unless its dense layers are the first"]
    return dense, []


def judge(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield what latent attention does not compute."""
    if raw.get("num_key_value_heads") not in (None, raw["num_attention_heads"]):
        yield "num_key_value_heads is not supported unless it is num_attention_heads: each head has a key of its own"
    rope = stated_rope(raw)
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        yield "mscale_all_dim without mscale is not supported; DeepSeek's files have both"
    if rope.get("mscale_all_dim") and rope.get("attention_factor"):
        yield "attention_factor beside mscale_all_dim is not supported"
    methods = ("greedy", "group_limited_greedy")
    if model_type == "deepseek_v2" and raw.get("topk_method", "greedy") not in methods:
        yield f"topk_method={raw['topk_method']!r} is not supported; {' and '.join(methods)} are"
    head_dim = raw.get("head_dim")
    if head_dim not in (None, raw.get("qk_rope_head_dim", 64)):
        yield f"head_dim={head_dim!r} is not supported unless it is qk_rope_head_dim"
    width = (raw.get("qk_nope_head_dim") or 128) + (raw.get("qk_rope_head_dim") or 64)
    if raw.get("qk_head_dim", width) != width and model_type != "glm4_moe_lite":
        yield "qk_head_dim is not supported unless it is qk_nope_head_dim + qk_rope_head_dim"


def prediction_layers(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of the layers of multi-token prediction, which follow the others."""
    layers = raw["num_hidden_layers"]
    further = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    return tuple(f"model.layers.{number}." for number in range(layers, layers + further))


def _pairs(model: DeepseekModel) -> dict[str, Pairs]:
    """Theirs have the two numbers of a rotary pair beside each other."""
    nope = model.qk_nope_head_dim
    of_heads = Pairs(nope + model.head_dim, nope, model.head_dim)
    of_keys = Pairs(0, model.kv_lora_rank, model.head_dim)
    name = "layers.*.attention"
    return {f"{name}.q": of_heads, f"{name}.q_b": of_heads, f"{name}.kv_a": of_keys}


def write_experts(model: Any, model_type: str) -> dict[str, Any]:
    """The fields of experts in a config.json. Raises ConfigError if V3's or V2's code cannot represent them."""
    moe = model.moe
    shared, rest = divmod(moe.shared_expert_intermediate_size, moe.moe_intermediate_size)
    if rest or not shared or moe.shared_expert_gate:
        raise ConfigError(
            f"model.moe.shared_expert_intermediate_size: {model_type} of transformers has shared experts without a "
            "gate, together as wide as a multiple of model.moe.moe_intermediate_size"
        )
    written = {theirs: getattr(moe, ours) for theirs, ours in MOE.items() if "experts" not in theirs or "tok" in theirs}
    written |= {"n_routed_experts": moe.num_experts, "n_shared_experts": shared}
    return written | {"first_k_dense_replace": moe.first_k_dense_replace, "norm_topk_prob": moe.norm_topk_prob}


def _write(model: DeepseekModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if neither deepseek_v3 nor deepseek_v2 represents it."""
    moe = model.moe
    model_type = "deepseek_v2" if moe.scoring_func == "softmax" else "deepseek_v3"
    if model_type == "deepseek_v3" and not moe.has_selection_bias:
        raise ConfigError("model.moe.balance: deepseek_v3 of transformers has a bias that selects experts; use bias")
    if model_type == "deepseek_v2" and (moe.has_selection_bias or moe.norm_topk_prob):
        raise ConfigError(
            "model.moe.balance, model.moe.norm_topk_prob: deepseek_v2 of transformers has no bias that selects "
            "experts, and does not divide weights by their sum"
        )
    fields |= write_experts(model, model_type) | write_rope(model)
    fields |= {"q_lora_rank": model.q_lora_rank or None, "num_key_value_heads": model.num_attention_heads}
    name = "DeepseekV3"
    if model_type == "deepseek_v2":
        name = "DeepseekV2"
        fields["topk_method"] = "group_limited_greedy" if moe.n_group > 1 else "greedy"
    else:
        fields |= {"num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], **fields}


def _problems(config: Config, model: DeepseekModel) -> Iterator[str]:
    yield from scaling_problems(config, model)
    if model.num_key_value_heads != model.num_attention_heads:
        text = "each head of latent attention has a key of its own; use 0"
        yield problem(config, "model.num_key_value_heads", text)


DEEPSEEK = Family(
    name="deepseek",
    stage=DeepseekStage,
    activations=("silu",),
    options=DeepseekModel,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES | EXPERT_MODULES | _MODULES,
        stacked=STACKED,
        fields={name: name for name in SAME_FIELDS if name != "head_dim"} | _LATENT,
        activations={"silu": "silu"},
        tied=TIED,
        # ep_size was of the program that trained them; the other three are of its losses.
        without_effect=("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
        ignored=prediction_layers,
        pairs=_pairs,
        read=_read,
        judge=judge,
        write=_write,
        warnings=mixture_warnings,
    ),
)
