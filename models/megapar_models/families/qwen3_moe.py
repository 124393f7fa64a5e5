"""Qwen3-MoE (arXiv 2505.09388): Mixtral's layers with norms of q and k, and some layers with a plain MLP.

Qwen2-MoE (arXiv 2407.10671) has biases in place of the norms, and a shared expert with a gate. The weights are those of
Mixtral (megapar_models.families.mixtral). The layers in model.moe.mlp_only_layers have those of Llama.

At Hugging Face: qwen3_moe and qwen2_moe.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem, shown
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, read_moe, refuse_unwritable
from megapar_models.reference import qwen3_moe_logits
from megapar_models.rotary_fields import Rope
from megapar_models.windows import NoWindow


@dataclass(frozen=True)
class Qwen3MoeExperts(MoEConfig):
    """A mixture whose layers are not all of experts."""

    mlp_only_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, that have a plain MLP of width model.intermediate_size in place of experts, such
    as 0 1 2."""


@dataclass(frozen=True)
class Qwen3MoeModel(MixtralModel):
    """The options of Qwen3's mixtures."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding."""
    attention_bias: bool = False
    """Biases of the query, key and value projections (Qwen2-MoE)."""


class Qwen3MoeStage(MixtralStage[Qwen3MoeModel]):
    """Consecutive layers of Qwen3-MoE."""

    @classmethod
    def layer_kind(cls, model: Qwen3MoeModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), qk_norm=model.qk_norm, qkv_bias=model.attention_bias)
        if number in model.moe.mlp_only_layers:
            return replace(kind, mlp="dense", mixture=None)
        return kind


class _Experts(RoutedExperts):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        names, values = {**self.names, **self.aliases}, {"qk_norm": True}
        if model_type == "qwen2_moe":
            values = {"qk_norm": False, "attention_bias": raw.get("qkv_bias", True)}
        moe, problems = read_moe(raw, names, self.defaults)
        if model_type == "qwen2_moe":
            moe["shared_expert_gate"] = True
        dense, wrong = dense_layers(raw)
        return values | {"moe": Qwen3MoeExperts(mlp_only_layers=dense, **moe)}, [*problems, *wrong]

    def write(self, model: Qwen3MoeModel, fields: dict[str, Any]) -> None:
        moe = model.moe
        if fields["model_type"] == "qwen3_moe":
            because = [] if model.qk_norm else ["model.qk_norm=false: qwen3_moe of transformers has norms of q and k"]
            if model.attention_bias:
                because.append("model.attention_bias=true: qwen3_moe of transformers has no biases")
            refuse_unwritable(model, "qwen3_moe", {}, because)
            fields |= {"attention_bias": False}
        else:
            shared = {_SHARED: moe.shared_expert_intermediate_size}
            because = []
            if not moe.shared_expert_gate:
                because = ["model.moe.shared_expert_gate: qwen2_moe of transformers has a shared expert with a gate"]
            if model.num_attention_heads * model.head_dim != model.hidden_size:
                because.append("model.head_dim: heads of qwen2_moe of transformers are together as wide as the model")
            refuse_unwritable(model, "qwen2_moe", shared, because)
            fields |= {"qkv_bias": model.attention_bias, **shared}
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        fields |= {"mlp_only_layers": list(moe.mlp_only_layers), "decoder_sparse_step": 1}

    def problems(self, config: Config, model: Qwen3MoeModel) -> Iterator[str]:
        return numbering_problems(config, model)


def numbering_problems(config: Config, model: Any) -> Iterator[str]:
    """Yield a problem of model.moe.mlp_only_layers that are not there."""
    layers = model.num_hidden_layers
    kept = tuple(layer for layer in model.moe.mlp_only_layers if layer < layers)
    if kept != model.moe.mlp_only_layers:
        text = f"layers are numbered from 0 to {layers - 1}; use {shown(kept)}"
        yield problem(config, "model.moe.mlp_only_layers model.num_hidden_layers", text)


def dense_layers(raw: Raw) -> tuple[tuple[int, ...], list[str]]:
    """Return the layers without experts, and problems of the two fields about them.

    With decoder_sparse_step n every n-th layer has experts, except the layers in mlp_only_layers.
    """
    step = raw.get("decoder_sparse_step", 1)
    listed = raw.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1:
        return (), [f"decoder_sparse_step={step!r} should be a whole number from 1 on"]
    layers = range(raw["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step), []


class _NoWindow(NoWindow):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        yield from super().judge(raw, model_type)
        if {*(raw.get("layer_types") or ())} - {"full_attention"}:
            yield "layer_types with windows are not supported; full_attention is"


def _type_of(model: Qwen3MoeModel) -> str:
    return "qwen3_moe" if model.qk_norm or not model.moe.shared_expert_intermediate_size else "qwen2_moe"


_SHARED = "shared_expert_intermediate_size"
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_NAMES = same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")
_ALIASES = {"num_local_experts": "num_experts"}  # as transformers 5 writes it
_DEFAULTS = {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
_DEFAULTS2 = {**_DEFAULTS, "num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 1408, _SHARED: 5632}
_CODECS = (Rope(), _NoWindow(4096, "use_sliding_window"))
_MLP = "model.layers.*.mlp"
_MATRICES = ("gate", "up", "down")
STACKED: dict[str, tuple[str, ...]] = {f"{_MLP}.experts.gate_up_proj": ("gate_proj", "up_proj")}
STACKED |= {f"{_MLP}.experts.down_proj": ("down_proj",)}

QWEN3_MOE = Family(
    name="qwen3_moe",
    stage=Qwen3MoeStage,
    reference=qwen3_moe_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Qwen3MoeModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "qwen3_moe": ModelType(
                "Qwen3MoeForCausalLM",
                {},
                {**_FIXED, "attention_bias": False},
                (_Experts(names=_NAMES, aliases=_ALIASES, defaults=_DEFAULTS), *_CODECS),
            ),
            "qwen2_moe": ModelType(
                "Qwen2MoeForCausalLM",
                {"num_key_value_heads": 16},
                _FIXED,
                (_Experts(names=_NAMES, aliases={**_ALIASES, _SHARED: _SHARED}, defaults=_DEFAULTS2), *_CODECS),
            ),
        },
        type_of=_type_of,
        modules={
            "layers.*.mlp.router": f"{_MLP}.gate",
            **{f"layers.*.mlp.experts.*.{name}": f"{_MLP}.experts.*.{name}_proj" for name in _MATRICES},
            **{f"layers.*.mlp.shared.{name}": f"{_MLP}.shared_expert.{name}_proj" for name in _MATRICES},
            "layers.*.mlp.shared_gate": f"{_MLP}.shared_expert_gate",
        },
        stacked=STACKED,
        defaults={"num_key_value_heads": 4},
        without_effect=("max_window_layers",),  # read by no version of its model
    ),
)
