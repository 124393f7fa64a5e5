"""Other residual streams than one sum: several streams (hyper-connections).

Hyper-connections (arXiv 2409.19606): the streams of a token stand one after the other in what layers hand on, [s, b,
n*h]. A branch reads a weighted sum of the streams, and each stream gets what the branch gives times a number of its
own. The numbers follow from the streams. DeepSeek V4 (manifold-constrained hyper-connections) and GLM-5.3-Flash also
mix the streams, Hy4 does not.

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, n streams, h hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megapar_kernels.block_attention import wide
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.config.model_options import ModelConfig
from megapar.declare.params import ZEROS, Init, shared_piece
from megapar.expert_parallel.balance import Float32Products
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.layers import local_linear
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer import Layer
from megapar_models.layer_kind import LayerKind, StreamRule
from megapar_models.norms import add_and_norm

Branches = Mapping[str, Callable[[Tensor], Tensor]]
"""The branches of a layer in order, "attention" and "mlp": each maps what it reads, [s, b, h], to what it adds."""


class StreamLayer(Layer):
    """A layer whose branches read and write what `make` makes: a module that maps the hidden states between layers, a
    `ForwardContext` and the `Branches` of the layer to such states.

    It is made as make(number, names of branches, width h, factory).
    """

    def __init__(
        self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory, make: Callable[..., nn.Module]
    ):
        super().__init__(number, kind, model, factory)
        self.branches = [name for name in ("attention", "mlp") if getattr(self, name) is not None]
        self.stream = make(number, self.branches, model.hidden_size, factory)

    def forward(self, x_sbm: Tensor, context: ForwardContext) -> Tensor:  # type: ignore[override]
        """Return the hidden states behind the layer from those before it."""
        found = {"attention": partial(self._attention, context), "mlp": partial(self._mlp, context)}
        y_sbm: Tensor = self.stream(x_sbm, context, {name: found[name] for name in self.branches})
        return y_sbm

    def _attention(self, context: ForwardContext, x_sbh: Tensor) -> Tensor:
        assert self.attention is not None
        normed_sbh, _ = add_and_norm(self.attention_norm, x_sbh)
        return self._scaled(self.attention_output_norm(self.attention(normed_sbh, context)))

    def _mlp(self, context: ForwardContext, x_sbh: Tensor) -> Tensor:
        assert self.mlp is not None
        normed_sbh, _ = add_and_norm(self.mlp_norm, x_sbh)
        return self._scaled(self.mlp_output_norm(self.mlp(normed_sbh, context)))


# Hyper-connections


@dataclass(frozen=True, kw_only=True)
class HyperConnections(StreamRule):
    """How branches read and write several residual streams.

    With x the RMS norm of all streams of a token, without a weight and over n*h numbers, and W, a and c trained:

    - pre = sigmoid(a1 W1 x + c1) + eps: the input of the branch is the sum of pre * stream.
    - post = `post_factor` * sigmoid(a2 W2 x + c2) + `post_eps`: each stream gets post * output of the branch.
    - comb = softmax(a3 W3 x + c3) + eps, n by n, whose columns and rows are then divided by their sums in turn: the
      streams become comb^T * streams. Without `mixing_steps` each stream stays as it is, and there is no comb.
    """

    count: int
    """The number of streams."""
    eps: float
    norm_eps: float
    mixing_steps: int = 0
    """How often columns are divided by their sums, between divisions of rows. 0: streams are not mixed (Hy4)."""
    post_factor: float = 2.0
    post_eps: float = 0.0
    scale: float = 1.0
    """The value with which the factors a begin."""
    pre_bias: float = 0.0
    """The value with which c1 begins. The other biases begin at 0."""
    learns_end: bool = False
    """Behind the last layer the streams become their sum with weights pre of their own (DeepSeek V4, Hy4), and
    otherwise their mean (GLM-5.3-Flash). They begin as copies of the embedding."""

    @property
    def streams(self) -> int:
        """The number of streams."""
        return self.count

    def begin(self, x_sbh: Tensor) -> Tensor:
        """Return copies of x, [s, b, n*h]."""
        return x_sbh.repeat(1, 1, self.count)

    def make_layer(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        """Make a layer of connections."""
        return StreamLayer(number, kind, model, factory, partial(_Connections, self))

    def make_end(self, model: ModelConfig, factory: Factory) -> nn.Module:
        """Make the learned end, or the mean."""
        return StreamHead("stream_end", self, model.hidden_size, factory) if self.learns_end else _Mean(self.count)


class _Weights(nn.Module):
    """Weights of streams from the streams themselves: of each of the kinds, such as pre, as many as `counts` says.

    All parameters are whole on every tp rank. Under sequence parallelism each rank has tokens of its own, and a part of
    the gradient. Factors and biases are fp32 in every model.
    """

    def __init__(
        self, name: str, rule: HyperConnections, counts: Mapping[str, int], hidden_size: int, factory: Factory
    ):
        super().__init__()
        self.rule, self.counts, sharding = rule, list(counts.values()), factory.sharding

        def make(module: str, shape: tuple[int, ...], init: Init, **options: Any) -> nn.Parameter:
            piece = shared_piece(f"{name}.{module}", shape, sharding.tp, partial=sharding.sequence_parallel)
            return sharding.parameter((piece,), shape, init, **options)

        vector: dict[str, Any] = {"decay": False, "precise": True}
        self.weight = make("weight", (sum(self.counts), rule.count * hidden_size), factory.init, decay=True)
        self.scale = make("scale", (len(counts),), Init("constant", rule.scale), **vector)
        inits = {"pre": Init("constant", rule.pre_bias)}
        self.biases = nn.ParameterList(
            make(f"{kind}_bias", (count,), inits.get(kind, ZEROS), **vector) for kind, count in counts.items()
        )
        # As a router's: backward keeps 16-bit streams, and no copy of them in fp32.
        self.products = TORCH_PRODUCTS if sharding.dtype == torch.float32 else Float32Products()

    def logits(self, x_sbm: Tensor) -> list[Tensor]:
        """Return factor * product + bias of each kind, [s, b, count], in fp32 at least."""
        # The norm's factor multiplies the products, which are few, and not the streams.
        factor = _norm_factor(x_sbm, self.rule.norm_eps)[..., None]
        products = (local_linear(x_sbm, self.weight, None, self.products) * factor).split(self.counts, dim=-1)
        parts = zip(products, self.scale.unbind(), self.biases, strict=True)
        return [y * scale + bias for y, scale, bias in parts]

    def read(self, x_sbnh: Tensor, pre_logits_sbn: Tensor) -> Tensor:
        """Return the weighted sum of the streams, [s, b, h]."""
        pre_sbn = pre_logits_sbn.sigmoid() + self.rule.eps
        return (pre_sbn[..., None] * x_sbnh).sum(2).to(x_sbnh.dtype)


class StreamConnection(_Weights):
    """The connection of one branch with the streams."""

    def __init__(self, name: str, rule: HyperConnections, hidden_size: int, factory: Factory):
        n = rule.count
        counts = {"pre": n, "post": n, **({"comb": n * n} if rule.mixing_steps else {})}
        super().__init__(name, rule, counts, hidden_size, factory)
        self.hidden_size = hidden_size

    def forward(self, x_sbm: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the streams behind a branch, [s, b, n*h], from those before it. `branch` maps [s, b, h] to itself."""
        rule = self.rule
        x_sbnh = x_sbm.unflatten(-1, (rule.count, -1))
        pre_sbn, post_sbn, *comb = self.logits(x_sbm)
        y_sbh = branch(self.read(x_sbnh, pre_sbn))
        post_sbn = rule.post_factor * post_sbn.sigmoid() + rule.post_eps
        if comb:
            mix = _Alternating.apply(comb[0].unflatten(-1, (rule.count, -1)), rule.mixing_steps, rule.eps)
            x_sbnh = mix.to(x_sbnh.dtype).transpose(-1, -2) @ x_sbnh
        y_sbnh = post_sbn[..., None] * y_sbh[:, :, None]
        return (y_sbnh + x_sbnh).to(x_sbm.dtype).flatten(2)

    def flops_per_token(self, seq_length: int) -> int:
        """FLOPs of a token's forward pass: the sums over streams and the products with them, without those of W."""
        n = self.rule.count
        return 2 * self.hidden_size * (2 * n + (n * n if self.rule.mixing_steps else 0))


class _Connections(nn.Module):
    """The connections of a layer's branches, by name."""

    def __init__(
        self, rule: HyperConnections, number: int, branches: Sequence[str], hidden_size: int, factory: Factory
    ):
        super().__init__()
        self.of = nn.ModuleDict(
            {name: StreamConnection(f"layers.{number}.{name}_stream", rule, hidden_size, factory) for name in branches}
        )

    def forward(self, x_sbm: Tensor, context: ForwardContext, branches: Branches) -> Tensor:
        """Return the streams behind the layer, [s, b, n*h], from those before it."""
        for name, connection in self.of.items():
            x_sbm = connection(x_sbm, branches[name])
        return x_sbm


class StreamHead(_Weights):
    """The learned end of the streams: their sum with weights pre of its own (`HyperConnections`)."""

    def __init__(self, name: str, rule: HyperConnections, hidden_size: int, factory: Factory):
        super().__init__(name, rule, {"pre": rule.count}, hidden_size, factory)

    def forward(self, x_sbm: Tensor, context: ForwardContext) -> Tensor:
        """Return the weighted sum of the streams, [s, b, h], from [s, b, n*h]."""
        (pre_sbn,) = self.logits(x_sbm)
        return self.read(x_sbm.unflatten(-1, (self.rule.count, -1)), pre_sbn)

    def flops_per_token(self, seq_length: int) -> int:
        """FLOPs of a token's forward pass: the sum over streams, without the products with W."""
        return 2 * self.weight.shape[1]


class _Mean(nn.Module):
    """The mean of the streams."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x_sbm: Tensor, context: ForwardContext) -> Tensor:
        """Return the mean, [s, b, h], from [s, b, n*h]."""
        return x_sbm.unflatten(-1, (self.count, -1)).mean(2)


class _Alternating(torch.autograd.Function):
    """softmax + eps, whose columns and rows are divided by their sums in turn (Sinkhorn and Knopp).

    Backward computes all steps again from the logits: kept, they would be a sixth of what four streams of 4,096 are.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, steps: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.steps, ctx.eps = steps, eps
        return _alternating(logits, steps, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            made = _alternating(logits, ctx.steps, ctx.eps)
        (grad_logits,) = torch.autograd.grad(made, logits, grad)
        return grad_logits, None, None


def _alternating(logits: Tensor, steps: int, eps: float) -> Tensor:
    made = logits.softmax(-1) + eps
    made = made / (made.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        made = made / (made.sum(-1, keepdim=True) + eps)
        made = made / (made.sum(-2, keepdim=True) + eps)
    return made


def _norm_factor(x: Tensor, eps: float) -> Tensor:
    """Return what RMSNorm multiplies x [..., m] by, [...], in fp32 at least. Backward keeps x in its own dtype."""
    size = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype))
    return (size.square() / x.shape[-1] + eps).rsqrt()
