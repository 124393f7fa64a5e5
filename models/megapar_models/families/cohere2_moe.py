"""The mixtures of Cohere (2026): parallel branches as in Command R7B, with experts chosen by their logits.

Layers with a window have rotary positions, and so may the first layers, which have an MLP in place of experts. Weights
are those of Mixtral (megapar_models.families.mixtral), without layers.N.mlp_norm.

At Hugging Face: cohere2_moe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megapar.config.model_options import OF_FUNCTION, MixtureModel
from megapar_models.families.cohere import COHERE, CohereModel, CohereStage, neighbors
from megapar_models.families.deepseek import DeepseekExperts, with_listed_layers
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope, write_rope
from megapar_models.stage import Stage
from megapar_models.windows import Windows, full_every, is_full


@dataclass(frozen=True)
class Cohere2Experts(DeepseekExperts):
    """The mixture of Cohere's models."""

    shared_expert_combination_strategy: Literal["average", "sum"] = field(default="average", metadata=OF_FUNCTION)
    """How the outputs of the experts of a token and of the shared expert become one."""


@dataclass(frozen=True)
class Cohere2MoeModel(MixtureModel, CohereModel):
    """The options of Cohere's mixtures. Layers without a window see no positions."""

    moe: Cohere2Experts = field(default_factory=Cohere2Experts)
    """Mixture of experts."""
    norm: Literal["layer", "rms"] = field(default="layer", metadata=OF_FUNCTION)
    """LayerNorm without a bias, or RMSNorm."""
    prefix_dense_sliding_window_pattern: int = field(default=1, metadata=OF_FUNCTION)
    """1: the first layers, without experts, have rotary positions also if they have no window."""


class Cohere2MoeStage(Stage[Cohere2MoeModel]):
    """Consecutive layers of one of Cohere's mixtures."""

    @classmethod
    def layer_kind(cls, model: Cohere2MoeModel, number: int) -> LayerKind:
        moe = model.moe
        dense = number < moe.first_k_dense_replace
        sees_positions = not is_full(model, number) or (dense and model.prefix_dense_sliding_window_pattern == 1)
        kind = replace(
            CohereStage.layer_kind(model, number),
            rotary=Rotary.of(model) if sees_positions else None,
            qk_norm=False,
        )
        if model.norm == "rms":
            kind = replace(kind, norm=NormRule(model.rms_norm_eps))
        if dense:
            return kind
        return replace(
            kind,
            mlp="mixture",
            mixture=moe,
            router=replace(router_rule(moe), selects_by="logit"),
            router_dtype="model",
            averages_shared=moe.shared_expert_combination_strategy == "average",
        )

    @classmethod
    def ends_of(cls, model: Cohere2MoeModel) -> Ends:
        return CohereStage.ends_of(model)


class _Norms(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        eps = raw.get("rms_norm_eps")
        return {} if eps is None else {"rms_norm_eps": eps, "norm": "rms"}, []

    def write(self, model: Cohere2MoeModel, fields: dict[str, Any]) -> None:
        fields["rms_norm_eps"] = model.rms_norm_eps if model.norm == "rms" else None


class _Rope(Rope):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if raw.get("rope_scaling"):
            yield "rope_scaling is not supported in cohere2_moe; transformers reads rope_parameters alone"

    def write(self, model: Cohere2MoeModel, fields: dict[str, Any]) -> None:
        rope = write_rope(model)
        stated = {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
        fields |= {"rope_parameters": stated}


class _Windows(Windows):
    def types(self, raw: Raw) -> Sequence[str]:
        dense, layers = raw.get("first_k_dense_replace") or 0, raw["num_hidden_layers"]
        first, every = raw.get("prefix_dense_sliding_window_pattern", 1), raw.get(self.pattern, self.every)
        return raw.get("layer_types") or [*full_every(first, dense), *full_every(every, layers - dense)]


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, self.names, self.defaults)
        width, shared = raw.get("intermediate_size", 22528), raw.get("num_shared_experts", 0)
        if width is None or shared is None:
            return {}, ["intermediate_size, num_shared_experts: null is not supported; whole numbers are"]
        dense_width = raw.get("prefix_dense_intermediate_size")
        scoring = raw.get("expert_selection_fn", "softmax")
        moe |= {"moe_intermediate_size": width, "scoring_func": scoring}
        moe["shared_expert_intermediate_size"] = width * shared
        moe["first_k_dense_replace"] = raw.get("first_k_dense_replace") or 0
        # The softmax of the chosen experts' logits is that of all, divided by its sum over the chosen ones.
        moe["norm_topk_prob"] = raw.get("norm_topk_prob", True) or scoring == "softmax"
        moe["shared_expert_combination_strategy"] = raw.get("shared_expert_combination_strategy", "average")
        values = {"moe": Cohere2Experts(**moe), "intermediate_size": width if dense_width is None else dense_width}
        types = raw.get("mlp_layer_types")
        if scoring not in ("softmax", "sigmoid"):
            problems.append(f"expert_selection_fn={scoring!r} is not supported; softmax and sigmoid are")
        if moe["shared_expert_combination_strategy"] not in ("average", "sum"):
            stated = f"shared_expert_combination_strategy={moe['shared_expert_combination_strategy']!r}"
            problems.append(f"{stated} is not supported; average and sum are")
        if types is None:
            return values, problems
        listed, problems = with_listed_layers(values, types, raw["num_hidden_layers"], problems)
        return values | listed, problems

    def write(self, model: Cohere2MoeModel, fields: dict[str, Any]) -> None:
        moe, layers = model.moe, model.num_hidden_layers
        width, dense = moe.moe_intermediate_size, moe.first_k_dense_replace
        shared, rest = divmod(moe.shared_expert_intermediate_size, width)
        fixed: dict[str, Any] = {"scoring_func": moe.scoring_func, "shared_expert_gate": False}
        fixed |= {"shared_expert_intermediate_size": moe.shared_expert_intermediate_size}
        refuse_unwritable(model, fields["model_type"], fixed, self.refusals(model) if rest or model.qk_norm else ())
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        fields |= {"prefix_dense_intermediate_size": model.intermediate_size, "intermediate_size": width}
        fields |= {"num_shared_experts": shared, "expert_selection_fn": moe.scoring_func}
        fields |= {"norm_topk_prob": moe.norm_topk_prob}
        fields["shared_expert_combination_strategy"] = moe.shared_expert_combination_strategy
        fields["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
        fields["prefix_dense_sliding_window_pattern"] = model.prefix_dense_sliding_window_pattern

    def refusals(self, model: Cohere2MoeModel) -> Iterator[str]:
        yield (
            "model.qk_norm, model.moe.shared_expert_intermediate_size: cohere2_moe of transformers has no norms of q "
            "and k, and shared experts together as wide as a multiple of model.moe.moe_intermediate_size"
        )


_EXPERTS = _Experts(
    names=same("num_experts", "num_experts_per_tok"), defaults={"num_experts": 8, "num_experts_per_tok": 2}
)
_FIXED = {"attention_dropout": 0.0, "use_qk_norm": False, "partial_rotary_factor": 1.0, "use_parallel_block": True}
_MLP = "model.layers.*.mlp"
_OF_EXPERTS = QWEN3_MOE.hugging_face
assert _OF_EXPERTS is not None

COHERE2_MOE = Family(
    name="cohere2_moe",
    stage=Cohere2MoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Cohere2MoeModel,
    even_head_dim=True,
    hugging_face=like(
        COHERE,
        model_types={"cohere2_moe": ModelType("Cohere2MoeForCausalLM", fixed=_FIXED)},
        codecs=(
            *(_EXPERTS, _Norms(), _Rope()),
            _Windows(4096, every=4, pattern="sliding_window_pattern", keeps_unused=True, needed=True),
        ),
        modules={
            "layers.*.mlp.router": f"{_MLP}.gate",
            **{f"layers.*.mlp.experts.*.{name}": f"{_MLP}.experts.*.{name}_proj" for name in ("gate", "up", "down")},
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
        },
        stacked=_OF_EXPERTS.stacked,
        fields={"intermediate_size": None, **same("prefix_dense_sliding_window_pattern")},
        defaults={"head_dim": 128, "prefix_dense_sliding_window_pattern": 1},
        pairs=neighbors,
        without_effect=("router_aux_loss_coef",),
    ),
)
