"""GLM-4.5 (arXiv 2508.06471): Llama's attention, rotated in part, with DeepSeek-V3's experts behind the first layers.

Its weights are those of Llama and of Mixtral (megapar_models.families.llama, megapar_models.families.mixtral).

The family of GLM-4.5, and its names at Hugging Face (glm4_moe). Layers of prediction are left out.

It also reads dots1 (dots.llm1, arXiv 2506.05767) and solar_open (Solar Open 100B): the same model, all of each head
rotated. They are written as glm4_moe.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.deepseek import (
    DEFAULTS,
    EXPERT_MODULES,
    FIXED,
    SIGMOID,
    STACKED,
    DeepseekExperts,
    prediction_layers,
    read_experts,
    with_experts,
    write_experts,
)
from megapar_models.families.llama import MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings
from megapar_models.partial_rotary import read_partial_rope
from megapar_models.rope import scaling_problems, write_rope
from megapar_models.rotary import Rotary


@dataclass(frozen=True)
class Glm4MoeModel(MixtralModel):
    """The options of GLM-4.5."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding."""
    partial_rotary_factor: float = field(default=0.5, metadata=OF_FUNCTION)
    """The share of a head's dimensions, its first ones, that is rotated."""


class Glm4MoeStage(MixtralStage[Glm4MoeModel]):
    """Consecutive layers of GLM-4.5."""

    @classmethod
    def layer_kind(cls, model: Glm4MoeModel, number: int) -> LayerKind:
        width = int(model.head_dim * model.partial_rotary_factor)
        kind = replace(
            super().layer_kind(model, number),
            rotary=Rotary(model.rope_theta, width, model.rope_scaling),
            qkv_bias=model.attention_bias,
            qk_norm=model.qk_norm,
        )
        return with_experts(kind, model.moe, number)


_DEFAULTS = DEFAULTS | {"rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False, "head_dim": None}
_DEFAULTS |= {"num_key_value_heads": 8}
_MODEL_TYPES = {
    "glm4_moe": ModelType(_DEFAULTS, FIXED | SIGMOID),
    "dots1": ModelType(
        _DEFAULTS | {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "use_qk_norm": True},
        FIXED | {"topk_method": "noaux_tc", "attention_bias": False, "use_qk_norm": True},
    ),
    "solar_open": ModelType(
        _DEFAULTS | {"head_dim": 128, "intermediate_size": None},  # no layer is without experts
        FIXED | SIGMOID | {"use_qk_norm": False, "first_k_dense_replace": 0},
    ),
}
_MOE: dict[str, Any] = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
_MOE |= {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_NORMED = {"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
# transformers' defaults of fields beyond `fields`, by model_type: of the model, and of its experts.
_BEYOND: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4_moe": (_NORMED, _MOE),
    # Its file must have its sizes of experts.
    "dots1": (
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": None},
        {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    ),
    "solar_open": (_NORMED | {"first_k_dense_replace": 0}, _MOE | {"moe_intermediate_size": 1280}),
}
# transformers' defaults of the share of rotated dimensions, and of the base.
_SHARES = {"glm4_moe": 0.5, "dots1": 1.0, "solar_open": 1.0}
_THETAS = {"glm4_moe": 10000.0, "dots1": 10000.0, "solar_open": 1000000.0}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    values, problems = read_partial_rope(raw, _THETAS[model_type], _SHARES[model_type])
    if model_type != "glm4_moe" and values.get("partial_rotary_factor") != 1.0:
        problems = [*problems, f"partial_rotary_factor is not supported in {model_type}; its model reads it nowhere"]
    defaults, moe_defaults = _BEYOND[model_type]
    experts, wrong = read_experts(raw, defaults, moe_defaults, sigmoid=True)
    return {**values, "moe": DeepseekExperts(**experts)}, [*problems, *wrong]


def _judge(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield what dots1 does not compute: layers with a window, which its files have not, and other scores."""
    if model_type != "dots1":
        return
    # The published files give the scores the name of DeepSeek's method.
    if raw.get("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):
        yield f"scoring_func={raw['scoring_func']!r} is not supported; 'sigmoid' and 'noaux_tc' are"
    stated = raw.get("max_window_layers")
    first = 62 if stated is None else stated
    types = raw.get("layer_types") or ["sliding_attention"] * (raw["num_hidden_layers"] > first)
    if raw.get("sliding_window", 4096) is not None and "sliding_attention" in types:
        yield "sliding_window, layer_types, max_window_layers: windows of dots1 are not supported; full_attention is"


def _write(model: Glm4MoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if glm4_moe does not represent it."""
    if model.moe.scoring_func != "sigmoid" or not model.moe.has_selection_bias:
        raise ConfigError(
            "model.moe.scoring_func, model.moe.balance: glm4_moe of transformers has sigmoid scores and a bias that "
            "selects experts"
        )
    fields |= write_experts(model, "glm4_moe") | write_rope(model)
    fields |= {"partial_rotary_factor": model.partial_rotary_factor, "num_nextn_predict_layers": 0}
    return {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], **fields}


def _problems(config: Config, model: Glm4MoeModel) -> Iterator[str]:
    yield from scaling_problems(config, model)
    width = int(model.head_dim * model.partial_rotary_factor)
    if width % 2 or not 0 < width <= model.head_dim:
        text = f"{width} dimensions of a head of {model.head_dim} cannot be rotated; use 0.5 or 1.0"
        yield problem(config, "model.partial_rotary_factor", text)


GLM4_MOE = Family(
    name="glm4_moe",
    stage=Glm4MoeStage,
    activations=("silu",),
    options=Glm4MoeModel,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES | EXPERT_MODULES,
        stacked=STACKED,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias")} | {"use_qk_norm": "qk_norm"},
        activations={"silu": "silu"},
        tied=TIED,
        ignored=prediction_layers,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=mixture_warnings,
    ),
)
