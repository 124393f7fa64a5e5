"""The MLP of a layer, gated or plain, and that of a mixture's shared expert."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megapar_kernels.activations import (
    bias_gelu,
    geglu,
    geglu_erf,
    gelu,
    gelu_erf,
    reglu,
    reglu_squared,
    relu,
    relu_squared,
    silu,
    swiglu,
)
from megapar_kernels.bounded_swiglu import clamped_swiglu, swiglu_step
from megapar_kernels.dispatch import Implementation
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.activations import recompute
from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.declare.params import Init
from megapar.declare.random import Tokens
from megapar.tensor_parallel.layers import Columns, shared_vector
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.packing import takes_packed
from megapar_models.qk_norm import make_sub_norm

# The gated activation of each name: SwiGLU and GeGLU (Shazeer, arXiv 2002.05202), and gated squared ReLU (So et al.,
# arXiv 2109.08668). The names are Hugging Face's, except "auto": the activation of Llama.
GATED: Mapping[str, Callable[..., Tensor]] = {
    "auto": swiglu,
    "silu": swiglu,
    "gelu_pytorch_tanh": geglu,
    "gelu": geglu_erf,
    "relu": reglu,
    "relu2": reglu_squared,
}
# The activations of an MLP without gate. "auto" is that of GPT-2.
PLAIN: Mapping[str, Callable[..., Tensor]] = {
    "auto": gelu,
    "silu": silu,
    "gelu_pytorch_tanh": gelu,
    "gelu": gelu_erf,
    "relu": relu,
    "relu2": relu_squared,
}


def gated_activation(
    kind: LayerKind, model: ModelConfig, impl: Implementation, limit: float | None = None
) -> Callable[..., Tensor]:
    """The activation of a layer's gated MLP or experts: maps [..., gate then up] to [..., f].

    A second argument has weights [..., 1], which multiply the result. `limit` is None for `LayerKind.activation_limit`.

    Raises ConfigError for a name that GATED does not have.
    """
    name = kind.activation or model.hidden_act
    limit = kind.activation_limit if limit is None else limit
    if name == "clamped_swiglu":
        return partial(clamped_swiglu, limit=limit)
    if name == "swiglu_step":
        return partial(swiglu_step, limit=limit) if limit else partial(swiglu, impl=impl)
    if name not in GATED:
        raise _unknown(name, "gated", (*GATED, "clamped_swiglu", "swiglu_step"))
    return partial(GATED[name], impl=impl)


def _unknown(name: str, kind: str, known: Sequence[str]) -> ConfigError:
    text = f"there are {', '.join(known)}; for another one name an MLP of your own, MODULE:NAME, in LayerKind.mlp"
    error = ConfigError(f"LayerKind.activation={name}: no {kind} activation; {text}")
    error.everywhere = True  # every rank builds such a layer, or none needs one
    return error


class GatedMLP(nn.Module):
    """down(act(gate x) * up x), with gate and up [width, h] in one matrix, by option with biases.

    tp cuts gate and up by their output dimension, and down by its input dimension. `name` is the prefix of the weights'
    names, such as layers.3.mlp. `activation` is as in `gated_activation`. `norm` is the rule of a norm of what down
    reads, over its whole width.
    """

    READER = "gate_up"

    def __init__(
        self,
        name: str,
        hidden_size: int,
        width: int,
        activation: Callable[[Tensor], Tensor],
        factory: Factory,
        *,
        bias: bool = False,
        norm: NormRule | None = None,
    ):
        super().__init__()
        tp = factory.sharding.tp
        self.activation = activation
        self.sub_norm = None if norm is None else make_sub_norm(name, width, norm, factory)
        columns = [Columns.even(f"{name}.gate", width, tp), Columns.even(f"{name}.up", width, tp)]
        self.gate_up = factory.column_parallel(hidden_size, columns, bias=bias)
        self.down = factory.row_parallel(f"{name}.down", width, hidden_size, bias=bias)
        packs = self.sub_norm is None and takes_packed(self.down)
        if packs and isinstance(activation, partial) and activation.func in GATED.values():
            self.activation = partial(activation, packed=True)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        inner_sbf = recompute.remade(self.activation, self.gate_up(x_sbh, context.tokens))
        return self.down(inner_sbf if self.sub_norm is None else self.sub_norm(inner_sbf), context.tokens)


class DenseMLP(GatedMLP):
    """The gated MLP of layer `number`, of the width that `LayerKind.width_of_mlp` says."""

    READS = frozenset({"mlp_width", "mlp_bias", "activation", "activation_limit", "sub_norms"})

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        activation = gated_activation(kind, model, factory.kernels.activation)
        name = f"layers.{number}.mlp"
        width = kind.width_of_mlp(model)
        norm = kind.norm if kind.sub_norms else None
        super().__init__(name, model.hidden_size, width, activation, factory, bias=kind.mlp_bias, norm=norm)


def plain_activation(kind: LayerKind, model: ModelConfig, impl: Implementation) -> Callable[..., Tensor]:
    """The activation of experts without gate: maps [..., f] to the same shape.

    A second argument has weights [..., 1], which multiply the result. Raises ConfigError for a name that PLAIN does not
    have.
    """
    name = kind.activation or model.hidden_act
    if name not in PLAIN:
        raise _unknown(name, "plain", [*PLAIN])
    return partial(_weighted, partial(PLAIN[name], impl=impl))


def _weighted(activation: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | None = None) -> Tensor:
    y = activation(x)
    return y if weights is None else (y * weights).to(y.dtype)


class OfWeightedInputs(torch.autograd.Function):
    """act(w x), [rows, f], of x [rows, gate then up] and weights w [rows, 1].

    Matrices without biases pass on a factor of their inputs. So the weights of inputs multiply x, and rows travel to
    the experts as they are. Backward computes w x again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation = activation
        return activation((x * weights).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            weighted = (x * weights).to(x.dtype).requires_grad_()
            (of_weighted,) = torch.autograd.grad(ctx.activation(weighted), weighted, grad)
        of_weights = (of_weighted * x).sum(-1, keepdim=True, dtype=torch.promote_types(x.dtype, weights.dtype))
        return (of_weighted * weights).to(x.dtype), of_weights.to(weights.dtype), None


class UngatedMLP(nn.Module):
    """down(act(up x)), of any width. tp cuts up by its outputs and down by its inputs.

    `name` is the prefix of the weights' names. `LayerKind.activation` is a key of PLAIN, or xielu.
    """

    def __init__(self, name: str, width: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        self.activation = kind.activation or model.hidden_act
        self.impl = factory.kernels.activation
        self.xielu = XIELU(f"{name}.activation", factory) if self.activation == "xielu" else None
        if self.xielu is None and self.activation not in PLAIN:
            raise _unknown(self.activation, "plain", (*PLAIN, "xielu"))
        columns = [Columns.even(f"{name}.up", width, factory.sharding.tp)]
        self.up = factory.column_parallel(model.hidden_size, columns, bias=kind.mlp_bias)
        self.down = factory.row_parallel(f"{name}.down", width, model.hidden_size, bias=kind.mlp_bias)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        return self.down(self._inner(x_sbh, context.tokens), context.tokens)

    def _inner(self, x_sbh: Tensor, tokens: Tokens) -> Tensor:
        """act(up x)."""
        if self.xielu is not None:
            return recompute.remade(self.xielu, self.up(x_sbh, tokens))
        activation = PLAIN[self.activation]
        if activation is not gelu or self.impl == "torch" or self.up.bias is None:
            return recompute.remade(partial(activation, impl=self.impl), self.up(x_sbh, tokens))
        # The kernel adds the bias itself, which saves a pass over the activations.
        return recompute.remade(partial(bias_gelu, impl=self.impl), self.up.product(x_sbh, tokens), self.up.bias)


class PlainMLP(UngatedMLP):
    """The MLP without gate of layer `number`, of the width that `LayerKind.width_of_mlp` says."""

    READS = frozenset({"mlp_width", "mlp_bias", "activation"})

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(f"layers.{number}.mlp", kind.width_of_mlp(model), kind, model, factory)


class XIELU(nn.Module):
    """xIELU (arXiv 2411.13010): quadratic above 0, exponential below, with a trained slope for each of the two.

    alpha_p = softplus(p) and alpha_n = 1/2 + softplus(n) of the weights p and n, [1] each:
    x > 0: alpha_p x^2 + x/2; else: alpha_n (exp(min(x, -1e-6)) - 1 - x) + x/2. Both slopes start at 0.8.
    """

    def __init__(self, name: str, factory: Factory):
        super().__init__()
        start_p = Init("constant", math.log(math.expm1(0.8)))
        start_n = Init("constant", math.log(math.expm1(0.8 - 0.5)))
        # Each tp rank sees some columns of the MLP alone, so its gradient is a part of the sum.
        self.alpha_p = shared_vector(f"{name}.alpha_p", 1, start_p, factory.sharding, partial=True)
        self.alpha_n = shared_vector(f"{name}.alpha_n", 1, start_n, factory.sharding, partial=True)

    def forward(self, x: Tensor) -> Tensor:
        alpha_p = F.softplus(self.alpha_p)
        alpha_n = 0.5 + F.softplus(self.alpha_n)
        below = (torch.expm1(x.clamp(max=-1e-6)) - x) * alpha_n + 0.5 * x
        return torch.where(x > 0, alpha_p * x * x + 0.5 * x, below)
