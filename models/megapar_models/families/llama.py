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

At Hugging Face: llama, mistral, ministral, qwen2, qwen3 and seed_oss, as transformers 4 and 5 write them. Files of
internlm3 (InternLM3) and iquestcoder (IQuest-Coder) are read too, and written as llama. Those of cwm (Meta's Code World
Model, arXiv 2510.02387) are written as ministral.
"""

from dataclasses import dataclass

from typing_extensions import TypeVar

from megapar_models.codecs import Dropouts, EvenHeads
from megapar_models.family import Family, HuggingFace, Megatron, ModelType, same
from megapar_models.layer_kind import LayerKind
from megapar_models.llama_fields import Biases, LlamaRope, LlamaWindows, llama_type
from megapar_models.norms import NormRule
from megapar_models.reference import llama_logits
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, window_of


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


_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
# Fields that transformers does not read for this model_type: with another value somebody expects something else.
_NO_BIAS = {**_FIXED, "attention_bias": False, "mlp_bias": False}
_LLAMA = {**_FIXED, "is_llama_config": True, "rope_interleaved": False}  # in SmolLM2's files
_QWEN2 = {**_FIXED, "attention_bias": True, "mlp_bias": False, "use_mrope": False}
_SEED_OSS = {"num_key_value_heads": 8, "head_dim": 128}
_CWM = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_LAYER = "model.layers.*"

LLAMA = Family(
    name="llama",
    stage=LlamaStage,
    reference=llama_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=LlamaModel,
    even_head_dim=True,
    hugging_face=HuggingFace(
        model_types={
            "llama": ModelType("LlamaForCausalLM", {}, _LLAMA, (EvenHeads(),), scores_sequences=True),
            "mistral": ModelType("MistralForCausalLM", {"num_key_value_heads": 8}, _NO_BIAS, scores_sequences=True),
            "ministral": ModelType("MinistralForCausalLM", {"num_key_value_heads": 8}, _NO_BIAS),
            "qwen2": ModelType("Qwen2ForCausalLM", {"num_key_value_heads": 32}, _QWEN2, scores_sequences=True),
            "qwen3": ModelType(
                "Qwen3ForCausalLM",
                {"num_key_value_heads": 32, "head_dim": 128},
                {**_FIXED, "mlp_bias": False},
                scores_sequences=True,
            ),
            "seed_oss": ModelType("SeedOssForCausalLM", _SEED_OSS, {"partial_rotary_factor": 1.0}),
            # transformers has Llama's class for both.
            "internlm3": ModelType(
                "LlamaForCausalLM", {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}, _FIXED
            ),
            "iquestcoder": ModelType(
                "LlamaForCausalLM",
                {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
                {**_FIXED, "clip_qkv": None, "use_sliding_window": False},
            ),
            "cwm": ModelType("CwmForCausalLM", _CWM, _NO_BIAS),
        },
        type_of=llama_type,
        codecs=(LlamaRope(), Dropouts(("attention_dropout", "residual_dropout")), Biases(), LlamaWindows()),
        fields=same(
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("intermediate_size", "vocab_size", "max_position_embeddings"),
            *("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
        ),
        defaults={
            **{"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6},
            **{"tie_word_embeddings": False, "initializer_range": 0.02},
        },
        activations={**same("silu"), "swish": "silu", **same("gelu_pytorch_tanh", "relu2")},
        # Some of its model types have windows. The others do not read them. The last one is of the first Llama's files.
        without_effect=("sliding_window", "use_sliding_window", "max_window_layers", "max_sequence_length"),
        modules={
            "embedding": "model.embed_tokens",
            "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
            **{f"layers.*.attention.{name}": f"{_LAYER}.self_attn.{name}_proj" for name in "qkvo"},
            **{f"layers.*.attention.{name}_norm": f"{_LAYER}.self_attn.{name}_norm" for name in "qk"},
            "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
            **{f"layers.*.mlp.{name}": f"{_LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")},
            "norm": "model.norm",
            "head": "lm_head",
        },
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    ),
    megatron=Megatron(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False),
)
