"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), and by options Mistral, Qwen2 and Qwen3: RMSNorm before
each block, rotary positions, SwiGLU, grouped-query attention, optional q/k/v bias and q/k norm, tied or untied
embeddings."""

import math

import torch
from megapar_kernels.activations import swiglu
from megapar_kernels.norms import rms_norm
from torch import Tensor, nn

from megapar.batch import MicroBatch
from megapar.config import ModelConfig
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear, norm_weight
from megapar_models.attention import Attention
from megapar_models.stage import Blueprint, Pass, Stage


def rope_tables(model: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [s, d], fp32, of each position's angles, repeated over both halves of a head (arXiv 2104.09864).

    `rope_scaling` stretches wavelengths as Hugging Face's rope types `linear` and `llama3` do.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim
    frequency = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling.rope_type == "linear":
        frequency = frequency / scaling.factor
    elif scaling.rope_type == "llama3":
        turns_in_context = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        width = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns_in_context - scaling.low_freq_factor) / width).clamp(0, 1)
        frequency = kept * frequency + (1 - kept) * frequency / scaling.factor
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    """Over the hidden dimension, with weight."""

    def __init__(self, name: str, blueprint: Blueprint):
        super().__init__()
        self.eps = blueprint.model.rms_norm_eps
        self.weight = norm_weight(f"{name}.weight", blueprint.model.hidden_size, blueprint.sharding)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LlamaMLP(nn.Module):
    """down(silu(gate x) * up x), gate and up fused and cut by columns, down by rows."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        model, sharding, name = blueprint.model, blueprint.sharding, f"layers.{number}.mlp"
        width = model.intermediate_size
        columns = [Columns.even(f"{name}.gate", width, sharding.tp), Columns.even(f"{name}.up", width, sharding.tp)]
        self.gate_up = ColumnParallelLinear(model.hidden_size, columns, sharding, init=blueprint.init, bias=False)
        self.down = RowParallelLinear(
            f"{name}.down", width, model.hidden_size, sharding, init=blueprint.output_init, bias=False
        )

    def forward(self, x_sbh: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_sbh)))


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = RMSNorm(f"{name}.attention_norm", blueprint)
        self.attention = Attention(number, blueprint, qkv_bias=blueprint.model.attention_bias, out_bias=False)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", blueprint)
        self.mlp = LlamaMLP(number, blueprint)

    def forward(self, x_sbh: Tensor, info: Pass) -> Tensor:
        x_sbh = x_sbh + self.attention(self.attention_norm(x_sbh), info)
        return x_sbh + self.mlp(self.mlp_norm(x_sbh))


class LlamaStage(Stage):
    """A run of Llama layers, which share one pass's rotary tables."""

    def make_layer(self, number: int) -> nn.Module:
        return LlamaLayer(number, self.blueprint)

    def make_norm(self, name: str) -> nn.Module:
        return RMSNorm(name, self.blueprint)

    def make_pass(self, batch: MicroBatch) -> Pass:
        rope = rope_tables(self.blueprint.model, batch.seq_length, batch.tokens_bs.device)
        return Pass(batch.sample_ids_b, rope)
