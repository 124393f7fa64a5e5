"""Laguna (XS, S and M): heads that differ by layer, gated outputs of attention, and DeepSeek-V3's router with a cap.

Layers with a window may have more query heads than the others, and have a rotary table of their own. The weights are
those of Qwen3-MoE (megapar_models.families.qwen3_moe), and with h hidden size and n query heads of layer N, of width d:

    layers.N.attention.gate.weight    [n, h] or, with model.gating per-element, [n d, h]; cut by output

At Hugging Face: laguna.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.mixtral import MixtralModel
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts, numbering_problems
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import HeadSizes, LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable, wrong_mlp_types
from megapar_models.norms import NormRule
from megapar_models.rotary_fields import PartialLocalRope
from megapar_models.stage import Stage
from megapar_models.windows import FULL, SLIDING, ListedWindows, PartialLocalRopeModel, partial_rotary_of, window_of


@dataclass(frozen=True)
class LagunaModel(MixtralModel, PartialLocalRopeModel):
    """The options of Laguna."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    num_attention_heads_per_layer: tuple[int, ...] = ()
    """Query heads of each layer; without any, all layers have model.num_attention_heads."""
    gating: Literal["per-head", "per-element"] = "per-head"
    """The output of attention is multiplied by softplus of a projection of the token: to a number a head, or to one for
    each of its dimensions."""
    moe_router_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Logits x of routers become cap * tanh(x / cap); 0: they stay as they are."""


class LagunaStage(Stage[LagunaModel]):
    """Consecutive layers of Laguna."""

    @classmethod
    def layer_kind(cls, model: LagunaModel, number: int) -> LayerKind:
        # A list of the wrong length is reported by `_Heads`.
        listed = model.num_attention_heads_per_layer[number : number + 1]
        sizes = [HeadSizes(heads, model.num_key_value_heads, model.head_dim, model.head_dim) for heads in listed]
        kind = LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=partial_rotary_of(model, number),
            window=window_of(model, number),
            qk_norm=True,
            head_sizes=sizes[0] if sizes else None,
            sizes_from="model.num_attention_heads_per_layer model.num_key_value_heads",
            head_gate=model.gating == "per-head",
            output_gate=model.gating == "per-element",
            gate_activation="softplus",
        )
        if number in model.moe.mlp_only_layers:
            return kind
        rule = replace(router_rule(model.moe), logit_cap=model.moe_router_logit_softcapping)
        return replace(kind, mlp="mixture", mixture=model.moe, router=rule)


@dataclass(frozen=True, kw_only=True)
class ExpertsByLayer(RoutedExperts):
    """A mixture of experts in the layers that mlp_layer_types lists."""

    first_dense: int = 1
    """How many layers have a plain MLP, in transformers, if mlp_layer_types is absent: the first ones."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, {**self.names, **self.aliases}, self.defaults)
        types, layers = raw.get("mlp_layer_types"), raw["num_hidden_layers"]
        if types is None:
            types = ["dense" if number < self.first_dense else "sparse" for number in range(layers)]
        dense = tuple(number for number, kind in enumerate(types) if kind == "dense")
        moe |= {**self.always, "mlp_only_layers": dense}
        if self.has_bias:
            moe |= {"balance": "bias"}
        return {"moe": Qwen3MoeExperts(**moe)}, [*problems, *wrong_mlp_types(types, layers)]

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        moe, names = model.moe, {*self.names.values()}
        own = {name: getattr(moe, name) for name in names & {"routed_scaling_factor", "n_group", *_SHARED}}
        fixed = {**self.always, **own}
        refuse_unwritable(model, fields["model_type"], fixed, self.refusals(model), has_bias=self.has_bias)
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        dense = moe.mlp_only_layers
        fields["mlp_layer_types"] = ["dense" if n in dense else "sparse" for n in range(model.num_hidden_layers)]

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return numbering_problems(config, model)


class _Experts(ExpertsByLayer):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if raw.get(_SHARED[0]) == 0:
            yield f"{_SHARED[0]}=0 is not supported; all models of transformers have a shared expert"
        dense = self.read(raw, model_type)[0]["moe"].mlp_only_layers
        if (listed := raw.get("mlp_only_layers")) is not None and {*listed} != {*dense}:
            yield f"mlp_only_layers={listed!r} contradicts the dense layers {list(dense)} of mlp_layer_types"

    def refusals(self, model: LagunaModel) -> Iterator[str]:
        if not model.moe.shared_expert_intermediate_size:
            yield f"model.moe.{_SHARED[0]}=0: laguna of transformers has a shared expert"


class _Heads(Codec):
    """Heads by layer, and the gate of their outputs."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        heads, layers = raw.get("num_attention_heads_per_layer"), raw["num_hidden_layers"]
        if heads is not None and (len(heads) != layers or not all(isinstance(n, int) and n > 0 for n in heads)):
            text = f"a whole number above 0 for each of {layers} layers is"
            return {}, [f"num_attention_heads_per_layer={heads!r} is not supported; {text}"]
        gating, cap = raw.get("gating", True), raw.get("moe_router_logit_softcapping", 0.0)
        if cap is None:
            return {}, ["moe_router_logit_softcapping=null is not supported; a number is, and 0 is no cap"]
        if gating not in (True, "per-head", "per-element"):
            return {}, [f"gating={gating!r} is not supported; true, 'per-head' and 'per-element' are"]
        kinds = {str(kind).replace("_", "-") for kind in raw.get("gating_types") or ()}
        if kinds - {"per-head" if gating is True else gating}:
            return {}, [f"gating_types={raw['gating_types']!r} contradicts gating={gating!r}"]
        own = () if heads is None or {*heads} == {raw["num_attention_heads"]} else tuple(heads)
        return {
            "num_attention_heads_per_layer": own,
            "gating": "per-head" if gating is True else gating,
            "moe_router_logit_softcapping": float(cap),
        }, []

    def write(self, model: LagunaModel, fields: dict[str, Any]) -> None:
        usual = [model.num_attention_heads] * model.num_hidden_layers
        fields |= {"num_attention_heads_per_layer": list(model.num_attention_heads_per_layer) or usual}
        fields |= {name: getattr(model, name) for name in ("gating", "moe_router_logit_softcapping")}

    def problems(self, config: Config, model: LagunaModel) -> Iterator[str]:
        listed = len(model.num_attention_heads_per_layer)
        if listed not in (0, model.num_hidden_layers):
            text = f"has {listed} layers; give a number for each of the {model.num_hidden_layers}, or none"
            yield problem(config, "model.num_attention_heads_per_layer model.num_hidden_layers", text)


_SHARED = ("shared_expert_intermediate_size",)
_NAMES = same("num_experts", "num_experts_per_tok", "moe_intermediate_size", *_SHARED)
_NAMES |= {"moe_routed_scaling_factor": "routed_scaling_factor"}
_DEFAULTS: dict[str, Any] = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_DEFAULTS |= {_SHARED[0]: 512, "moe_routed_scaling_factor": 1.0}
_EXPERTS = _Experts(
    names=_NAMES,
    aliases={"num_local_experts": "num_experts"},
    defaults=_DEFAULTS,
    always={"scoring_func": "sigmoid", "norm_topk_prob": True, "shared_expert_gate": False},
    has_bias=True,
)
_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_FIXED = {"attention_dropout": 0.0, "attention_bias": False, "moe_apply_router_weight_on_input": False}
_FIXED |= {"norm_topk_prob": True, "decoder_sparse_step": 1}
_MLP = "model.layers.*.mlp"

LAGUNA = Family(
    name="laguna",
    stage=LagunaStage,
    activations=("silu",),
    options=LagunaModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"laguna": ModelType("LagunaForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, _Heads(), PartialLocalRope(500000.0, windows=ListedWindows(512), stated=_ROPE)),
        modules={
            "layers.*.attention.gate": "model.layers.*.self_attn.g_proj",
            "layers.*.mlp.router.bias": f"{_MLP}.experts.e_score_correction_bias",
            "layers.*.mlp.shared_gate": None,
        },
        # What transformers calls them in memory.
        renamed={".mlp.gate.e_score": ".mlp.experts.e_score", ".mlp.shared_experts.": ".mlp.shared_expert."},
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128},
        activations=same("silu"),
        without_effect=("router_aux_loss_coef",),
    ),
)
