"""ERNIE 4.5's mixtures of text (Baidu, 2025): Mixtral's layers, with shared experts and a bias that selects.

The first layers have a plain MLP. The weights are those of Mixtral (megapar_models.families.mixtral).

At Hugging Face: ernie4_5_moe. Layers of multi-token prediction are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.families.deepseek import DeepseekExperts, with_experts
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, read_moe
from megapar_models.rotary_fields import Rope
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


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, self.names, self.defaults)
        shared, first = raw.get("moe_num_shared_experts", 2), raw.get("moe_layer_start_index", 1)
        if not isinstance(shared, int) or not isinstance(first, int):
            text = f"moe_num_shared_experts={shared!r}, moe_layer_start_index={first!r} should be two whole numbers"
            return {}, [*problems, text]
        moe |= {"shared_expert_intermediate_size": shared * moe.get("moe_intermediate_size", 0), "norm_topk_prob": True}
        return {"moe": DeepseekExperts(first_k_dense_replace=first, balance="bias", **moe)}, problems

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        last = raw["num_hidden_layers"] - 1
        if raw.get("moe_layer_end_index", -1) not in (-1, last):
            yield f"moe_layer_end_index={raw['moe_layer_end_index']} is not supported; the last layer is, {last}"

    def write(self, model: ErnieMoeModel, fields: dict[str, Any]) -> None:
        moe = model.moe
        always = {"scoring_func": "softmax", "norm_topk_prob": True, "shared_expert_gate": False}
        always |= {"routed_scaling_factor": 1.0, "n_group": 1}
        for name, value in always.items():
            if getattr(moe, name) != value:
                raise ConfigError(f"model.moe.{name}={getattr(moe, name)}: ernie4_5_moe of transformers has {value}")
        if not moe.has_selection_bias:
            raise ConfigError(f"model.moe.balance={moe.balance}: ernie4_5_moe of transformers has bias")
        if moe.shared_expert_intermediate_size % moe.moe_intermediate_size:
            raise ConfigError(
                "model.moe.shared_expert_intermediate_size: shared experts of ernie4_5_moe are together as wide as a "
                "multiple of model.moe.moe_intermediate_size"
            )
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}


class _Layers(Codec):
    """Which layers have experts."""

    def write(self, model: ErnieMoeModel, fields: dict[str, Any]) -> None:
        moe = model.moe
        shared = moe.shared_expert_intermediate_size // moe.moe_intermediate_size
        fields |= {"moe_num_shared_experts": shared, "moe_layer_start_index": moe.first_k_dense_replace}
        fields |= {"use_bias": False, "moe_layer_end_index": model.num_hidden_layers - 1, "moe_layer_interval": 1}


def _pairs(model: ErnieMoeModel) -> dict[str, Pairs]:
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.head_dim))


_BIAS = "model.layers.*.mlp.moe_statics.e_score_correction_bias"
_SHARED = "model.layers.*.mlp.shared_experts"
_NAMES = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok", **same("moe_intermediate_size")}

ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    stage=ErnieMoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=ErnieMoeModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "ernie4_5_moe": ModelType(
                "Ernie4_5_MoeForCausalLM",
                # With biases its shared experts would have some, and its experts none.
                fixed={"use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12, "attention_dropout": 0.0},
            )
        },
        codecs=(
            _Experts(names=_NAMES, defaults={"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}),
            Rope(500000.0),
            _Layers(),
        ),
        modules={
            "layers.*.mlp.router.bias": _BIAS,
            **{f"layers.*.mlp.shared.{name}": f"{_SHARED}.{name}_proj" for name in ("gate", "up", "down")},
            "layers.*.mlp.shared_gate": None,
        },
        layouts={_BIAS: Packing(by_group=True)},  # [1, experts]
        in_fp32=("layers.*.mlp.router.weight",),
        renamed={".mlp.gate.moe_statics.": ".mlp.moe_statics."},  # as transformers 5 calls it in memory
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        pairs=_pairs,
        ignored=lambda raw: ("model.mtp_",),
        # Of the published files: the layer of prediction, and what other programs do with experts.
        without_effect=(
            *("router_aux_loss_coef", "num_nextn_predict_layers", "moe_capacity", "moe_gate", "moe_use_aux_free"),
        ),
    ),
)
