"""Delta nets: linear attention whose memory is a state for each head.

The gated delta net (Yang et al., arXiv 2412.06464) has a decay for each head and token, Kimi's delta attention (arXiv
2510.26692) one for each channel of a key too. The logical tensors, with h hidden size, n value heads of width e, k key
heads of width d, and w the width of the convolution:

    layers.N.attention.{q,k}.weight          [k d, h]
    layers.N.attention.{v,gate}.weight       [n e, h]
    layers.N.attention.{beta,decay}.weight   [n, h]          on every tp rank
    layers.N.attention.conv_{q,k}.weight     [k d, 1, w]
    layers.N.attention.conv_v.weight         [n e, 1, w]
    layers.N.attention.{A_log,dt_bias}       [n]             fp32 in 16-bit models too
    layers.N.attention.norm.weight           [e]             on every tp rank; each computes a part of its gradient
    layers.N.attention.o.weight              [h, n e]

Decays of channels have decay.weight [n d, h] and dt_bias [n d]. With a rank r of decays or gates two matrices take the
place of one: decay_a.weight [r, h], on every tp rank, and decay_b.weight [n d, r].

tp deals value heads, and with them the key heads that they read, as attention deals query heads. So all but whole
tensors are cut by heads, each for itself.

Shapes: s positions of this context-parallel rank, b micro-batch, n and k this rank's value heads and key heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from megapar_kernels.activations import swiglu
from megapar_kernels.delta_rule import log_decay
from megapar_kernels.first_use import check_delta_rule
from megapar_kernels.norms import rms_norm
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.messages import divisors, listed, problem
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.context_parallel.delta_rule import DeltaRule
from megapar.declare.params import Init, make_piece
from megapar.tensor_parallel.layers import Columns
from megapar_models.factory import Factory, key_columns
from megapar_models.first_use import check_once
from megapar_models.forward import ForwardContext
from megapar_models.heads import deal_heads
from megapar_models.latent_attention import WholeLinear, of_all_positions
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.norms import NormRule
from megapar_models.qk_norm import HeadNorm
from megapar_models.short_convolution import ShortConvolution

# Of the squared length of a query or a key, in flash-linear-attention and in all families.
LENGTH_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDelta(MixerRule):
    """The rule of a delta net: its heads, their widths, and the norm of its outputs.

    A key head serves a run of value heads. `gate` is the activation of the output gate. With `negative_eigenvalues`
    beta reaches 2 instead of 1, so that a state may turn its sign along a key (arXiv 2411.12537).

    With `decays_channels` each channel of a key decays for itself, and each value head has a key of its own.
    `decay_rank` and `gate_rank` are the widths between the two matrices of decays and of gates; 0: one matrix. Decays
    are at least exp(`decay_floor`), if the floor is below 0 (`megapar_kernels.delta_rule.log_decay`).
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_width: int
    norm: NormRule
    gate: Literal["silu", "sigmoid"] = "silu"
    negative_eigenvalues: bool = False
    decays_channels: bool = False
    decay_rank: int = 0
    gate_rank: int = 0
    decay_floor: float = 0.0

    OVER_CP = True

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return DeltaNet(self, number, model, factory)

    def problems(self, config: Config) -> Iterator[str]:
        keys, values = self.key_heads, self.value_heads
        if values % keys:
            text = f"each key head serves as many value heads; linear_num_key_heads may be {listed(divisors(values))}"
            yield problem(config, "model.linear_num_key_heads model.linear_num_value_heads", text)
        elif values % config.parallel.tp:
            fits = [n for n in divisors(values) if n <= config.parallel.tp]
            yield problem(config, "parallel.tp", f"tp deals the {values} heads of a delta net; use {listed(fits)}")


class DeltaNet(nn.Module):
    """The delta net of layer `number`. `rule` says its form."""

    def __init__(self, rule: GatedDelta, number: int, model: ModelConfig, factory: Factory):
        super().__init__()
        self.rule = rule
        self.sharding = sharding = factory.sharding
        self.norm_impl, self.gate_impl = factory.kernels.norm, factory.kernels.activation
        name = f"layers.{number}.attention"
        values, hidden = rule.value_heads, model.hidden_size
        self.heads = heads = deal_heads(values, rule.key_heads, sharding.tp)
        self.own_heads = slice(heads.q_start, heads.q_stop)
        v = Columns.even(f"{name}.v", values * rule.value_width, sharding.tp, (rule.value_width,))
        q = key_columns(f"{name}.q", heads, rule.key_heads, rule.key_width)
        self.projected = [q, replace(q, name=f"{name}.k"), v]
        of_conv = [replace(c, name=f"{name}.conv_{c.name[-1]}", blocks=()) for c in self.projected]
        self.conv = ShortConvolution(of_conv, rule.conv_width, factory)
        self.beta = WholeLinear(f"{name}.beta", hidden, values, factory, bias=False)
        self.gate = self._projection(replace(v, name=f"{name}.gate"), rule.gate_rank, hidden, factory)
        self.decay: nn.Module | None = None
        if rule.decays_channels:
            self.decay = self._projection(replace(q, name=f"{name}.decay"), rule.decay_rank, hidden, factory)
        else:
            self.decay = WholeLinear(f"{name}.decay", hidden, values, factory, bias=False)
        self.widths = [c.stop - c.start for c in self.projected]
        self.qkv = factory.column_parallel(hidden, self.projected)
        self.a_log = self._by_heads(f"{name}.A_log", 1, Init("log_uniform", 16.0))
        steps = rule.key_width if rule.decays_channels else 1
        self.dt_bias = self._by_heads(f"{name}.dt_bias", steps, Init("time_step", 0.1))
        widths, impl = (rule.key_width, rule.value_width), factory.kernels.linear_attention
        self.core = DeltaRule(sharding.cp, factory.cp_attention, heads.kv_heads, *widths, sharding.device, impl)
        check_once(factory, self.core.impl, check_delta_rule, widths, steps)
        self.norm = HeadNorm(f"{name}.norm", rule.value_width, rule.norm, sharding, factory.kernels.norm)
        self.out = factory.row_parallel(f"{name}.o", values * rule.value_width, hidden)

    def _projection(self, columns: Columns, rank: int, hidden: int, factory: Factory) -> nn.Module | None:
        """Make a projection by two matrices. With `rank` 0 `columns` join those of q, k and v: None."""
        if rank:
            return TwoMatrices(columns, rank, hidden, factory)
        self.projected.append(columns)
        return None

    def _by_heads(self, name: str, width: int, init: Init) -> nn.Parameter:
        """Make this rank's part of a vector with `width` numbers for each value head."""
        bounds = (self.heads.q_start * width, self.heads.q_stop * width)
        piece = make_piece(name, (self.rule.value_heads * width,), {0: bounds})
        return self.sharding.parameter((piece,), piece.local_shape, init, decay=False, precise=True)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        qkv_sbc = self.qkv(x_sbh, context.tokens)
        beta_sbn = self._of_heads(self.beta(x_sbh, context))
        gate_sbc = None if self.gate is None else self.gate(x_sbh, context)
        decay_sbc = None if self.decay is None else self.decay(x_sbh, context)
        if decay_sbc is not None and not self.rule.decays_channels:
            decay_sbc = self._of_heads(decay_sbc)
        given = (qkv_sbc, beta_sbn, gate_sbc, decay_sbc)
        y_sbc = recompute.run(context.recomputes_attention, self._core, *given, context)
        return self.out(y_sbc, context.tokens)

    def _of_heads(self, x_sbn: Tensor) -> Tensor:
        """Return this rank's heads at all positions, [s, b, n], from those of all heads."""
        return of_all_positions(x_sbn, self.sharding)[..., self.own_heads]

    def _core(
        self,
        qkv_sbc: Tensor,
        beta_sbn: Tensor,
        gate_sbc: Tensor | None,
        decay_sbc: Tensor | None,
        context: ForwardContext,
    ) -> Tensor:
        """Return what is between the projections, [s, b, n * e]. Selective recomputation repeats it.

        `gate_sbc` and `decay_sbc` are None if they are among the columns of `qkv_sbc`.
        """
        rule = self.rule
        convolved = sum(self.widths[:3])
        qkv_sbc, *others = qkv_sbc.split([convolved, *self.widths[3:]], dim=-1)
        if gate_sbc is None:
            gate_sbc = others.pop(0)
        if decay_sbc is None:
            decay_sbc = others.pop(0)
        q, k, v = self.conv(qkv_sbc, context.batch).split(self.widths[:3], dim=-1)
        q = self._of_length(q.unflatten(-1, (-1, rule.key_width)), rule.key_width**-0.5)
        k = self._of_length(k.unflatten(-1, (-1, rule.key_width)), 1.0)
        v = v.unflatten(-1, (-1, rule.value_width))
        decay_sbnw = decay_sbc.unflatten(-1, (len(self.heads.kv_heads), -1))
        g = log_decay(decay_sbnw, self.a_log, self.dt_bias, rule.decay_floor)
        beta = beta_sbn.to(g.dtype).sigmoid() * (2.0 if rule.negative_eigenvalues else 1.0)
        y = self.norm(self.core(q, k, v, g, beta, context.batch)).flatten(2)
        if rule.gate == "sigmoid":
            return y * gate_sbc.sigmoid()
        return swiglu(torch.cat([gate_sbc, y], dim=-1), impl=self.gate_impl)

    def _of_length(self, x_sbnd: Tensor, length: float) -> Tensor:
        """Return vectors of this length, with `LENGTH_EPS` added to the squared length of x."""
        # x / sqrt(sum of squares + eps) is RMSNorm with eps / d and the weight d^-1/2.
        width = x_sbnd.shape[-1]
        weight = x_sbnd.new_full((width,), length * width**-0.5, dtype=torch.promote_types(x_sbnd.dtype, torch.float32))
        return rms_norm(x_sbnd, weight, LENGTH_EPS / width, self.norm_impl)


class TwoMatrices(nn.Module):
    """A projection of low rank: NAME_a [rank, h], whole on every tp rank, and NAME_b, cut by its outputs."""

    def __init__(self, columns: Columns, rank: int, hidden: int, factory: Factory):
        super().__init__()
        self.a = WholeLinear(f"{columns.name}_a", hidden, rank, factory, bias=False)
        self.b = factory.column_parallel(rank, [replace(columns, name=f"{columns.name}_b")])

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Return this rank's outputs at all positions, [s, b, c]."""
        return self.b(self.a(x_sbh, context), context.tokens)
