"""ERNIE 4.5's mixtures of text (Baidu, 2025): Mixtral's layers, with shared experts and a bias that selects.

The first layers have a plain MLP. The weights are those of Mixtral (megapar_models.families.mixtral).

At Hugging Face: ernie4_5_moe.

Layers of prediction are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.families.deepseek import EXPERT_MODULES, STACKED, DeepseekExperts, with_experts
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe
from megapar_models.rope import read_rope, scaling_problems, write_rope
from megapar_models.tensor_layouts import Packing, Pairs


@dataclass(frozen=True)
class ErnieMoeModel(MixtralModel):
    """The options of ERNIE 4.5's mixtures."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""


class ErnieMoeStage(MixtralStage[ErnieMoeModel]):
    """Consecutive layers of an ERNIE 4.5 mixture."""

    @classmethod
    def layer_kind(cls, model: ErnieMoeModel, number: int) -> LayerKind:
        return with_experts(super().layer_kind(model, number), model.moe, number)


# Hugging Face

_BIAS = "model.layers.*.mlp.moe_statics.e_score_correction_bias"
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": 4, "head_dim": None}
# Of the published files: the layer of prediction, and what other programs do with experts.
_WITHOUT_EFFECT = ("router_aux_loss_coef", "num_nextn_predict_layers", "moe_capacity", "moe_gate", "moe_use_aux_free")
# With biases its shared experts would have some, and its experts none.
_FIXED = {"use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12, "attention_dropout": 0.0}
_MOE = {
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
}
_MOE_DEFAULTS = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=500000.0)
    moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
    shared, first = raw.get("moe_num_shared_experts", 2), raw.get("moe_layer_start_index", 1)
    if not isinstance(shared, int) or not isinstance(first, int):
        text = f"moe_num_shared_experts={shared!r}, moe_layer_start_index={first!r} should be two whole numbers"
        return values, [*problems, *wrong, text]
    moe |= {"shared_expert_intermediate_size": shared * moe.get("moe_intermediate_size", 0), "norm_topk_prob": True}
    return values | {"moe": DeepseekExperts(first_k_dense_replace=first, balance="bias", **moe)}, [*problems, *wrong]


def _judge(raw: Raw, _: str) -> Iterator[str]:
    last = raw["num_hidden_layers"] - 1
    if raw.get("moe_layer_end_index", -1) not in (-1, last):
        yield f"moe_layer_end_index={raw['moe_layer_end_index']} is not supported; the last layer is, {last}"


def _write(model: ErnieMoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if ernie4_5_moe does not represent it."""
    moe = model.moe
    shared, rest = divmod(moe.shared_expert_intermediate_size, moe.moe_intermediate_size)
    always = {"scoring_func": "softmax", "norm_topk_prob": True, "shared_expert_gate": False}
    always |= {"routed_scaling_factor": 1.0, "n_group": 1}
    for name, value in always.items():
        if getattr(moe, name) != value:
            raise ConfigError(f"model.moe.{name}={getattr(moe, name)}: ernie4_5_moe of transformers has {value}")
    if not moe.has_selection_bias:
        raise ConfigError(f"model.moe.balance={moe.balance}: ernie4_5_moe of transformers has bias")
    if rest:
        raise ConfigError(
            "model.moe.shared_expert_intermediate_size: shared experts of ernie4_5_moe are together as wide as a "
            "multiple of model.moe.moe_intermediate_size"
        )
    fields |= {theirs: getattr(moe, ours) for theirs, ours in _MOE.items()} | write_rope(model)
    fields |= {"moe_num_shared_experts": shared, "moe_layer_start_index": moe.first_k_dense_replace, "use_bias": False}
    fields |= {"moe_layer_end_index": model.num_hidden_layers - 1, "moe_layer_interval": 1}
    return {"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], **fields}


def _prediction(_: Raw) -> tuple[str, ...]:
    return ("model.mtp_",)


def _pairs(model: ErnieMoeModel) -> dict[str, Pairs]:
    pairs = Pairs(model.head_dim, 0, model.head_dim)
    return {"layers.*.attention.q": pairs, "layers.*.attention.k": pairs}


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    stage=ErnieMoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=ErnieMoeModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"ernie4_5_moe": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | MLP_MODULES | EXPERT_MODULES | {"layers.*.mlp.router.bias": _BIAS},
        layouts={_BIAS: Packing(by_group=True)},  # [1, experts]
        stacked=STACKED,
        in_fp32=("layers.*.mlp.router.weight",),
        renamed={".mlp.gate.moe_statics.": ".mlp.moe_statics."},  # as transformers 5 calls it in memory
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        pairs=_pairs,
        ignored=_prediction,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=mixture_warnings,
        without_effect=_WITHOUT_EFFECT,
    ),
)
