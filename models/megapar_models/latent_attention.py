"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), split over tp by heads.

Keys and values are made of one short vector of each token, its latent. By option so are queries. Each head has some
dimensions without positions and some that are rotated. All heads share the rotated part of the key. Context parallelism
sees whole keys and values, as those of any other attention.

These are the weights of layer N. Sizes are h hidden, H heads, rq and rkv the latents of queries and of keys, and for
each head n dimensions without rotation, r rotated ones, and v of a value:

    layers.N.attention.q.weight           [H (n + r), h]    without a latent of queries; cut by heads
    layers.N.attention.q_a.weight         [rq, h]           on every tp rank
    layers.N.attention.q_a_norm.weight    [rq]              on every tp rank
    layers.N.attention.q_b.weight         [H (n + r), rq]   cut by heads
    layers.N.attention.kv_a.weight        [rkv + r, h]      on every tp rank
    layers.N.attention.kv_a_norm.weight   [rkv]             on every tp rank
    layers.N.attention.kv_b.weight        [H (n + v), rkv]  cut by heads; of each the key, then the value
    layers.N.attention.o.weight           [h, H v]          cut by input

Shapes: s positions of this context-parallel rank, b micro-batch, n this rank's heads.
"""

from dataclasses import dataclass

import torch
from megapar_kernels.block_attention import ScoreRule
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.model_options import ModelConfig
from megapar.declare.largest_logits import ScaledRows
from megapar.declare.params import ZEROS, shared_piece
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import Columns, local_linear, shared_vector
from megapar.tensor_parallel.lora import reads_codes
from megapar.tensor_parallel.regions import copy_to_tp, gather_sequence
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.norms import NormRule


@dataclass(frozen=True)
class Latent(MixerRule):
    """The rule of multi-head latent attention: its widths, and the norm of its latents.

    `q_rank` and `kv_rank` are the widths of the latents of queries and of keys with values. With `q_rank` 0 queries
    have no latent. Queries and keys of a head have `nope_width` dimensions, then `rope_width` that a rotation turns,
    which all heads share of keys. `LayerKind.rotary` None turns none.
    """

    q_rank: int
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    norm: NormRule

    OVER_CP = True
    MEASURES_LOGITS = True
    READS = frozenset(
        {"rotary", "window", "chunk", "qkv_bias", "out_bias", "head_gate", "attention_scale", "temperature"}
    )

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return LatentAttention(self, number, kind, model, factory)


class LatentAttention(nn.Module):
    """Causal self-attention of layer `number`. `rule` has its widths, and `model` its heads.

    `kind.qkv_bias` adds biases to the projections to latents, and `kind.out_bias` one to the output. `kind.head_gate`
    multiplies the output of each head.
    """

    def __init__(self, rule: Latent, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        self.kind = kind
        self.rule = rule
        self.rotary = kind.rotary
        self.sharding = factory.sharding
        self.impl = factory.kernels.rope
        tp = factory.sharding.tp
        name = f"layers.{number}.attention"
        total = model.num_attention_heads
        self.heads = total // tp.size
        q_width = rule.nope_width + rule.rope_width
        self.q_a = self.q_a_norm = None
        q_input = model.hidden_size
        q_name = f"{name}.q"
        if rule.q_rank:
            q_input = rule.q_rank
            q_name = f"{name}.q_b"
            self.q_a = WholeLinear(f"{name}.q_a", model.hidden_size, rule.q_rank, factory, bias=kind.qkv_bias)
            self.q_a_norm = factory.norm(f"{name}.q_a_norm", rule.q_rank, rule.norm)
        self.q = factory.column_parallel(q_input, [Columns.even(q_name, total * q_width, tp, (q_width,))])
        kv_a_width = rule.kv_rank + rule.rope_width
        self.kv_a = WholeLinear(f"{name}.kv_a", model.hidden_size, kv_a_width, factory, bias=kind.qkv_bias)
        self.kv_a_norm = factory.norm(f"{name}.kv_a_norm", rule.kv_rank, rule.norm)
        of_head = (rule.nope_width, rule.value_width)  # a key and a value are matrices of their own
        kv_columns = Columns.even(f"{name}.kv_b", total * sum(of_head), tp, of_head)
        self.kv_b = factory.column_parallel(rule.kv_rank, [kv_columns])
        self.gate = None
        if kind.head_gate:
            self.gate = WholeLinear(f"{name}.gate", model.hidden_size, total, factory, bias=False)
        self.out = factory.row_parallel(f"{name}.o", total * rule.value_width, model.hidden_size, bias=kind.out_bias)
        # The rotated part of keys is that of all heads, so it stays. That of queries takes the whole factor.
        scaled = [
            ScaledRows(f"{q_name}.weight", ((rule.nope_width, "half"), (rule.rope_width, "all"))),
            ScaledRows(f"{name}.kv_b.weight", ((rule.nope_width, "half"), (rule.value_width, "none"))),
        ]
        local = range(tp.rank * self.heads, (tp.rank + 1) * self.heads)
        self.own_heads = slice(local.start, local.stop)
        self.largest = factory.largest_logits(number, total, local, total, scaled)
        rules = {"window": kind.window, "chunk": kind.chunk, "rule": ScoreRule(kind.attention_scale)}
        self.attend = factory.core_attention(range(self.heads), q_width, rule.value_width, **rules)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        q_input = x_sbh
        if self.q_a is not None and self.q_a_norm is not None:
            q_input = recompute.remade(self.q_a_norm, self.q_a(x_sbh, context))
        q_sbc = self.q(q_input, context.tokens)
        # Under sequence parallelism each rank makes the latents of its own tokens, and short rows travel in place of x.
        latent_sbr, k_rope_sbr = self.kv_a(x_sbh, context).split([self.rule.kv_rank, self.rule.rope_width], dim=-1)
        kv_sbc = self.kv_b(self.kv_a_norm(latent_sbr), context.tokens)
        # All heads read the rotated part, so each rank computes a part of its gradient.
        k_rope_sbr = of_all_positions(k_rope_sbr, self.sharding)
        y_sbc = recompute.run(context.recomputes_attention, self._core, q_sbc, kv_sbc, k_rope_sbr, context)
        if self.gate is not None:
            gate_sbn = of_all_positions(self.gate(x_sbh, context), self.sharding)[..., self.own_heads].sigmoid()
            y_sbc = (y_sbc.unflatten(-1, (self.heads, -1)) * gate_sbn[..., None]).flatten(2)
        return self.out(y_sbc, context.tokens)

    def _core(self, q_sbc: Tensor, kv_sbc: Tensor, k_rope_sbr: Tensor, context: ForwardContext) -> Tensor:
        """The attention between the projections, [s, b, n * value width]. Selective recomputation repeats it."""
        rule = self.rule
        q = q_sbc.unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([rule.nope_width, rule.rope_width], dim=-1)
        kv = kv_sbc.unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([rule.nope_width, rule.value_width], dim=-1)
        q = torch.cat((q_nope, context.rotated(self.rotary, q_rope, self.impl)), dim=-1)
        k_rope = context.rotated(self.rotary, k_rope_sbr[:, :, None], self.impl)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), dim=-1)
        if self.kind.temperature is not None:
            q = q * self.kind.temperature.factors(context.batch)[..., None, None].to(q.dtype)
        batch = context.attended(self.kind.chunk)
        y: Tensor = self.attend(q, k, v, batch, None, None, context.not_measured(self.largest))
        return y


def of_all_positions(x_sbo: Tensor, sharding: Sharding) -> Tensor:
    """Return the output of a `WholeLinear` at all positions, [s, b, o], for work on this rank's heads."""
    if sharding.splits_sequence:
        return gather_sequence(x_sbo, sharding.tp)
    return copy_to_tp(x_sbo, sharding.tp)


class WholeLinear(nn.Module):
    """y = x W^T + b with the whole matrix [out, in] on every tp rank.

    Without sequence parallelism every rank computes the same, from the same x, and so the same gradient. Under it each
    has tokens of its own, and a part of the gradient.
    """

    def __init__(self, name: str, in_features: int, out_features: int, factory: Factory, *, bias: bool):
        super().__init__()
        sharding = factory.sharding
        shape = (out_features, in_features)
        piece = shared_piece(f"{name}.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
        self.products = factory.products_of_matrices([name], {"inputs": in_features, "outputs": out_features})
        if sharding.splits_sequence:
            self.products = self.products.of_own_positions()
        self.sharding = sharding
        self.lora = factory.lora_of_whole(name, shape)
        quantized = reads_codes(self.products, self.lora)
        self.weight = sharding.parameter(
            (piece,), shape, factory.init, decay=True, update="matrix", quantized=quantized
        )
        self.bias = shared_vector(f"{name}.bias", out_features, ZEROS, sharding) if bias else None

    def forward(self, x_sbi: Tensor, context: ForwardContext) -> Tensor:
        tokens = context.tokens_of_rank(self.sharding)
        return local_linear(x_sbi, self.weight, self.bias, self.products, self.lora, tokens)
