"""The gated short convolution of Liquid AI's models (LFM2, arXiv 2511.23404): out(c * conv(b * x)), with b, c, x of h.

Its logical tensors, with h hidden size and w width of the convolution:

    layers.N.attention.{b,c,x}.weight        [h, h]       cut by output
    layers.N.attention.conv.weight           [h, 1, w]    cut by channel
    layers.N.attention.out.weight            [h, h]       cut by input
    layers.N.attention.{b,c,x,conv,out}.bias [h]          if the rule has biases; out's is on every tp rank

The convolution is linear in the positions of a token's document, so a layer has no other memory than its last w - 1
inputs.

Shapes: s positions of this context-parallel rank, b micro-batch, c this rank's channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.messages import divisors, listed, problem
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.tensor_parallel.layers import Columns
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind, MixerRule
from megapar_models.short_convolution import ShortConvolution


@dataclass(frozen=True)
class GatedConvolution(MixerRule):
    """The rule of a gated short convolution: how many positions it reads, its own among them, and whether it has
    biases, which all its matrices then have.
    """

    width: int
    bias: bool = False

    OVER_CP = True

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return GatedConvolutionMixer(self, number, model, factory)

    def problems(self, config: Config) -> Iterator[str]:
        hidden = config.model.hidden_size
        if hidden % config.parallel.tp:
            fits = [n for n in divisors(hidden) if n <= config.parallel.tp]
            text = f"tp deals the channels of a convolution evenly; use tp {listed(fits)}"
            yield problem(config, "parallel.tp model.hidden_size", text)


class GatedConvolutionMixer(nn.Module):
    """The gated short convolution of layer `number`."""

    READER = "gates"  # of the input, alone: see `megapar_models.packing`

    def __init__(self, rule: GatedConvolution, number: int, model: ModelConfig, factory: Factory):
        super().__init__()
        name, h = f"layers.{number}.attention", model.hidden_size
        b, c, x, conv = (Columns.even(f"{name}.{part}", h, factory.sharding.tp) for part in ("b", "c", "x", "conv"))
        self.gates = factory.column_parallel(h, [b, c, x], bias=rule.bias)
        self.conv = ShortConvolution([conv], rule.width, factory, bias=rule.bias, silu=False)
        self.out = factory.row_parallel(f"{name}.out", h, h, bias=rule.bias)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. s/tp is the length under sequence parallelism."""
        gates_sbc = self.gates(x_sbh, context.tokens)
        y_sbc = recompute.run(context.recomputes_attention, self._core, gates_sbc, context)
        return self.out(y_sbc, context.tokens)

    def _core(self, gates_sbc: Tensor, context: ForwardContext) -> Tensor:
        """Return what is between the projections, [s, b, c]. Selective recomputation repeats it."""
        b, c, x = gates_sbc.chunk(3, dim=-1)
        y: Tensor = c * self.conv(b * x, context.batch)
        return y
