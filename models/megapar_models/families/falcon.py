"""Falcon (arXiv 2311.16867): the block of GPT-NeoX, with few key/value heads.

Falcon 7B has one norm for both branches and one key/value head. 40B and 180B have a norm for each branch, and eight
key/value heads.

At Hugging Face: falcon.
"""

from collections.abc import Mapping
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import Dropouts, demand
from megapar_models.families.gpt_neox import GPT_NEOX, GPTNeoXModel, GPTNeoXStage
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.rotary_fields import Rope, partial_problems
from megapar_models.tensor_layouts import Packing


class _Branches(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        """Return heads, norms and biases, and problems."""
        defaults = {"new_decoder_architecture": False, "parallel_attn": True, "multi_query": True, "bias": False}
        flags = {name: raw.get(name, default) for name, default in defaults.items()}
        problems = [f"{name}={value!r} should be bool" for name, value in flags.items() if not isinstance(value, bool)]
        if raw.get("alibi", False) is not False:
            text = "is not supported; False is: transformers rounds its bias to bf16, so it is not that of ALiBi"
            problems.append(f"alibi={raw['alibi']!r} {text}")
        is_new, is_parallel = flags["new_decoder_architecture"], flags["parallel_attn"]
        norms = raw.get("num_ln_in_parallel_attn")
        if is_new and not is_parallel:
            text = "is not supported with new_decoder_architecture=True; transformers fails"
            problems.append(f"parallel_attn=False {text}")
        if norms not in ((1, 2, None) if is_new else (1, None)):
            problems.append(f"num_ln_in_parallel_attn={norms} is not supported with new_decoder_architecture={is_new}")
        residual = "one_norm" if is_parallel else "no"
        if is_new and norms != 1:
            residual = "two_norms"
        heads = raw.get("num_kv_heads") or raw.get("num_attention_heads")
        if not is_new:
            heads = 1 if flags["multi_query"] else raw.get("num_attention_heads")
        values = {"parallel_residual": residual, "num_key_value_heads": heads}
        return values | {"attention_bias": flags["bias"], "mlp_bias": flags["bias"]}, problems

    def write(self, model: GPTNeoXModel, fields: dict[str, Any]) -> None:
        always = {"head_bias": False, "qk_norm": False, "partial_rotary_factor": 1.0}
        demand(model, "falcon", mlp_bias=model.attention_bias, **always)
        two_norms = model.parallel_residual == "two_norms"
        is_new = model.num_key_value_heads not in (1, model.num_attention_heads) or two_norms
        if is_new and model.parallel_residual == "no":
            raise ConfigError(
                f"model.parallel_residual=no, model.num_key_value_heads={model.num_key_value_heads}: falcon of Hugging "
                "Face has such branches with 1 key/value head, or as many as heads"
            )
        fields |= {"bias": model.attention_bias, "new_decoder_architecture": is_new, "alibi": False}
        fields |= {"multi_query": model.num_key_value_heads == 1, "num_kv_heads": model.num_key_value_heads}
        fields |= {"parallel_attn": model.parallel_residual != "no"}
        fields |= {"num_ln_in_parallel_attn": (2 if two_norms else 1) if is_new else None}


_LAYER = "transformer.h.*"
MODULES: Mapping[str, str] = {
    "embedding": "transformer.word_embeddings",
    "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
    **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.self_attention.query_key_value"),
    "layers.*.attention.o": f"{_LAYER}.self_attention.dense",
    "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.*.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
    "layers.*.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
"""Names of modules in files of Falcon, and of BLOOM."""
_TWO_NORMS = {"layers.*.attention_norm": f"{_LAYER}.ln_attn", "layers.*.mlp_norm": f"{_LAYER}.ln_mlp"}

FALCON = Family(
    name="falcon",
    stage=GPTNeoXStage,
    activations=("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu"),
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=like(
        GPT_NEOX,
        model_types={"falcon": ModelType("FalconForCausalLM")},
        codecs=(_Branches(), Rope(), Dropouts(("attention_dropout", "hidden_dropout"))),
        modules=MODULES,
        modules_of=lambda model: _TWO_NORMS if model.parallel_residual == "two_norms" else {},
        renamed={},
        layouts={f"{_LAYER}.self_attention.query_key_value": Packing("num_key_value_heads")},
        fields={
            "activation": "hidden_act",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            **{"activation": "gelu", "ffn_hidden_size": None, "layer_norm_epsilon": 1e-5},
            **{"tie_word_embeddings": True, "max_position_embeddings": 2048},
        },
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        without_effect=("num_kv_heads", "rotary", "apply_residual_connection_post_layernorm"),
    ),
)
