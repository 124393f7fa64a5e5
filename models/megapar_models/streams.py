"""Other residual streams than one sum: several streams (hyper-connections), and attention over the depth.

Hyper-connections (arXiv 2409.19606): the streams of a token stand one after the other in what layers hand on, [s, b,
n*h]. A branch reads a weighted sum of the streams, and each stream gets what the branch gives times a number of its
own. The numbers follow from the streams. DeepSeek V4 (manifold-constrained hyper-connections) and GLM-5.3-Flash also
mix the streams, Hy4 does not.

Attention residuals (arXiv 2603.15031), as in Kimi K3 and Inkling 2: layers are grouped in blocks, and a block has a sum
of its own. A branch reads a weighted sum of the sums of finished blocks and of its own block so far.

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, n streams, h hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from megapar_kernels.block_attention import wide
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.config.model_options import ModelConfig
from megapar.declare.params import ONES, ZEROS, Init, shared_piece
from megapar.expert_parallel.balance import Float32Products
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.layers import local_linear, shared_vector
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.handed import Handed
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
    """What is added to pre, comb and the sums by which comb is divided."""
    norm_eps: float
    """Of the RMS norm of the streams."""
    mixing_steps: int = 0
    """How often columns are divided by their sums; rows are divided once less. 0: streams are not mixed (Hy4)."""
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

    Backward computes all steps again from the logits, so that the n by n matrices between them are not kept.
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


# Attention residuals


@dataclass(frozen=True, kw_only=True)
class AttentionResiduals(StreamRule):
    """How branches read the sums of blocks (`DepthAttention`).

    The first layer of a block ends the block before it: what comes to the layer is the sum of a finished block, and the
    layer's first branch begins a new sum. So the token embedding is a block of its own. All of a branch reads one sum:
    the mixers of Inkling 2's layers of full attention, which read one each for queries, keys and values, are not here.
    """

    layers_per_block: int
    eps: float
    """Of the RMS norm of the sums."""
    weighted: bool = True
    """Whether the norm has a weight (Kimi K3)."""
    normed_values: bool = False
    """Whether what is read is the weighted sum of the normalized sums (Inkling 2), and not of the sums (Kimi K3)."""
    scale: float = 1.0
    """The factor of scores: in Inkling 2 1 / sqrt(h)."""

    def __post_init__(self) -> None:
        if self.weighted and self.normed_values:
            raise ValueError("AttentionResiduals.weighted, normed_values: no model has both; make one of them False")

    def blocks_before(self, number: int) -> tuple[str, ...]:
        """Return the names of the sums of blocks that layers before the layer `number` have finished."""
        return tuple(f"block.{block}" for block in range(-(-number // self.layers_per_block)))

    def opened_by(self, number: int) -> str:
        """Return the name under which the layer `number` hands on the sum that it receives. "": it begins no block."""
        block, place = divmod(number, self.layers_per_block)
        return "" if place else f"block.{block}"

    def in_layer(self, kind: LayerKind, number: int, hidden_size: int) -> LayerKind:
        """Return the kind of the layer `number` with this rule, and with the sums that it reads and hands on."""
        reads, writes = (*kind.reads, *self.blocks_before(number)), kind.writes
        if name := self.opened_by(number):
            writes = (*writes, Handed(name=name, shape=(hidden_size,), splits_sequence=True))
        return replace(kind, stream=self, reads=reads, writes=writes)

    def make_layer(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        """Make a layer that reads the sums of blocks."""
        return StreamLayer(number, kind, model, factory, partial(_Depth, self))

    def make_end(self, model: ModelConfig, factory: Factory) -> nn.Module:
        """Make the attention over all sums behind the last layer."""
        return _DepthEnd(self, self.blocks_before(model.num_hidden_layers), model.hidden_size, factory)


class DepthAttention(nn.Module):
    """Attention of one query over the sums of blocks: the sum of softmax(query . norm(v)) v over the sums v.

    The query [h], and the weight [h] of the RMS norm if the rule has one, are trained, and whole on every tp rank. The
    query begins at 0: all sums then have one weight. `sources` is the number of sums.
    """

    weight: nn.Parameter | None

    def __init__(self, name: str, rule: AttentionResiduals, sources: int, hidden_size: int, factory: Factory):
        super().__init__()
        self.rule, self.sources = rule, sources
        self.query = shared_vector(f"{name}.query", hidden_size, ZEROS, factory.sharding)
        self.weight = None
        if rule.weighted:
            self.weight = shared_vector(f"{name}.norm.weight", hidden_size, ONES, factory.sharding)

    def forward(self, sums_sbh: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum, [s, b, h]. Scores and weights are fp32 at least."""
        key_h = self.query.to(wide(self.query.dtype)) * self.rule.scale
        if self.weight is not None:
            key_h = key_h * self.weight
        factors = [_norm_factor(v_sbh, self.rule.eps) for v_sbh in sums_sbh]
        scores = [(v_sbh * key_h).sum(-1) * factor for v_sbh, factor in zip(sums_sbh, factors, strict=True)]
        weights = list(torch.stack(scores, -1).softmax(-1).unbind(-1))
        if self.rule.normed_values:
            weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        parts = (weight[..., None] * v_sbh for weight, v_sbh in zip(weights, sums_sbh, strict=True))
        return reduce(torch.add, parts).to(sums_sbh[0].dtype)  # one after the other: in fp32 all would be large

    def flops_per_token(self, seq_length: int) -> int:
        """FLOPs of a token's forward pass: a product with the query, and a place in the sum, of each source."""
        return 4 * self.sources * len(self.query)


class _Depth(nn.Module):
    """What a layer's branches read of the sums of blocks."""

    def __init__(
        self, rule: AttentionResiduals, number: int, branches: Sequence[str], hidden_size: int, factory: Factory
    ):
        super().__init__()
        self.blocks, self.opened = rule.blocks_before(number), rule.opened_by(number)
        self.of = nn.ModuleDict()
        for place, name in enumerate(branches):
            sources = len(self.blocks) + 1 + (place if self.opened else 0)
            if sources > 1:  # the first branch of the model reads the embedding alone
                of = (f"layers.{number}.{name}_stream", rule, sources, hidden_size, factory)
                self.of[name] = DepthAttention(*of)

    def forward(self, x_sbh: Tensor, context: ForwardContext, branches: Branches) -> Tensor:
        """Return the sum of the layer's block so far, [s, b, h], from that before the layer."""
        sums = [context.handed[name] for name in self.blocks]
        opened = self.opened
        for name, branch in branches.items():
            y_sbh = branch(self.of[name]([*sums, x_sbh]) if name in self.of else x_sbh)
            if opened:
                context.handed[opened] = x_sbh
                sums.append(x_sbh)
                x_sbh, opened = y_sbh, ""
            else:
                x_sbh = x_sbh + y_sbh
        return x_sbh


class _DepthEnd(DepthAttention):
    """Attention over all sums of blocks behind the last layer."""

    def __init__(self, rule: AttentionResiduals, blocks: Sequence[str], hidden_size: int, factory: Factory):
        super().__init__("stream_end", rule, len(blocks) + 1, hidden_size, factory)
        self.blocks = blocks

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:  # type: ignore[override]
        """Return what the last norm reads, [s, b, h], from the sum of the last block."""
        return super().forward([*(context.handed[name] for name in self.blocks), x_sbh])
