"""Mamba-2 (state space duality, arXiv 2405.21060): a state for each head, with one decay for each token.

Its logical tensors, with h hidden size, n heads of width p, k groups of heads with states of width d, and w width of
convolution:

    layers.N.mamba.{z,x}.weight              [n p, h]
    layers.N.mamba.{B,C}.weight              [k d, h]
    layers.N.mamba.dt.weight                 [n, h]          on every tp rank
    layers.N.mamba.conv_x.weight             [n p, 1, w]
    layers.N.mamba.conv_{B,C}.weight         [k d, 1, w]
    layers.N.mamba.{A_log,dt_bias,D}         [n]             fp32 in 16-bit models too
    layers.N.mamba.norm.weight               [n p]           (optional)
    layers.N.mamba.o.weight                  [h, n p]

Projections and convolutions have biases by option. tp deals heads, and with them the groups that they read, as
attention deals query heads. So all but whole tensors are cut by heads, each for itself.

Shapes: s positions of this context-parallel rank, b micro-batch, n and k this rank's heads and groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megapar_kernels.dispatch import Implementation
from megapar_kernels.state_space import Limit, add_skip, time_steps
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.messages import divisors, listed, problem
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.context_parallel.state_space import StateSpace
from megapar.declare.params import ONES, Init, make_piece
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import Columns
from megapar.tensor_parallel.regions import copy_to_tp, reduce_from_tp
from megapar_models.factory import Factory, key_columns
from megapar_models.forward import ForwardContext
from megapar_models.heads import Heads, deal_heads
from megapar_models.latent_attention import WholeLinear, of_all_positions
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.norms import NormRule
from megapar_models.short_convolution import ShortConvolution


@dataclass(frozen=True)
class Mamba2(MixerRule):
    """The rule of Mamba-2: its heads and groups, their widths, and the norm of its outputs.

    A group serves a run of heads with its B and C. Outputs are multiplied by silu(z), and normalized over the heads of
    each group: behind the gate, or with `norm_first` in front of it. Time steps stay within `time_step_limit`, as in
    the reference (state-spaces/mamba). `factors` multiply z, x, B, C and dt.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    conv_width: int
    norm: NormRule | None
    norm_first: bool = False
    time_step_limit: Limit = (0.0, float("inf"))
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    OVER_CP = True

    @property
    def width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_width

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return Mamba2Mixer(self, number, model, factory)

    def problems(self, config: Config) -> Iterator[str]:
        if self.heads % self.groups:
            text = f"each group serves as many heads; mamba_n_groups may be {listed(divisors(self.heads))}"
            yield problem(config, "model.mamba_n_groups model.mamba_n_heads", text)
        elif self.heads % config.parallel.tp:
            fits = [n for n in divisors(self.heads) if n <= config.parallel.tp]
            text = f"tp deals heads of Mamba-2; use tp {listed(fits)}"
            yield problem(config, "parallel.tp model.mamba_n_heads", text)


class Mamba2Mixer(nn.Module):
    """The Mamba-2 of layer `number`."""

    def __init__(self, rule: Mamba2, number: int, model: ModelConfig, factory: Factory):
        super().__init__()
        self.rule = rule
        sharding = factory.sharding
        self.sharding = sharding
        tp = sharding.tp
        name = f"layers.{number}.mamba"
        self.heads = heads = deal_heads(rule.heads, rule.groups, tp)
        x = Columns.even(f"{name}.x", rule.width, tp, (rule.head_width,))
        b = key_columns(f"{name}.B", heads, rule.groups, rule.state_width)
        columns = [replace(x, name=f"{name}.z"), x, b, replace(b, name=f"{name}.C")]
        self.widths = [c.stop - c.start for c in columns]
        self.projected = factory.column_parallel(model.hidden_size, columns, bias=rule.bias)
        self.dt = WholeLinear(f"{name}.dt", model.hidden_size, rule.heads, factory, bias=rule.bias)
        of_conv = [replace(c, name=f"{name}.conv_{c.name[-1]}", blocks=()) for c in columns[1:]]
        self.conv = ShortConvolution(of_conv, rule.conv_width, factory, bias=rule.conv_bias)
        self.a_log = self._of_each_head(f"{name}.A_log", Init("log_uniform", 16.0))
        self.dt_bias = self._of_each_head(f"{name}.dt_bias", Init("time_step", 0.1))
        self.skip = self._of_each_head(f"{name}.D", ONES)
        self.core = StateSpace(
            *(sharding.cp, factory.cp_attention, heads.kv_heads, rule.head_width, rule.state_width, sharding.device)
        )
        norm_columns = replace(x, name=f"{name}.norm", blocks=())
        self.norm = GatedNorm(norm_columns, rule, heads, sharding, factory.kernels.norm)
        self.out = factory.row_parallel(f"{name}.o", rule.width, model.hidden_size, bias=rule.out_bias)

    def _of_each_head(self, name: str, init: Init) -> nn.Parameter:
        piece = make_piece(name, (self.rule.heads,), {0: (self.heads.q_start, self.heads.q_stop)})
        return self.sharding.parameter((piece,), piece.local_shape, init, decay=False, precise=True)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        projected_sbc = self.projected(x_sbh, context.tokens)
        dt_sbn = self._of_heads(self.dt(x_sbh, context))
        y_sbc = recompute.run(context.recomputes_attention, self._core, projected_sbc, dt_sbn, context)
        return self.out(y_sbc, context.tokens)

    def _of_heads(self, x_sbn: Tensor) -> Tensor:
        """Return this rank's heads of all positions, [s, b, n], from those of all heads, [s or s/tp, b, ...]."""
        x_sbn = of_all_positions(x_sbn, self.sharding)
        return x_sbn[..., self.heads.q_start : self.heads.q_stop]

    def _core(self, projected_sbc: Tensor, dt_sbn: Tensor, context: ForwardContext) -> Tensor:
        """Return what is between the projections, [s, b, n * p]. Selective recomputation repeats it."""
        rule = self.rule
        if any(factor != 1.0 for factor in rule.factors):
            parts = zip(projected_sbc.split(self.widths, dim=-1), rule.factors[:4], strict=True)
            projected_sbc = torch.cat([part * factor for part, factor in parts], dim=-1)
            dt_sbn = dt_sbn * rule.factors[4]
        z, xbc = projected_sbc.split([self.widths[0], sum(self.widths[1:])], dim=-1)
        x, b, c = self.conv(xbc, context.batch).split(self.widths[1:], dim=-1)
        x = x.unflatten(-1, (-1, rule.head_width))
        b, c = (part.unflatten(-1, (-1, rule.state_width)) for part in (b, c))
        dt, g = time_steps(dt_sbn, self.a_log, self.dt_bias, rule.time_step_limit)
        y = self.core(x, dt, g, b, c, context.batch)
        return self.norm(add_skip(y, x, self.skip).flatten(2), z)


class GatedNorm(nn.Module):
    """y silu(z), normalized over the heads of each group, with a weight [n p]; or alone, if the rule has no norm.

    Where tp cuts groups, ranks sum the squares of each.
    """

    weight: nn.Parameter | None
    group_index: Tensor

    def __init__(self, columns: Columns, rule: Mamba2, heads: Heads, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.rule = rule
        self.tp = sharding.tp
        self.impl = impl
        self.groups = heads.kv_stop - heads.kv_start
        self.cuts_groups = heads.shared
        group_of_head = [heads.kv_start + group for group in heads.kv_heads]
        index = torch.tensor(group_of_head, device=sharding.device)
        self.register_buffer("group_index", index, persistent=False)
        self.weight = None
        if rule.norm is not None:
            piece = columns.piece("weight", (columns.size,), sharding.tp)
            self.weight = sharding.parameter((piece,), piece.local_shape, ONES, decay=False)

    def forward(self, y_sbc: Tensor, z_sbc: Tensor) -> Tensor:
        """Return the outputs in the dtype of z, [s, b, n p]. y is fp32."""
        gate = F.silu(z_sbc.to(y_sbc.dtype))
        y = self._normed(y_sbc) * gate if self.rule.norm_first else self._normed(y_sbc * gate)
        return y.to(z_sbc.dtype)

    def _normed(self, y_sbc: Tensor) -> Tensor:
        rule = self.rule.norm
        if rule is None or self.weight is None:
            return y_sbc
        if not self.cuts_groups:
            plain = replace(rule, weighted=False)
            normed = plain.normalize(y_sbc.unflatten(-1, (self.groups, -1)), None, None, self.impl).flatten(2)
        else:
            y_sbnp = y_sbc.unflatten(-1, (-1, self.rule.head_width))
            # A product, because a GPU adds by index in any order.
            members_nk = F.one_hot(self.group_index, self.rule.groups).to(y_sbc.dtype)
            squares_sbk = y_sbnp.square().sum(-1) @ members_nk
            # As in `megapar_models.qk_norm.WidthNorm`: gradients of the sum add up before ranks take them back.
            total_sbk = copy_to_tp(reduce_from_tp(squares_sbk, self.tp), self.tp)
            size = self.rule.width // self.rule.groups
            inverse_sbk = torch.rsqrt(total_sbk / size + rule.eps)
            normed = (y_sbnp * inverse_sbk.index_select(2, self.group_index)[..., None]).flatten(2)
        return normed * self.weight.to(normed.dtype)
