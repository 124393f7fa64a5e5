"""Granite 3: its options, and its names at Hugging Face (granite)."""

from collections.abc import Iterator
from typing import Any

from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.granite.model import DenseGraniteModel, DenseGraniteStage, GraniteModel
from megapar_models.llama.family import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias", *MULTIPLIERS)}
DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "head_dim": None, "attention_bias": False}
DEFAULTS |= dict.fromkeys(MULTIPLIERS, 1.0)
FIXED = {"attention_dropout": 0.0}


def multiplier_problems(config: Config, model: GraniteModel) -> Iterator[str]:
    """Yield the problems of rotary options and of factors."""
    yield from scaling_problems(config, model)
    if model.logits_scaling <= 0:
        yield problem(config, "model.logits_scaling", "logits are divided by it; use a number above 0")


def judge_multipliers(raw: Raw, _: str) -> Iterator[str]:
    """Yield a problem for factors that our options give another meaning."""
    if raw.get("attention_multiplier", 1.0) == 0:
        yield "attention_multiplier=0 is not supported; a model with it would see no difference between keys"


def write_multipliers(model: GraniteModel) -> dict[str, Any]:
    """The fields of a config.json that derive from several options."""
    return {"attention_multiplier": model.attention_multiplier or model.head_dim**-0.5, **write_rope(model)}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_rope(raw, default_theta=10000.0)


def _write(model: DenseGraniteModel, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "granite", "architectures": ["GraniteForCausalLM"], **fields, **write_multipliers(model)}


GRANITE = Family(
    name="granite",
    stage=DenseGraniteStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=DenseGraniteModel,
    even_head_dim=True,
    problems=multiplier_problems,
    hugging_face=HuggingFace(
        model_types={"granite": ModelType({**DEFAULTS, "mlp_bias": False}, FIXED)},
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={**FIELDS, "mlp_bias": "mlp_bias"},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=judge_multipliers,
        write=_write,
        warnings=factor_warnings,
    ),
)
