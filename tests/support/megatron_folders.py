"""Megatron-LM's classic checkpoints of small models, written as it writes them, by loops over heads and ranks."""

import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from megapar_models.convert.megatron import FILE, TRACKER
from megapar_models.family import Megatron
from megapar_models.registry import FAMILIES
from torch import Tensor

from megapar.config.model_options import ModelConfig
from tests.support import tiny_models

LAYERS = 5


def model(family: Literal["gpt", "llama"], **changes: Any) -> ModelConfig:
    """Five layers, with what stands for "derived" filled in."""
    act = FAMILIES[family].activations[0]
    whole = {"num_hidden_layers": LAYERS, "num_key_value_heads": 4, "head_dim": 12, "hidden_act": act}
    return tiny_models.model(family, **whole | changes)


MODELS = {
    "gpt": model("gpt", tie_word_embeddings=True),
    "gpt, untied, relu2": model("gpt", hidden_act="relu2"),
    "llama": model("llama", num_key_value_heads=2),
    "llama, tied, biased": model(
        "llama", tie_word_embeddings=True, attention_bias=True, qk_norm=True, rope_theta=500.0, num_key_value_heads=1
    ),
}


class Backend(Enum):
    """What Megatron's settings hold besides plain values; its class lies in a module missing here."""

    AUTO = 5


# Megatron's names of (attention norm, fused q/k/v, output, MLP norm, first and last matrix of the MLP, last norm)
STYLES = {
    "legacy": (
        *("input_norm.", "self_attention.query_key_value.", "self_attention.dense.", "post_attention_norm."),
        *("mlp.dense_h_to_4h.", "mlp.dense_4h_to_h.", "final_norm."),
    ),
    "oldest": (
        *("input_layernorm.", "attention.query_key_value.", "attention.dense.", "post_attention_layernorm."),
        *("mlp.dense_h_to_4h.", "mlp.dense_4h_to_h.", "final_layernorm."),
    ),
    "core": (
        *("input_layernorm.", "self_attention.linear_qkv.", "self_attention.linear_proj.", "pre_mlp_layernorm."),
        *("mlp.linear_fc1.", "mlp.linear_fc2.", "final_layernorm."),
    ),
    "transformer engine": (
        *("self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.", "self_attention.linear_proj."),
        *("mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.", "final_layernorm."),
    ),
}


def megatron_arguments(model: ModelConfig) -> Megatron:
    arguments = FAMILIES[model.family].megatron
    assert arguments is not None
    return arguments


def fused_qkv(model: ModelConfig, tensors: dict[str, Tensor], attention: str, kind: str) -> Tensor:
    """For each key/value head its query heads, itself, its value head."""
    q, k, v = (tensors[f"{attention}.{letter}.{kind}"].split(model.head_dim) for letter in "qkv")
    rows: list[Tensor] = []
    for group in range(model.num_key_value_heads):
        rows += [q[head] for head in range(len(q)) if head * model.num_key_value_heads // len(q) == group]
        rows += [k[group], v[group]]
    return torch.cat(rows)


def layer_parts(
    model: ModelConfig, tensors: dict[str, Tensor], number: int, style: str, tp: int, rank: int
) -> dict[str, Tensor]:
    """One tensor rank's tensors of a layer, by Megatron's names within it."""
    norm, qkv, out, mlp_norm, fc1, fc2, _ = STYLES[style]
    ours, parts = f"layers.{number}", {}
    arguments = megatron_arguments(model)

    def shard(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(tp, dim)[rank].clone()

    for kind in ("weight", "bias"):
        if f"{ours}.attention_norm.{kind}" in tensors:
            parts[norm + kind] = tensors[f"{ours}.attention_norm.{kind}"]
            parts[mlp_norm + kind] = tensors[f"{ours}.mlp_norm.{kind}"]
        if f"{ours}.attention.q.{kind}" in tensors:
            parts[qkv + kind] = shard(fused_qkv(model, tensors, f"{ours}.attention", kind), 0)
    parts[out + "weight"] = shard(tensors[f"{ours}.attention.o.weight"], 1)
    parts[fc2 + "weight"] = shard(tensors[f"{ours}.mlp.down.weight"], 1)
    parts[fc1 + "weight"] = shard(tensors[f"{ours}.mlp.up.weight"], 0)
    if arguments.swiglu:
        parts[fc1 + "weight"] = torch.cat([shard(tensors[f"{ours}.mlp.gate.weight"], 0), parts[fc1 + "weight"]])
    if arguments.add_bias_linear:
        parts[out + "bias"] = tensors[f"{ours}.attention.o.bias"]
        parts[fc2 + "bias"] = tensors[f"{ours}.mlp.down.bias"]
        parts[fc1 + "bias"] = shard(tensors[f"{ours}.mlp.up.bias"], 0)
    if getattr(model, "qk_norm", False):
        parts["self_attention.q_layernorm.weight"] = tensors[f"{ours}.attention.q_norm.weight"]
        parts["self_attention.k_layernorm.weight"] = tensors[f"{ours}.attention.k_norm.weight"]
    return parts


def padded(rows: Tensor, tp: int) -> Tensor:
    """Vocabulary rows up to a multiple of 64 * tp; the padding is not zero, as training leaves it."""
    return torch.cat([rows, torch.full((-len(rows) % (64 * tp), rows.shape[1]), 7.0, dtype=rows.dtype)])


def stage_parts(
    model: ModelConfig, tensors: dict[str, Tensor], layers: list[int], style: str, tp: int, rank: int, ends: str
) -> dict[str, Any]:
    """One tensor rank's model chunk; `ends` has "first" and "last" if the chunk is there."""
    legacy = style in ("legacy", "oldest")
    block: dict[str, Any] = {}
    for local, number in enumerate(layers):
        for name, tensor in layer_parts(model, tensors, number, style, tp, rank).items():
            block[f"layers.{local}.{name}"] = tensor
        block[f"layers.{local}.self_attention.core_attention._extra_state"] = None
    embedding, outer = {}, {}
    if "first" in ends:
        embedding["word_embeddings"] = {"weight": padded(tensors["embedding.weight"], tp).chunk(tp)[rank].clone()}
        if "positions.weight" in tensors:
            embedding["position_embeddings"] = {"weight": tensors["positions.weight"]}
    if "last" in ends:
        for kind in ("weight", "bias"):
            if f"norm.{kind}" in tensors:
                block[STYLES[style][-1] + kind] = tensors[f"norm.{kind}"]
    head = None
    if "last" in ends and not (model.tie_word_embeddings and "first" in ends):
        whole = tensors["embedding.weight" if model.tie_word_embeddings else "head.weight"]
        head = {"weight": padded(whole, tp).chunk(tp)[rank].clone()}
    if not legacy:
        flat = {f"decoder.{name}": tensor for name, tensor in block.items()}
        flat |= {f"embedding.{name}.weight": tensor["weight"] for name, tensor in embedding.items()}
        return flat | ({"output_layer.weight": head["weight"]} if head else {})
    language: dict[str, Any] = {"encoder" if style == "legacy" else "transformer": block}
    language |= {"embedding": embedding} if embedding else {}
    if head and model.tie_word_embeddings:
        outer["word_embeddings_for_head"] = head
    elif head:
        language["output_layer"] = head
    return {"language_model": language, **outer}


def args_of(model: ModelConfig, tp: int, pp: int, **changes: Any) -> Namespace:
    arguments = megatron_arguments(model)
    values = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "group_query_attention": model.num_key_value_heads != model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": arguments.position_embedding_type,
        "rotary_base": int(getattr(model, "rope_theta", 10000.0)),
        "rotary_percent": 1.0,
        "normalization": arguments.normalization,
        "norm_epsilon": model.rms_norm_eps,
        "swiglu": arguments.swiglu,
        "squared_relu": model.hidden_act == "relu2",
        "bias_gelu_fusion": True,
        "add_bias_linear": arguments.add_bias_linear,
        "add_qkv_bias": getattr(model, "attention_bias", False),
        "qk_layernorm": getattr(model, "qk_norm", False),
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "vocab_size": model.vocab_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": torch.bfloat16,
        "attention_backend": Backend.AUTO,
        "num_experts": None,
    }
    return Namespace(**values | changes)


def partition(stages: int) -> list[list[int]]:
    """Layers of each stage, uneven."""
    return [part.tolist() for part in np.array_split(np.arange(LAYERS), stages)]


def megatron_folder(
    root: Path,
    model: ModelConfig,
    tensors: dict[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    style: str = "core",
    **changes: Any,
) -> Path:
    """Writes root/iter_0000012 and the tracker; `changes` are of the args."""
    sys.modules["megatron"] = module = ModuleType("megatron")  # while we pickle, as there is none to import
    module.Backend, Backend.__module__ = Backend, "megatron"  # type: ignore[attr-defined]
    layers = partition(pp * vpp)
    for stage in range(pp):
        for rank in range(tp):
            state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 12}
            state["args"] = args_of(model, tp, pp, **changes)
            for chunk in range(vpp):
                number = chunk * pp + stage
                ends = "first " * (number == 0) + "last" * (number == pp * vpp - 1)
                name = "model" if vpp == 1 else f"model{chunk}"
                state[name] = stage_parts(model, tensors, layers[number], style, tp, rank, ends)
            state["optimizer"] = {"fp32": [torch.randn(9)], "step": 12}
            state["rng_state"] = [{"np_rng_state": np.random.RandomState(1).get_state()}]
            folder = root / "iter_0000012" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            torch.save(state, folder / FILE)
    (root / TRACKER).write_text("12")
    del sys.modules["megatron"]
    return root
