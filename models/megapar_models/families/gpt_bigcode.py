"""StarCoder and SantaCoder (arXiv 2305.06161): GPT-2 with one key/value head.

At Hugging Face: gpt_bigcode.
"""

from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import GELUS, Always, Written
from megapar_models.families.gpt import GPT, WITHOUT_EFFECT, Dropout, GPTModel, GPTStage
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.tensor_layouts import Packing


class _KeyHeads(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        multi_query = raw.get("multi_query", True)
        problems = [] if isinstance(multi_query, bool) else [f"multi_query={multi_query!r} should be bool"]
        return {"num_key_value_heads": 1 if multi_query else raw.get("n_head")}, problems

    def write(self, model: GPTModel, fields: dict[str, Any]) -> None:
        if model.num_key_value_heads not in (1, model.num_attention_heads):
            text = "gpt_bigcode of Hugging Face has 1, or as many as heads"
            raise ConfigError(f"model.num_key_value_heads={model.num_key_value_heads}: {text}")
        fields |= {"multi_query": model.num_key_value_heads == 1}


_FIXED = {"scale_attn_weights": True, "add_cross_attention": False}

GPT_BIGCODE = Family(
    name="gpt_bigcode",
    stage=GPTStage,
    activations=("gelu_pytorch_tanh", "gelu", "relu", "relu2", "silu"),
    options=GPTModel,
    hugging_face=like(
        GPT,
        model_types={"gpt_bigcode": ModelType("GPTBigCodeForCausalLM", fixed=_FIXED)},
        codecs=(Always(), _KeyHeads(), Dropout(), Written(_FIXED)),
        # With one key/value head all rows are one group, else each head is one.
        layouts={"transformer.h.*.attn.c_attn": Packing("num_key_value_heads")},
        defaults={"activation_function": "gelu_pytorch_tanh"},
        activations=GELUS,
        without_effect=(
            *WITHOUT_EFFECT,
            # The order of operations in 16 bits, and sizes of old inference code.
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"),
            *("max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
            "validate_runner_input",
            "num_key_value_heads",  # transformers derives it from multi_query
        ),
    ),
)
