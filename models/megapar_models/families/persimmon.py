"""Persimmon (Adept, 2023): Llama's layers with LayerNorm, an MLP without gate and its squared ReLU, and biases.

Each query and key head has a LayerNorm, with one weight for all heads, before half of it is rotated.

At Hugging Face: persimmon.
"""

from megapar_models.codecs import GELUS, Always, Dropouts
from megapar_models.families.gpt_neox import GPT_NEOX, GPTNeoXModel, GPTNeoXStage
from megapar_models.family import Family, ModelType, like
from megapar_models.rotary_fields import PartialRope
from megapar_models.tensor_layouts import Packing

_ALWAYS = {"parallel_residual": "no", "attention_bias": True, "mlp_bias": True, "head_bias": False}
_LAYER = "model.layers.*"

PERSIMMON = Family(
    name="persimmon",
    stage=GPTNeoXStage,
    activations=("relu2", "gelu_pytorch_tanh", "gelu", "relu", "silu"),
    options=GPTNeoXModel,
    hugging_face=like(
        GPT_NEOX,
        model_types={"persimmon": ModelType("PersimmonForCausalLM")},
        codecs=(
            Always(_ALWAYS, key_per_head=True),
            PartialRope(factor=0.5),
            Dropouts(("attention_dropout", "hidden_dropout")),
        ),
        modules={
            "embedding": "model.embed_tokens",
            "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.self_attn.query_key_value"),
            "layers.*.attention.o": f"{_LAYER}.self_attn.dense",
            "layers.*.attention.q_norm": f"{_LAYER}.self_attn.q_layernorm",
            "layers.*.attention.k_norm": f"{_LAYER}.self_attn.k_layernorm",
            "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
            "layers.*.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
            "layers.*.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
            "norm": "model.final_layernorm",
            "head": "lm_head",
        },
        renamed={},
        layouts={f"{_LAYER}.self_attn.query_key_value": Packing("num_attention_heads")},
        fields={"qk_layernorm": "qk_norm"},
        defaults={"hidden_act": "relu2", "qk_layernorm": True},
        activations=GELUS,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        base_prefix="model.",
        without_effect=("num_key_value_heads", "rms_norm_eps"),  # of the first files; its model never read them
    ),
)
