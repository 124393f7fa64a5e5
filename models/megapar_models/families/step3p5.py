"""Step-3.5-Flash, and the text of Step-3.7-Flash: query heads by layer, gated heads, and bounded activations.

Layers with a window may have more query heads than the others, and have a rotary table of their own. Norms multiply by
1 + w. In some layers silu of the gate has an upper bound, and the other factor has two: one number for experts, and one
for the shared expert or the MLP. The weights are those of Laguna (megapar_models.families.laguna).

At Hugging Face: step3p5, and the text of step3p7. Published files list numbers by layer, and transformers' own by kind
of layer; both are read, and the latter are written. Layers of multi-token prediction are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.deepseek import prediction_layers
from megapar_models.families.laguna import ExpertsByLayer
from megapar_models.families.mixtral import MixtralModel
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts
from megapar_models.family import Codec, Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import HeadSizes, LayerKind
from megapar_models.moe import router_rule
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import PartialLocalRope
from megapar_models.stage import Stage
from megapar_models.windows import (
    FULL,
    SLIDING,
    ListedWindows,
    PartialLocalRopeModel,
    is_full,
    partial_rotary_of,
    window_of,
)


@dataclass(frozen=True)
class StepModel(MixtralModel, PartialLocalRopeModel):
    """The options of Step-3.5."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    num_sliding_attention_heads: int = 0
    """Query heads of layers with a window; 0: as many as the other layers have."""
    query_pre_attn_scalar: int = field(default=0, metadata=OF_FUNCTION)
    """Scores are divided by its root; 0: by that of the width of a head."""
    swiglu_limits: tuple[float, ...] = field(default=(), metadata=OF_FUNCTION)
    """The bound of the activation of experts in each layer, 0 for none; without any, no layer has one."""
    swiglu_limits_shared: tuple[float, ...] = field(default=(), metadata=OF_FUNCTION)
    """The bound of the activation of the shared expert, or of the MLP, in each layer, as in model.swiglu_limits."""


class StepStage(Stage[StepModel]):
    """Consecutive layers of Step-3.5."""

    @classmethod
    def layer_kind(cls, model: StepModel, number: int) -> LayerKind:
        heads = model.num_attention_heads
        if not is_full(model, number):
            heads = model.num_sliding_attention_heads or heads
        # Lists of the wrong length are reported by `_Limits`.
        limit, of_shared = (sum(x[number : number + 1]) for x in (model.swiglu_limits, model.swiglu_limits_shared))
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps, offset=1),
            rotary=partial_rotary_of(model, number),
            window=window_of(model, number),
            head_sizes=HeadSizes(heads, model.num_key_value_heads, model.head_dim, model.head_dim),
            sizes_from="model.num_attention_heads model.num_sliding_attention_heads model.num_key_value_heads",
            qk_norm=True,
            attention_scale=(model.query_pre_attn_scalar or model.head_dim) ** -0.5,
            head_gate=True,
            activation="swiglu_step",
            activation_limit=of_shared,
        )
        if number in model.moe.mlp_only_layers:
            return kind
        kind = replace(kind, activation_limit=limit, shared_activation_limit=of_shared)
        return replace(kind, mlp="mixture", mixture=model.moe, router=router_rule(model.moe))


# Fields

_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_ALIASES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}


def _newer(raw: Raw) -> Raw:
    """The config.json with fields by kind of layer in place of those by layer, as transformers makes them."""
    layers = raw["num_hidden_layers"]
    padded = layers + (raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0)

    def listed(name: str) -> Any:
        """The list of a field, without the layers of multi-token prediction at its end."""
        value = raw.get(name)
        return value[:layers] if isinstance(value, list) and len(value) == padded else value

    new = {ours: raw[theirs] for theirs, ours in _ALIASES.items() if raw.get(theirs) is not None}
    new |= {name: listed(name) for name in ("layer_types", "mlp_layer_types", *_LIMITS)}
    types = new["layer_types"] or [FULL] * layers
    if new["mlp_layer_types"] is None:
        stated = raw.get("moe_layers_enum")
        words = stated.split(",") if isinstance(stated, str) else stated
        sparse = range(3, layers) if words is None else [str(word).strip() for word in words]
        new["mlp_layer_types"] = ["sparse" if {n, str(n)} & {*sparse} else "dense" for n in range(layers)]
    if raw.get("num_sliding_attention_heads") is None:
        new["num_sliding_attention_heads"] = (raw.get("attention_other_setting") or {}).get("num_attention_heads")
    tables = raw.get("rope_parameters") or {}
    if not all(isinstance(tables.get(kind), dict) for kind in types):
        theta, parts = listed("rope_theta"), listed("partial_rotary_factors")
        tables = {}
        for kind in dict.fromkeys(types):
            first = types.index(kind)
            tables[kind] = {"rope_type": "default", "rope_theta": theta[first] if isinstance(theta, list) else theta}
            tables[kind]["rope_theta"] = 1e4 if theta is None else tables[kind]["rope_theta"]
            if parts:
                tables[kind]["partial_rotary_factor"] = parts[first]
        tables.get(FULL, {}).update(raw.get("rope_scaling") or {})
    return overlaid(raw, {**new, "rope_parameters": tables, "rope_scaling": None, "rope_theta": None})


def _wrong_lists(raw: Raw) -> Iterator[str]:
    """Yield a line for each list that has no entry for some layer, or unlike ones for layers of a kind.

    And for each two names of a field with unlike values.
    """
    new = _newer(raw)
    types = new["layer_types"] or [FULL] * raw["num_hidden_layers"]
    layers = len(types)
    for theirs, ours in _ALIASES.items():
        if raw.get(theirs) is not None and raw.get(ours) not in (None, raw[theirs]):
            yield f"{theirs}={raw[theirs]!r} contradicts {ours}={raw[ours]!r}"
    for name in _LIMITS:
        limits = new[name]
        if limits is not None and (
            len(limits) != layers or not all(x is None or (type(x) in (int, float) and x >= 0) for x in limits)
        ):
            yield f"{name}={limits!r} is not supported; a number from 0 on, or null, for each of {layers} layers is"
    for name in ("rope_theta", "partial_rotary_factors"):
        values = raw.get(name)
        if not isinstance(values, list):
            continue
        kinds = {(kind, value) for kind, value in zip(types, values, strict=False)}
        if len(values) < layers or not all(map(_is_number, values)) or len(kinds) != len({*types}):
            yield f"{name}={values!r} is not supported; one number for all layers of a kind is"


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


class _Heads(Codec):
    """Heads by kind of layer, the bounds of activations, and what published files state besides."""

    reads_first = True

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if wrong := [*_wrong_lists(raw)]:
            return {}, wrong
        new = _newer(raw)
        values = {name: tuple(float(x or 0.0) for x in new[name] or ()) for name in _LIMITS}
        values = {name: limits if any(limits) else () for name, limits in values.items()}
        keys, own = new.get("num_key_value_heads", 8), new["num_sliding_attention_heads"]
        if own == raw["num_attention_heads"] or SLIDING not in (new["layer_types"] or ()):
            own = None
        scalar = raw.get("query_pre_attn_scalar")
        if scalar is not None and (type(scalar) is not int or scalar < 1):
            return {}, [f"query_pre_attn_scalar={scalar!r} should be a whole number from 1 on"]
        found = {"num_key_value_heads": keys, "num_sliding_attention_heads": own or 0}
        return {**values, **found, "query_pre_attn_scalar": scalar or 0}, []

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        new = _newer(raw)
        own = new["num_sliding_attention_heads"] or raw["num_attention_heads"]
        types = new["layer_types"] or [FULL] * raw["num_hidden_layers"]
        by_layer = {str(n): {"num_attention_heads": own} for n, kind in enumerate(types) if kind == SLIDING}
        if raw.get("per_layer_config") not in (None, by_layer):
            yield f"per_layer_config={raw['per_layer_config']!r} is not supported; {by_layer!r} is"
        width = raw.get("head_dim", 128)
        expected = {"attention_type": SLIDING, "num_attention_heads": own, "head_dim": width, "true_head_dim": width}
        expected["num_attention_groups"] = new.get("num_key_value_heads", 8)
        for name, value in (raw.get("attention_other_setting") or {}).items():
            if name not in expected or value not in (None, expected[name]):
                yield f"attention_other_setting: {name}={value!r} is not supported; {expected.get(name)!r} is"
        flat = {name for name in raw.get("rope_parameters") or {} if name not in (FULL, SLIDING)}
        if any((raw.get("rope_scaling") or {}).get(name) != raw["rope_parameters"][name] for name in flat):
            yield f"rope_parameters={raw['rope_parameters']!r} is not supported; transformers reads rope_scaling"
        if not all(raw.get("use_rope_layers") or ()):
            yield "use_rope_layers is not supported unless all layers have rotary positions"
        if raw.get("yarn_only_types") not in (None, [], [FULL]):
            yield f"yarn_only_types={raw['yarn_only_types']!r} is not supported; {[FULL]!r} is"

    def write(self, model: StepModel, fields: dict[str, Any]) -> None:
        own = model.num_sliding_attention_heads or model.num_attention_heads
        fields |= {"num_sliding_attention_heads": own, "num_nextn_predict_layers": 0}
        fields |= {"query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim}
        fields |= {name: [*getattr(model, name)] or None for name in _LIMITS}

    def problems(self, config: Config, model: StepModel) -> Iterator[str]:
        for name in _LIMITS:
            if len(getattr(model, name)) not in (0, model.num_hidden_layers):
                text = f"give a number for each of the {model.num_hidden_layers} layers, 0 for none, or leave it empty"
                yield problem(config, f"model.{name} model.num_hidden_layers", text)
        if model.num_sliding_attention_heads and not model.sliding_window:
            text = "no layer has a window; set model.sliding_window, or leave it at 0"
            yield problem(config, "model.num_sliding_attention_heads model.sliding_window", text)


class _Experts(ExpertsByLayer):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return super().read(_newer(raw), model_type)

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if _newer(raw).get("share_expert_dim") == 0:
            yield "share_expert_dim=0 is not supported; all models of transformers have a shared expert"

    def refusals(self, model: StepModel) -> Iterator[str]:
        if not model.moe.shared_expert_intermediate_size:
            yield "model.moe.shared_expert_intermediate_size=0: step3p5 of transformers has a shared expert"


class _Windows(ListedWindows):
    def types(self, raw: Raw) -> Sequence[str]:
        return super().types(_newer(raw))


class _Rope(PartialLocalRope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if [*_wrong_lists(raw)]:
            return {}, []  # `_Heads` says so
        return super().read(_newer(raw), model_type)

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        return super().judge(_newer(raw), model_type)


_NAMES = {
    **{"n_routed_experts": "num_experts", "share_expert_dim": "shared_expert_intermediate_size"},
    **same("num_experts_per_tok", "moe_intermediate_size"),
    "moe_router_scaling_factor": "routed_scaling_factor",
}
_DEFAULTS: dict[str, Any] = {"n_routed_experts": 288, "share_expert_dim": 1280, "num_experts_per_tok": 8}
_DEFAULTS |= {"moe_intermediate_size": 1280, "moe_router_scaling_factor": 1.0}
_EXPERTS = _Experts(
    names=_NAMES,
    aliases={"num_local_experts": "num_experts"},
    defaults=_DEFAULTS,
    always={"scoring_func": "sigmoid", "norm_topk_prob": True, "shared_expert_gate": False},
    has_bias=True,
)
_FIXED: dict[str, Any] = {"attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False, "gating": True}
_FIXED |= {"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "norm_expert_weight": True, "sink": False}
_FIXED |= {"use_moe": True}
_FIXED |= {"moe_router_activation": "sigmoid", "att_impl_type": "GQA", "zero_centered": True}
_FIXED |= {"use_qk_norm": True, "moe_layer_offset": 0}
_FIXED |= {"use_bidirectional_attention": False}

STEP3P5 = Family(
    name="step3p5",
    stage=StepStage,
    activations=("silu",),
    options=StepModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"step3p5": ModelType("Step3p5ForCausalLM", fixed=_FIXED)},
        codecs=(_Heads(), _EXPERTS, _Rope(1e4, windows=_Windows(), stated={})),
        modules={
            "layers.*.attention.gate": "model.layers.*.self_attn.g_proj",
            "layers.*.mlp.router": "model.layers.*.moe.gate",
            "layers.*.mlp.router.bias": "model.layers.*.moe.router_bias",
            **{f"layers.*.mlp.experts.*.{x}": f"model.layers.*.moe.{x}_proj" for x in ("gate", "up", "down")},
            **{f"layers.*.mlp.shared.{x}": f"model.layers.*.share_expert.{x}_proj" for x in ("gate", "up", "down")},
            "layers.*.mlp.shared_gate": None,
        },
        stacked={},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128},
        activations=same("silu"),
        ignored=prediction_layers,
        # Of layers of multi-token prediction, and how another program computes routers.
        without_effect=("mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate", "max_seq_len", "moe_every_n_layer"),
    ),
)
