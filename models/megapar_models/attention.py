"""Grouped-query attention (Ainslie et al., arXiv 2305.13245), split over tp by query heads.

Shapes: s positions of this context-parallel rank, b micro-batch, h hidden, n this rank's heads, d width of a head,
c this rank's columns of q, k and v together: (query heads + 2 key/value heads) d.
"""

from dataclasses import dataclass

from einops import rearrange
from megapar_kernels.norms import rms_norm
from megapar_kernels.rope import rotate_qk, split_and_rotate_qkv
from torch import Tensor, nn

from megapar import recompute
from megapar.context import Axis
from megapar.context_parallel.attention import CoreAttention
from megapar.context_parallel.dropout import AttentionDropout
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear, norm_weight
from megapar_models.stage import Blueprint, DropoutSite, ForwardContext, dropout_use


@dataclass(frozen=True)
class Heads:
    """The query heads [q_start, q_stop) of a rank and the key/value heads [kv_start, kv_stop) that they read.

    Ranks share key/value heads if there are fewer of them than tp, or if the query heads of one lie on two ranks. The
    first rank that holds a key/value head owns it: [kv_own_start, kv_stop) are this rank's own. `shared` is the same on
    every rank: whether any two ranks share a head. `kv_heads` has the local key/value head of each local query head.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kv_own_start: int
    shared: bool
    kv_heads: tuple[int, ...]


def _kv_range(rank: int, per_rank: int, group: int) -> tuple[int, int]:
    """The key/value heads [start, stop) of a rank with `per_rank` query heads, `group` query heads to one of them."""
    return rank * per_rank // group, ((rank + 1) * per_rank - 1) // group + 1


def deal_heads(num_heads: int, num_kv_heads: int, tp: Axis) -> Heads:
    """Deal the heads to tp ranks; returns this rank's. `num_heads` must be a multiple of tp and of `num_kv_heads`."""
    per_rank = num_heads // tp.size
    group = num_heads // num_kv_heads
    ranges = [_kv_range(rank, per_rank, group) for rank in range(tp.size)]
    start, stop = ranges[tp.rank]
    previous_stop = ranges[tp.rank - 1][1] if tp.rank else 0
    shared = sum(b - a for a, b in ranges) > num_kv_heads
    return Heads(
        tp.rank * per_rank,
        (tp.rank + 1) * per_rank,
        start,
        stop,
        min(stop, max(start, previous_stop)),
        shared,
        tuple(q // group - start for q in range(tp.rank * per_rank, (tp.rank + 1) * per_rank)),
    )


class Attention(nn.Module):
    """Causal self-attention of layer `number`.

    It has a fused q/k/v projection, an optional norm of q and k, an optional rotation, and an output projection.
    """

    def __init__(self, number: int, blueprint: Blueprint, *, qkv_bias: bool, out_bias: bool):
        super().__init__()
        model = blueprint.model
        self.number = number
        self.seed = blueprint.seed
        self.kernels = blueprint.kernels
        self.recomputes_core = blueprint.recompute.attention()
        self.head_dim = model.head_dim
        self.norm_eps = model.rms_norm_eps
        self.dropout = model.attention_dropout
        sharding = blueprint.sharding
        name = f"layers.{number}.attention"
        self.heads = heads = deal_heads(model.num_attention_heads, model.num_key_value_heads, sharding.tp)
        d = model.head_dim
        width = model.num_attention_heads * model.head_dim
        columns = [Columns.even(f"{name}.q", width, sharding.tp)]
        for letter in ("k", "v"):
            columns.append(
                Columns(
                    f"{name}.{letter}",
                    size=model.num_key_value_heads * d,
                    start=heads.kv_start * d,
                    stop=heads.kv_stop * d,
                    own_start=heads.kv_own_start * d,
                    own_stop=heads.kv_stop * d,
                    shared=heads.shared,
                )
            )
        self.qkv = ColumnParallelLinear(
            model.hidden_size, columns, sharding, init=blueprint.init, bias=qkv_bias, products=blueprint.products
        )
        self.out = RowParallelLinear(
            f"{name}.o",
            width,
            model.hidden_size,
            sharding,
            init=blueprint.output_init,
            bias=out_bias,
            products=blueprint.products,
        )
        self.attend = CoreAttention(
            sharding.cp, blueprint.cp_attention, heads.kv_heads, blueprint.kernels, sharding.device, d, d
        )
        self.q_norm = self.k_norm = None
        if model.qk_norm:
            # One weight serves all heads, and each rank has only some heads. So each rank's gradient is a partial sum,
            # with or without sequence parallelism.
            self.q_norm = norm_weight(f"{name}.q_norm.weight", d, sharding, partial=True)
            self.k_norm = norm_weight(f"{name}.k_norm.weight", d, sharding, partial=True)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        qkv_sbc = self.qkv(x_sbh)
        return self.out(recompute.run(self.recomputes_core, self._core, qkv_sbc, context))

    def _core(self, qkv_sbc: Tensor, context: ForwardContext) -> Tensor:
        """The attention between the projections: [s, b, c] to [s, b, n * d]. Selective recomputation repeats it."""
        q, k, v = self._split(qkv_sbc, context)
        dropout = None
        if self.dropout and self.training:
            dropout = AttentionDropout(
                self.dropout,
                self.seed,
                dropout_use(self.number, DropoutSite.ATTENTION_PROBABILITIES),
                range(self.heads.q_start, self.heads.q_stop),
                context.batch.sample_ids_b,
                context.batch.positions_s,
            )
        return self.attend(q, k, v, context.batch, dropout)

    def _split(self, qkv_sbc: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [s, b, n, d] of the fused projection, with the norms and the rotation of q and k."""
        kernels = self.kernels
        d = self.head_dim
        q_heads = self.heads.q_stop - self.heads.q_start
        kv_heads = self.heads.kv_stop - self.heads.kv_start
        if context.rope is not None and self.q_norm is None:
            return split_and_rotate_qkv(qkv_sbc, q_heads, kv_heads, *context.rope, impl=kernels.rope)
        parts = qkv_sbc.split([q_heads * d, kv_heads * d, kv_heads * d], dim=-1)
        q, k, v = (rearrange(x, "s b (n d) -> s b n d", d=d) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.norm_eps, kernels.norm)
            k = rms_norm(k, self.k_norm, self.norm_eps, kernels.norm)
        if context.rope is not None:
            q, k = rotate_qk(q, k, *context.rope, impl=kernels.rope)
        return q, k, v
