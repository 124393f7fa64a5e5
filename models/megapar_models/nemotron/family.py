"""The dense Nemotrons: their rules, and their names at Hugging Face (nemotron)."""

from collections.abc import Iterator
from typing import Any

from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.llama.family import MODULES_BUT_MLP, PLAIN_MLP_MODULES, SAME_FIELDS, TIED
from megapar_models.nemotron.model import NemotronModel, NemotronStage
from megapar_models.partial_rotary import partial_problems, read_partial_rope, write_partial_rope
from megapar_models.rope import factor_warnings

# Hugging Face

_FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias", "mlp_bias") if name != "rms_norm_eps"}
_FIELDS |= {"norm_eps": "rms_norm_eps"}
_DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.0134}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_partial_rope(raw, 10000.0, 0.5)


def _judge(raw: Raw, _: str) -> Iterator[str]:
    # Minitron's files have the width of a head under NeMo's name, which no version of transformers reads.
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if raw.get("kv_channels", width) != width:
        yield f"kv_channels={raw['kv_channels']} is not supported unless it is the width of a head, {width}"


def _write(model: NemotronModel, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "nemotron", "architectures": ["NemotronForCausalLM"], **fields, **write_partial_rope(model)}


NEMOTRON = Family(
    name="nemotron",
    stage=NemotronStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=NemotronModel,
    even_head_dim=True,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"nemotron": ModelType(_DEFAULTS, {"attention_dropout": 0.0})},
        modules=MODULES_BUT_MLP | PLAIN_MLP_MODULES,
        fields=_FIELDS,
        activations={name: name for name in ("relu2", "silu", "gelu_pytorch_tanh")},
        tied=TIED,
        read=_read,
        judge=_judge,
        write=_write,
        warnings=factor_warnings,
    ),
)
