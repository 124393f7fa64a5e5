"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), with options also Mistral, Qwen2 and Qwen3.

The model has RMSNorm before attention and before the MLP, rotary positions, SwiGLU, and grouped-query attention.
Options add biases to q, k and v, norms of q and k, and tied embeddings.

These are the weights of the whole model. Each matrix is [out, in]. tp cuts it by its output dimension in a
ColumnParallelLinear and by its input dimension in a RowParallelLinear. Sizes are h hidden, i intermediate, v
vocabulary, and d the width of a head:

    embedding.weight                        [v, h]              cut by vocabulary
    layers.N.attention_norm.weight          [h]                 on every tp rank
    layers.N.attention.q.weight             [heads * d, h]      cut by output: each rank has its heads
    layers.N.attention.{k,v}.weight         [kv heads * d, h]   cut by output; several ranks may hold the same head
    layers.N.attention.o.weight             [h, heads * d]      cut by input
    layers.N.mlp_norm.weight                [h]                 on every tp rank
    layers.N.mlp.{gate,up}.weight           [i, h]              cut by output
    layers.N.mlp.down.weight                [h, i]              cut by input
    norm.weight                             [h]                 on every tp rank
    head.weight (unless tied)               [v, h]              cut by output, which is the vocabulary

The end of a tensor's name gives its dimensions: x_sbh is [s, b, h], with s the sequence (s/tp between layers under
sequence parallelism) and b the micro-batch.

What a layer is made of: `LlamaStage.layer_kind`. Read megapar_models.layer next: it is what a layer computes. Then
megapar_models.stage: the model from tokens to the loss.

It reads `model_type` llama, mistral, ministral, qwen2, qwen3 and seed_oss, as transformers 4 and 5 write them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from megapar.base.errors import ConfigError
from megapar.config.messages import shown
from megapar_models.family import Family, HuggingFace, Megatron, ModelType, dropout_warnings, refuse_uneven_heads
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.reference import llama_logits
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import FULL, SLIDING, WindowModel, read_windows, rotary_problems, window_of, write_windows


@dataclass(frozen=True)
class LlamaModel(WindowModel):
    """The options of Llama, and of Mistral, Qwen2, Qwen3 and Seed-OSS."""

    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2 sets it)."""
    attention_out_bias: bool = False
    """A bias on the output projection of attention."""
    mlp_bias: bool = False
    """Biases on the three matrices of the MLP."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding (Qwen3 sets it)."""


L = TypeVar("L", bound=LlamaModel, default=LlamaModel)


class LlamaStage(Stage[L]):
    """Consecutive Llama layers."""

    @classmethod
    def layer_kind(cls, model: L, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_out_bias,
            qk_norm=model.qk_norm,
            mlp_bias=model.mlp_bias,
        )


# Everything but the MLP. Families with the same attention and norms share it.
MODULES_BUT_MLP = {
    "embedding": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.k": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.v": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}
MLP_MODULES = {
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
}
PLAIN_MLP_MODULES = {ours: theirs for ours, theirs in MLP_MODULES.items() if not ours.endswith("gate")}
# Fields of config.json whose names are those of our options.
SAME_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
# Fields that transformers does not read for this model_type: with another value somebody expects something else.
_NO_BIAS = {**_FIXED, "attention_bias": False, "mlp_bias": False}
_MODEL_TYPES = {
    "llama": ModelType(
        {**_DEFAULTS, "num_key_value_heads": None, "head_dim": None},
        {**_FIXED, "is_llama_config": True, "rope_interleaved": False},  # in SmolLM2's files
    ),
    "mistral": ModelType({**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None}, _NO_BIAS),
    "ministral": ModelType({**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None}, _NO_BIAS),
    # Its q, k and v have biases, though its config.json has no field for them.
    "qwen2": ModelType(
        {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": None},
        {**_FIXED, "attention_bias": True, "mlp_bias": False, "use_mrope": False},
    ),
    "qwen3": ModelType({**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}, {**_FIXED, "mlp_bias": False}),
    # Its files have dropouts of 0.1 (see _warnings).
    "seed_oss": ModelType({**_DEFAULTS, "num_key_value_heads": 8, "head_dim": 128}, {"partial_rotary_factor": 1.0}),
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_CLASSES |= {"seed_oss": "SeedOss"}
_SEQUENCE_CLASSES = {
    name: f"{_CLASSES[name]}ForSequenceClassification" for name in ("llama", "mistral", "qwen2", "qwen3")
}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, biases, norms and windows from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    values["qk_norm"] = model_type == "qwen3"
    biased = model_type == "qwen2"
    if model_type in ("llama", "qwen3", "seed_oss"):
        biased = raw.get("attention_bias", model_type == "seed_oss")
    values["attention_bias"] = biased
    values["attention_out_bias"] = biased and model_type in ("llama", "qwen3")
    if model_type == "seed_oss":
        values["attention_out_bias"] = raw.get("attention_out_bias", False)
    values["mlp_bias"] = raw.get("mlp_bias", False)
    windows, wrong = _read_windows(raw, model_type)
    return values | windows, [*problems, *wrong]


def _read_windows(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """The windows as transformers fills absent fields."""
    layers = raw.get("num_hidden_layers")
    if model_type in ("llama", "seed_oss") or not isinstance(layers, int):
        return {}, []  # there are none, or the missing number is reported elsewhere
    window = raw.get("sliding_window", 4096)
    first = 0  # layer with the window
    if model_type in ("qwen2", "qwen3"):
        stated = raw.get("max_window_layers")
        first = 28 if stated is None else stated
        if not raw.get("use_sliding_window", False):
            window = None
    if window is None:
        first = layers
    types = [SLIDING if number >= first else FULL for number in range(layers)]
    if model_type != "mistral":
        types = raw.get("layer_types") or types
    return read_windows(raw, window, types)


def _written_type(model: LlamaModel) -> str:
    """The model_type of Hugging Face with these biases, norms and windows. Raises ConfigError if there is none."""
    biases = (model.attention_bias, model.attention_out_bias, model.mlp_bias)
    if model.qk_norm and model.attention_bias == model.attention_out_bias and not model.mlp_bias:
        return "qwen3"
    if not model.qk_norm:
        if biases == (True, False, False):
            return "qwen2"
        if not model.sliding_window:
            return "llama" if model.attention_bias == model.attention_out_bias else "seed_oss"
        if not any(biases):
            return "ministral" if model.layer_types else "mistral"
    names = ("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm", "sliding_window")
    options = ", ".join(f"model.{name}={shown(getattr(model, name))}" for name in names if getattr(model, name))
    raise ConfigError(f"{options}: no model_type of Hugging Face has all this and nothing else")


def _write(model: LlamaModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if no model_type represents it."""
    model_type = _written_type(model)
    if model_type == "llama":
        refuse_uneven_heads(model, "llama")
    fields |= write_rope(model)
    if model_type in ("llama", "seed_oss"):
        fields |= {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}
    if model_type == "seed_oss":
        fields |= {"attention_out_bias": model.attention_out_bias, "attention_dropout": 0.0, "residual_dropout": 0.0}
    if model_type == "qwen3":
        fields |= {"attention_bias": model.attention_bias}
    if model_type in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": model.sliding_window > 0}
    if model_type not in ("llama", "seed_oss"):
        fields |= write_windows(model)
    if model_type == "mistral":
        del fields["layer_types"]  # it has none: all its layers have the window
    return {"model_type": model_type, "architectures": [f"{_CLASSES[model_type]}ForCausalLM"], **fields}


def _warnings(raw: Mapping[str, Any]) -> list[str]:
    lines = [*factor_warnings(raw), *dropout_warnings(raw, "llama", "attention_dropout", "residual_dropout")]
    if raw.get("dual_chunk_attention_config"):
        # Of Qwen2.5 with a million tokens. Another program cuts long texts by it.
        lines.append("config.json: dual_chunk_attention_config is not read: as in transformers, chunks are not used")
    return lines


LLAMA = Family(
    name="llama",
    stage=LlamaStage,
    reference=llama_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=LlamaModel,
    even_head_dim=True,
    problems=rotary_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=_warnings,
        sequence_classes=_SEQUENCE_CLASSES,
        # Some of its model types have windows. The others do not read them. The last one is of the first Llama's files.
        without_effect=("sliding_window", "use_sliding_window", "max_window_layers", "max_sequence_length"),
    ),
    megatron=Megatron(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False),
)
