"""Phi-1, 1.5 and 2 (Microsoft, 2023): the block of GPT-NeoX with one norm for attention and MLP, and biased logits.

At Hugging Face: phi.
"""

from megapar_models.codecs import GELUS, Always, Dropouts
from megapar_models.families.gpt_neox import GPTNeoXModel, GPTNeoXStage
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like
from megapar_models.rotary_fields import PartialRope

_ALWAYS = {"parallel_residual": "one_norm", "attention_bias": True, "mlp_bias": True, "head_bias": True}
_LAYER = "model.layers.*"

PHI = Family(
    name="phi",
    stage=GPTNeoXStage,
    activations=("gelu_pytorch_tanh", "gelu", "relu", "relu2", "silu"),
    options=GPTNeoXModel,
    hugging_face=like(
        LLAMA,
        model_types={"phi": ModelType("PhiForCausalLM")},
        codecs=(
            Always(_ALWAYS),
            PartialRope(factor=0.5),
            Dropouts(("attention_dropout", "resid_pdrop", "embd_pdrop")),  # the files of Phi-2 have 0.1
        ),
        modules={
            "layers.*.attention.o": f"{_LAYER}.self_attn.dense",
            "layers.*.attention.q_norm": f"{_LAYER}.self_attn.q_layernorm",
            "layers.*.attention.k_norm": f"{_LAYER}.self_attn.k_layernorm",
            "layers.*.mlp.gate": None,
            "layers.*.mlp.up": f"{_LAYER}.mlp.fc1",
            "layers.*.mlp.down": f"{_LAYER}.mlp.fc2",
            "norm": "model.final_layernorm",
        },
        fields={
            **{"head_dim": None, "rms_norm_eps": None, "layer_norm_eps": "rms_norm_eps"},
            **{"num_key_value_heads": "num_key_value_heads", "qk_layernorm": "qk_norm"},
        },
        defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
        activations=GELUS,
    ),
)
