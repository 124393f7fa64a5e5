"""Our tensors of Megatron-Core's, by loops over heads and halves: an independent judge of the recipes of conversion."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megapar_models.families.deepseek import DeepseekModel
from torch import Tensor


def expected_of(model: Any, theirs: Mapping[str, Tensor], state: str) -> dict[str, Tensor]:
    """Our tensors of a state, by loops over the heads and halves of Megatron's `theirs`."""
    found = {}
    for name, tensor in theirs.items():
        held, _, name = name.partition("/")
        if held != state:
            continue
        found |= dict(_ours(model, name.removeprefix("decoder."), tensor))
    return found


_RENAMED = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "embedding.position_embeddings.weight": "positions.weight",
    "output_layer.weight": "head.weight",
    "final_layernorm": "norm",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "self_attention.kv_layernorm": "attention.kv_a_norm",
    "self_attention.linear_proj": "attention.o",
    "self_attention.linear_q_proj": "attention.q",
    "self_attention.linear_q_down_proj": "attention.q_a",
    "self_attention.linear_q_up_proj": "attention.q_b",
    "self_attention.linear_kv_down_proj": "attention.kv_a",
    "self_attention.linear_kv_up_proj": "attention.kv_b",
    "mlp.experts.local_experts.": "mlp.experts.",
    "mlp.shared_experts.": "mlp.shared.",
    "linear_fc2": "down",
    "router.expert_bias": "router.bias",
}


def _ours(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, values) of one of Megatron's parameters on one rank."""
    for there, here in _RENAMED.items():
        name = name.replace(there, here)
    latent = isinstance(model, DeepseekModel)
    name = name.replace("self_attention.q_layernorm", "attention.q_a_norm" if latent else "attention.q_norm")
    name = name.replace("self_attention.k_layernorm", "attention.k_norm")
    if "linear_qkv" in name:
        rows: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        heads = list(tensor.split(model.head_dim))
        for _ in range(model.num_key_value_heads):
            for _ in range(model.num_attention_heads // model.num_key_value_heads):
                rows["q"].append(heads.pop(0))
            rows["k"].append(heads.pop(0))
            rows["v"].append(heads.pop(0))
        for letter in "qkv":
            yield name.replace("self_attention.linear_qkv", f"attention.{letter}"), torch.cat(rows[letter])
    elif "linear_fc1" in name and model.hidden_act == "silu":
        for letters, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("linear_fc1", letters), half
    else:
        name = name.replace("linear_fc1", "up")
        if name in ("embedding.weight", "head.weight"):
            tensor = tensor[: model.vocab_size]
        turned = {"attention.q_b": 1, "attention.q": 1, "attention.kv_a": 0}.get(".".join(name.split(".")[2:4]))
        if latent and turned is not None:
            tensor = _half_apart(model, tensor, bool(turned))
        yield name, tensor


def _half_apart(model: DeepseekModel, rows: Tensor, heads: bool) -> Tensor:
    """Rows with the two numbers of each rotary pair half a head apart, where Megatron has them beside each other."""
    rotated = model.head_dim
    unrotated = model.qk_nope_head_dim if heads else model.kv_lora_rank
    out = []
    for head in rows.split(unrotated + rotated):
        out += [head[:unrotated], head[unrotated::2], head[unrotated + 1 :: 2]]
    return torch.cat(out)
