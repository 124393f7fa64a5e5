"""Grouped-query attention (Ainslie et al., arXiv 2305.13245), split over tp by query heads.

Shapes: s positions of this context-parallel rank, b micro-batch, h hidden, n this rank's heads, d width of a query and
a key, e width of a value. c are this rank's columns of q, k and v together: (query + key/value heads) d + key/value
heads * e, and of the gate: query heads (* e).
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from megapar_kernels.block_attention import ScoreRule, wide
from megapar_kernels.rope import rotate_qk, split_and_rotate_qkv
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.model_options import ModelConfig
from megapar.declare.largest_logits import rows_of_heads
from megapar.declare.params import make_piece
from megapar.tensor_parallel.layers import Columns
from megapar_models.factory import Factory, key_columns
from megapar_models.forward import ForwardContext
from megapar_models.heads import deal_heads
from megapar_models.layer_kind import OF_ATTENTION, LayerKind, keys_of
from megapar_models.qk_norm import HeadNorm, make_qk_norm, make_sub_norm


class Attention(nn.Module):
    """Causal self-attention of layer `number`.

    It has a fused q/k/v projection, by option with a gate of the output, norms of q and k, a rotation, and an output
    projection. `kind` says all this, and the sizes with `model` (`LayerKind.heads_of`).
    """

    READER = "qkv"  # of the input, alone: see `megapar_models.packing`
    READS = OF_ATTENTION

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        self.number = number
        self.kernels = factory.kernels
        sizes = kind.heads_of(model)
        total, groups = sizes.query_heads, sizes.kv_heads
        self.head_dim = d = sizes.head_dim
        self.value_dim = e = sizes.value_dim
        self.kind = kind
        tp = factory.sharding.tp
        name = f"layers.{number}.attention"
        self.heads = heads = deal_heads(total, groups, tp)
        self.q_heads = heads.q_stop - heads.q_start
        self.kv_heads = heads.kv_stop - heads.kv_start
        columns = [Columns.even(f"{name}.q", total * d, tp, (d,))]
        self.handed = keys_of(kind.shared_keys)
        self.reads_keys = self.handed[0] in kind.reads
        self.hands_keys_on = any(one.name == self.handed[0] for one in kind.writes)
        own = () if self.reads_keys else (("k", d),) if kind.keys_as_values else (("k", d), ("v", e))
        columns += [key_columns(f"{name}.{letter}", heads, groups, width) for letter, width in own]
        gates = [Columns.even(f"{name}.gate", total * e, tp, (e,))] * kind.output_gate
        gates += [Columns.even(f"{name}.gate", total, tp)] * kind.head_gate
        self.qkv = factory.column_parallel(model.hidden_size, [*columns, *gates], bias=kind.qkv_bias)
        self.out = factory.row_parallel(f"{name}.o", total * e, model.hidden_size, bias=kind.out_bias)
        rule = ScoreRule(kind.attention_scale, kind.score_cap)
        slopes = kind.slopes[heads.q_start : heads.q_stop]
        rules = {"window": kind.window, "chunk": kind.chunk, "rule": rule, "slopes": slopes}
        self.attend = factory.core_attention(heads.kv_heads, d, e, **rules)
        scaled = rows_of_heads(name, d, total // groups, bias=kind.qkv_bias)
        self.largest = factory.largest_logits(number, total, range(heads.q_start, heads.q_stop), groups, scaled)
        self.widths = [c.stop - c.start for c in columns]  # of this rank's queries, keys and values
        self.q_norm = self.k_norm = self.v_norm = None
        if kind.qk_norm:
            norms = [make_qk_norm(replace(c, name=f"{c.name}_norm", blocks=()), d, kind, factory) for c in columns[:2]]
            self.q_norm, self.k_norm = norms if len(norms) == 2 else (norms[0], None)
        if kind.value_norm is not None and not self.reads_keys:
            self.v_norm = HeadNorm(f"{name}.v_norm", e, kind.value_norm, factory.sharding, factory.kernels.norm)
        self.sub_norm = make_sub_norm(name, total * e, kind.norm, factory) if kind.sub_norms else None
        self.sinks = None
        if kind.sinks:
            piece = make_piece(f"{name}.sinks", (total,), {0: (heads.q_start, heads.q_stop)})
            self.sinks = factory.sharding.parameter((piece,), piece.local_shape, factory.init, decay=False)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        qkv_sbc = self.qkv(x_sbh, context.tokens)
        # As arguments and results: what recomputation keeps must have no tensors in the context.
        given = [context.handed[name] for name in self.handed] if self.reads_keys else []
        y_sbc = recompute.run(context.recomputes_attention, self._core, qkv_sbc, context, *given)
        if self.hands_keys_on:
            y_sbc, *own = y_sbc
            context.handed.update(zip(self.handed, own, strict=True))
        return self.out(y_sbc if self.sub_norm is None else self.sub_norm(y_sbc), context.tokens)

    def _core(self, qkv_sbc: Tensor, context: ForwardContext, *given: Tensor) -> Any:
        """The attention between the projections: [s, b, c] to [s, b, n * e]. Selective recomputation repeats it.

        `given` are keys and values of another layer. If the layer's own are handed on, they stand behind the result.
        """
        gate_sbc, width = None, self.q_heads * (self.value_dim if self.kind.output_gate else self.kind.head_gate)
        if width:
            qkv_sbc, gate_sbc = qkv_sbc.split([qkv_sbc.shape[-1] - width, width], dim=-1)
        if self.kind.qkv_clip:
            qkv_sbc = qkv_sbc.clamp(-self.kind.qkv_clip, self.kind.qkv_clip)
        q, k, v = (self._queries(qkv_sbc, context), *given) if given else self._split(qkv_sbc, context)
        if self.kind.temperature is not None:
            q = q * self.kind.temperature.factors(context.batch)[..., None, None].to(q.dtype)
        if self.kind.value_factor != 1.0 and not given:
            v = v * self.kind.value_factor
        batch = context.attended(self.kind.chunk)
        p, heads = self.kind.attention_dropout, range(self.heads.q_start, self.heads.q_stop)
        dropout = context.attention_dropout(p, self.number, heads) if p and self.training else None
        y: Tensor = self.attend(q, k, v, batch, dropout, self.sinks, context.not_measured(self.largest))
        if gate_sbc is not None:
            gate_sbne = self._gates(gate_sbc).unflatten(-1, (self.q_heads, -1))  # with one number a head, e is 1
            y = (y.unflatten(-1, (self.q_heads, -1)) * gate_sbne).flatten(-2)
        return (y, k, v) if self.hands_keys_on else y

    def _gates(self, gate_sbc: Tensor) -> Tensor:
        """The factors of the outputs of heads."""
        if self.kind.gate_activation == "softplus":
            return F.softplus(gate_sbc.to(wide(gate_sbc.dtype))).to(gate_sbc.dtype)
        return gate_sbc.sigmoid()

    def _split(self, qkv_sbc: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [s, b, n, d] and v [s, b, n, e] of the fused projection, with norms and the rotation of q and k."""
        if self.kind.rotary is None:
            return self._normed(*self._heads(qkv_sbc))
        tables = context.rotary[self.kind.rotary]
        length, samples, _ = qkv_sbc.shape
        if len(tables[0]) == length:
            return self._rotated_heads(qkv_sbc, tables)
        # The tables have a row for each position of each sample: as if it were one sample of s b positions.
        q, k, v = self._rotated_heads(qkv_sbc.flatten(0, 1)[:, None], tables)
        q, k, v = (x.squeeze(1).unflatten(0, (length, samples)) for x in (q, k, v))
        return q, k, v

    def _rotated_heads(self, qkv_sbc: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`_heads`, with q and k rotated by cos and sin [s, w], and normed before or after that."""
        impl = self.kernels.rope
        norms_after = self.q_norm is None or self.kind.qk_norm_after_rotary
        if norms_after and self.value_dim == self.head_dim and not self.kind.keys_as_values:
            return self._normed(*split_and_rotate_qkv(qkv_sbc, self.q_heads, self.kv_heads, *tables, impl=impl))
        q, k, v = self._heads(qkv_sbc)
        if not norms_after:
            q, k, v = self._normed(q, k, v)
        q, k = rotate_qk(q, k, *tables, impl=impl)
        return self._normed(q, k, v) if norms_after else (q, k, v)

    def _heads(self, qkv_sbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [s, b, n, d] and v [s, b, n, e] as views of the fused projection."""
        d, e = self.head_dim, self.value_dim
        parts = qkv_sbc.split(self.widths, dim=-1)
        parts = (*parts, parts[1])[:3]  # keys as values, if there are no others
        q, k, v = (rearrange(x, "s b (n d) -> s b n d", d=width) for x, width in zip(parts, (d, d, e), strict=True))
        return q, k, v

    def _queries(self, q_sbc: Tensor, context: ForwardContext) -> Tensor:
        """q [s, b, n, d] of a projection to queries alone, with norm and rotation."""
        q = rearrange(q_sbc, "s b (n d) -> s b n d", d=self.head_dim)
        if self.q_norm is not None and not self.kind.qk_norm_after_rotary:
            q = self.q_norm(q)
        q = context.rotated(self.kind.rotary, q, self.kernels.rope)
        return q if self.q_norm is None or not self.kind.qk_norm_after_rotary else self.q_norm(q)

    def _normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with their norms if there are any."""
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v
