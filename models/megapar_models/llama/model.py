"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), with options also Mistral, Qwen2 and Qwen3.

The model has RMSNorm before attention and before the MLP, rotary positions, SwiGLU, and grouped-query attention.
Options add biases to q, k and v, norms of q and k, and tied embeddings.

These are the weights of the whole model. Each matrix is [out, in]. tp cuts it by its output dimension in a
ColumnParallelLinear and by its input dimension in a RowParallelLinear. Sizes are h hidden, i intermediate,
v vocabulary, and d the width of a head:

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

Read LlamaStage.forward first: it is the model from tokens to the loss.
"""

import math

import torch
from megapar_kernels.activations import geglu, reglu_squared, swiglu
from megapar_kernels.norms import add_rms_norm, rms_norm
from torch import Tensor, nn

from megapar.batch import MicroBatch
from megapar.config.options import ModelConfig, RopeScaling
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear, norm_weight
from megapar_models.attention import Attention
from megapar_models.stage import Blueprint, ForwardContext, Stage


def rope_tables(model: ModelConfig, positions_s: Tensor) -> tuple[Tensor, Tensor]:
    """The tables cos and sin [s, d], fp32, of the angles of `positions_s` (arXiv 2104.09864).

    A head has d/2 angles, so the columns from d/2 on repeat the columns 0 to d/2.
    """
    frequency, attention_factor = rope_frequency(model, positions_s.device)
    angles = positions_s.to(torch.float32)[:, None] * frequency
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_frequency(model: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions [d/2], fp32, and the factor of cos and sin.

    `rope_scaling` changes them as Hugging Face's rope types `linear`, `llama3` and `yarn` do. The factor is 1 for all
    types but yarn.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim
    radians = model.rope_theta**exponents  # one over the frequency
    frequency = 1.0 / radians
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return frequency, 1.0
    if scaling.rope_type == "linear":
        return frequency / scaling.factor, 1.0
    if scaling.rope_type == "yarn":
        keep_weight = yarn_keep_weight(model, device)
        stretched = 1.0 / (scaling.factor * radians)
        return stretched * (1 - keep_weight) + frequency * keep_weight, yarn_attention_factor(scaling)
    # llama3. Dimensions that turn at least high_freq_factor times within the original context keep their frequency.
    # The frequency of those that turn at most low_freq_factor times is divided by the factor. Between the two, both
    # frequencies are mixed.
    turns_in_context = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    mixed_turns = scaling.high_freq_factor - scaling.low_freq_factor
    keep_weight = ((turns_in_context - scaling.low_freq_factor) / mixed_turns).clamp(0, 1)
    return keep_weight * frequency + (1 - keep_weight) * frequency / scaling.factor, 1.0


def yarn_keep_weight(model: ModelConfig, device: torch.device) -> Tensor:
    """The weight [d/2], fp32, of the unchanged frequency in YaRN's mixture (arXiv 2309.00071, section 3.2).

    It is 1 for pairs of dimensions that turn more than beta_fast times within the original context, and 0 for those
    that turn less than beta_slow times. Between the two it falls linearly with the number of the pair.
    """
    scaling = model.rope_scaling

    def pair_that_turns(times: float) -> float:
        """The number of the pair, which may lie between two, that turns so often within the original context."""
        radians = scaling.original_max_position_embeddings / (2 * math.pi * times)
        return model.head_dim * math.log(radians) / (2 * math.log(model.rope_theta))

    first = pair_that_turns(scaling.beta_fast)
    last = pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    # The bound of `last` is a number of dimensions, not of pairs. transformers computes it so, and so did the paper's
    # authors.
    first = max(first, 0)
    last = min(last, model.head_dim - 1)
    if first == last:
        last += 0.001  # as transformers: there is nothing to mix, and no division by 0
    pairs = torch.arange(model.head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """The factor of cos and sin, whose square scales the attention scores (arXiv 2309.00071, section 3.4)."""
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_mscale(scaling.factor, scaling.mscale) / _yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return _yarn_mscale(scaling.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


# The gated activation of each `hidden_act`: SwiGLU and GeGLU (Shazeer, arXiv 2002.05202), and gated squared ReLU (So et
# al., arXiv 2109.08668). The names are Hugging Face's, except "auto": the activation of Llama.
GATED = {"auto": swiglu, "silu": swiglu, "gelu_pytorch_tanh": geglu, "relu2": reglu_squared}


class RMSNorm(nn.Module):
    """RMSNorm over the hidden dimension, with weight."""

    def __init__(self, name: str, blueprint: Blueprint):
        super().__init__()
        self.eps = blueprint.model.rms_norm_eps
        self.impl = blueprint.kernels.norm
        self.weight = norm_weight(f"{name}.weight", blueprint.model.hidden_size, blueprint.sharding)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        return add_rms_norm(x, residual, self.weight, self.eps, self.impl)


class LlamaMLP(nn.Module):
    """down(act(gate x) * up x), with gate and up [width, h] in one matrix.

    tp cuts gate and up by their output dimension, and down by its input dimension. `name` is that of the weights, such
    as layers.3.mlp.
    """

    def __init__(self, name: str, width: int, blueprint: Blueprint):
        super().__init__()
        model = blueprint.model
        sharding = blueprint.sharding
        self.activation = GATED[model.hidden_act]
        self.impl = blueprint.kernels.activation
        columns = [Columns.even(f"{name}.gate", width, sharding.tp), Columns.even(f"{name}.up", width, sharding.tp)]
        self.gate_up = ColumnParallelLinear(
            model.hidden_size, columns, sharding, init=blueprint.init, bias=False, products=blueprint.products
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            width,
            model.hidden_size,
            sharding,
            init=blueprint.output_init,
            bias=False,
            products=blueprint.products,
        )

    def forward(self, x_sbh: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x_sbh), self.impl))


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = RMSNorm(f"{name}.attention_norm", blueprint)
        self.attention = Attention(number, blueprint, qkv_bias=blueprint.model.attention_bias, out_bias=False)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", blueprint)
        self.mlp = LlamaMLP(f"{name}.mlp", blueprint.model.intermediate_size, blueprint)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        # One kernel adds the attention's output to the residual stream and normalizes the sum. The output has no name
        # here, so that its memory is free during the MLP.
        normed_sbh, residual_sbh = self.mlp_norm.add_and_norm(
            self.attention(self.attention_norm(x_sbh), context), residual=x_sbh
        )
        return residual_sbh + self.mlp(normed_sbh)


class LlamaStage(Stage):
    """Consecutive Llama layers. The layers of a stage share the rotary tables of a forward pass."""

    def make_layer(self, number: int) -> nn.Module:
        return LlamaLayer(number, self.blueprint)

    def make_norm(self, name: str) -> nn.Module:
        return RMSNorm(name, self.blueprint)

    def hidden_states(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        if x_sbh is None:  # the first stage
            x_sbh = self.embed(batch)
        # Positions are not reset at the start of a document. Rotary attention depends on distances alone, and a token
        # attends only to its own document, so the result is the same.
        rope = rope_tables(self.blueprint.model, batch.positions_s)
        return self.run_layers(x_sbh, ForwardContext(batch, rope))

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        x_sbh = self.hidden_states(x_sbh, batch)
        if not self.last:
            return x_sbh
        return self.loss(x_sbh, batch)  # norm, head and cross entropy
