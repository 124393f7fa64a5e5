"""The family of GLM-4.5: its options, and its names at Hugging Face (glm4_moe). Layers of prediction are left out."""

from collections.abc import Iterator, Mapping
from typing import Any

from megapar.config.messages import problem
from megapar.config.options import Config
from megapar.errors import ConfigError
from megapar_models.deepseek.family import (
    DEFAULTS,
    EXPERT_MODULES,
    FIXED,
    SIGMOID,
    STACKED,
    prediction_layers,
    read_experts,
    write_experts,
)
from megapar_models.deepseek.model import DeepseekExperts
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.glm4_moe.model import Glm4MoeModel, Glm4MoeStage
from megapar_models.llama.family import MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.moe_fields import mixture_warnings
from megapar_models.rope import read_rope, scaling_problems, write_rope

_DEFAULTS = DEFAULTS | {"rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False, "head_dim": None}
_DEFAULTS |= {"num_key_value_heads": 8}
_BEYOND = {"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
_MOE: dict[str, Any] = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
_MOE |= {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    # transformers 5 has the share of rotated dimensions among the fields of the rotary embedding.
    share = raw.get("partial_rotary_factor", 0.5)
    stated = {name: raw[name] for name in _ROPE if name in raw}
    for name in ("rope_parameters", "rope_scaling"):
        if stated.get(name):
            share = stated[name].get("partial_rotary_factor", share)
            kept = {key: value for key, value in stated[name].items() if key != "partial_rotary_factor"}
            stated[name] = kept
    values, problems = read_rope(stated, default_theta=10000.0)
    experts, wrong = read_experts(raw, _BEYOND, _MOE, sigmoid=True)
    values |= {"partial_rotary_factor": share, "moe": DeepseekExperts(**experts)}
    return values, [*problems, *wrong]


_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "original_max_position_embeddings")


def _write(model: Glm4MoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if glm4_moe does not represent it."""
    if model.moe.scoring_func != "sigmoid" or model.moe.balance != "bias":
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
        model_types={"glm4_moe": ModelType(_DEFAULTS, FIXED | SIGMOID)},
        modules=MODULES_BUT_MLP | MLP_MODULES | EXPERT_MODULES,
        stacked=STACKED,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias")} | {"use_qk_norm": "qk_norm"},
        activations={"silu": "silu"},
        tied=TIED,
        ignored=prediction_layers,
        read=_read,
        write=_write,
        warnings=mixture_warnings,
    ),
)
