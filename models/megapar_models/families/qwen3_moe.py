"""Qwen3-MoE (arXiv 2505.09388): Mixtral's layers with norms of q and k, and some layers with a plain MLP.

Qwen2-MoE (arXiv 2407.10671) has biases in place of the norms, and a shared expert with a gate. The weights are those of
Mixtral (megapar_models.families.mixtral). The layers in model.moe.mlp_only_layers have those of Llama.

At Hugging Face: qwen3_moe and qwen2_moe.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem, shown
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable, refuse_windows
from megapar_models.reference import qwen3_moe_logits
from megapar_models.rope import read_rope, scaling_problems, write_rope


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


# Hugging Face

_MATRICES = ("gate", "up", "down")
_EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.*.gate": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.mlp.experts.*.up": "model.layers.*.mlp.experts.*.up_proj",
    "layers.*.mlp.experts.*.down": "model.layers.*.mlp.experts.*.down_proj",
    **{f"layers.*.mlp.shared.{name}": f"model.layers.*.mlp.shared_expert.{name}_proj" for name in _MATRICES},
    "layers.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate",
}
_STACKED = {
    "model.layers.*.mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "model.layers.*.mlp.experts.down_proj": ("down_proj",),
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 4, "head_dim": None}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_MODEL_TYPES = {
    "qwen3_moe": ModelType(_DEFAULTS, {**_FIXED, "attention_bias": False}),
    "qwen2_moe": ModelType({**_DEFAULTS, "num_key_value_heads": 16}, _FIXED),
}
_MOE = {
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",  # as transformers 5 writes it
    **{name: name for name in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")},
    "router_aux_loss_coef": "router_aux_loss_coef",
}
_MOE_DEFAULTS: dict[str, Any] = {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
_SHARED = "shared_expert_intermediate_size"
_MOE2_DEFAULTS: dict[str, Any] = {**_MOE_DEFAULTS, "num_experts_per_tok": 4, "num_experts": 60}
_MOE2_DEFAULTS |= {"moe_intermediate_size": 1408, _SHARED: 5632}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, norms, biases and experts from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    if model_type == "qwen2_moe":
        moe, wrong = read_moe(raw, _MOE | {_SHARED: _SHARED}, _MOE2_DEFAULTS)
        moe["shared_expert_gate"] = True
        values |= {"qk_norm": False, "attention_bias": raw.get("qkv_bias", True)}
    else:
        moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
        values["qk_norm"] = True
    dense, wrong_layers = _dense_layers(raw)
    values["moe"] = Qwen3MoeExperts(mlp_only_layers=dense, **moe)
    return values, [*problems, *wrong, *wrong_layers]


def _dense_layers(raw: Mapping[str, Any]) -> tuple[tuple[int, ...], list[str]]:
    """The layers without experts, and problems of the two fields about them.

    With decoder_sparse_step n every n-th layer has experts, except the layers in mlp_only_layers.
    """
    step = raw.get("decoder_sparse_step", 1)
    listed = raw.get("mlp_only_layers") or []
    layers = raw.get("num_hidden_layers")
    if not isinstance(step, int) or step < 1:
        return (), [f"decoder_sparse_step={step!r} should be a whole number from 1 on"]
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        return (), [f"mlp_only_layers={listed!r} should be a list of whole numbers"]
    if not isinstance(layers, int):
        return (), []  # it is reported elsewhere
    dense = [layer for layer in range(layers) if layer in listed or (layer + 1) % step]
    return tuple(dense), []


def _judge(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    yield from refuse_windows(raw, model_type)
    if {*(raw.get("layer_types") or ())} - {"full_attention"}:
        yield "layer_types with windows are not supported; full_attention is"


def _write(model: Qwen3MoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if neither model_type represents it."""
    moe = model.moe
    if model.qk_norm or not moe.shared_expert_intermediate_size:
        because = [] if model.qk_norm else ["model.qk_norm=false: qwen3_moe of transformers has norms of q and k"]
        if model.attention_bias:
            because.append("model.attention_bias=true: qwen3_moe of transformers has no biases")
        refuse_unwritable(model, "qwen3_moe", {}, because)
        fields |= {"attention_bias": False}
        names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    else:
        shared = {_SHARED: moe.shared_expert_intermediate_size}
        because = []
        if not moe.shared_expert_gate:
            because = ["model.moe.shared_expert_gate: qwen2_moe of transformers has a shared expert with a gate"]
        if model.num_attention_heads * model.head_dim != model.hidden_size:
            because.append("model.head_dim: heads of qwen2_moe of transformers are together as wide as the model")
        refuse_unwritable(model, "qwen2_moe", shared, because)
        fields |= {"qkv_bias": model.attention_bias, **shared}
        names = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    fields |= {theirs: getattr(moe, ours) for theirs, ours in _MOE.items() if theirs != "num_local_experts"}
    fields |= {"mlp_only_layers": list(moe.mlp_only_layers), "decoder_sparse_step": 1, **write_rope(model)}
    fields |= {"use_sliding_window": False}
    return {**names, **fields}


def _problems(config: Config, model: Qwen3MoeModel) -> Iterator[str]:
    yield from scaling_problems(config, model)
    layers = model.num_hidden_layers
    kept = tuple(layer for layer in model.moe.mlp_only_layers if layer < layers)
    if kept != model.moe.mlp_only_layers:
        text = f"layers are numbered from 0 to {layers - 1}; use {shown(kept)}"
        yield problem(config, "model.moe.mlp_only_layers model.num_hidden_layers", text)


QWEN3_MOE = Family(
    name="qwen3_moe",
    stage=Qwen3MoeStage,
    reference=qwen3_moe_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Qwen3MoeModel,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES | _EXPERTS,
        stacked=_STACKED,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=mixture_warnings,
        without_effect=("max_window_layers",),  # read by no version of its model
    ),
)
