"""A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538).

The experts lie on the ranks of ep, and each token goes to a few of them. The rows of tokens travel there and back
(`megapar.expert_parallel.dispatch`). No token is dropped. Mixtral's page has the names of the weights
(`megapar_models.families.mixtral`).

Shapes: s sequence (s/tp under sequence parallelism), b micro-batch, h hidden, t tokens routed by this rank, k experts
of a token.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.declare.batch import add_loss
from megapar.declare.params import Init, cut, shared_piece
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.balance import BalanceRule, Router, Routing
from megapar.expert_parallel.dispatch import Dispatch, combine, compute, plan_dispatch, send
from megapar.expert_parallel.route import RouterRule
from megapar.expert_parallel.row_counts import place_of_expert
from megapar.tensor_parallel.layers import local_linear
from megapar.tensor_parallel.regions import copy_to_tp, reduce_from_tp
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext, rows_of_rank
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP, GatedMLP, OfWeightedInputs, UngatedMLP, gated_activation, plain_activation
from megapar_models.norms import NormRule

ROUTER_LOSS = "router"
"""Name of the sum of the experts' balance losses (`megapar.expert_parallel.balance`), over all layers."""


def router_rule(moe: MoEConfig) -> RouterRule:
    """How the options of `model.moe` turn logits into experts and weights."""
    return RouterRule(
        top_k=moe.num_experts_per_tok,
        scoring_func=moe.scoring_func,
        norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
    )


def balance_rule(moe: MoEConfig) -> BalanceRule:
    """What evens out the load, as the options of `model.moe` say."""
    if moe.balance == "micro_batch":
        raise ValueError("model.moe.balance=micro_batch: validate() refuses it")
    return BalanceRule(moe.balance, moe.router_aux_loss_coef, moe.router_bias_update_rate, moe.router_z_loss_coef)


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of weight * expert(token), plus the shared expert's output if there is one."""

    READS = frozenset(
        {
            *("mixture", "router", "router_bias", "router_dtype", "activation", "activation_limit"),
            *("expert_bias", "plain_experts", "averages_shared", "weighted_inputs", "shared_activation_limit"),
            *("expert_latent", "expert_scale"),
        }
    )

    place_e: Tensor | None

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        assert kind.mixture is not None, "a layer with mlp mixture has options of it"
        moe = kind.mixture
        name = f"layers.{number}.mlp"
        self.number = number
        self.num_experts = moe.num_experts
        self.sharding = factory.sharding
        self.impl = factory.kernels.token_rows
        sharding = factory.sharding
        place_e = place_of_expert(self.num_experts, sharding.ep, sharding.expert_chunks, sharding.device)
        self.register_buffer("place_e", place_e)
        self.router = Router(
            f"{name}.router",
            model.hidden_size,
            self.num_experts,
            kind.router or router_rule(moe),
            balance_rule(moe),
            factory.sharding,
            init=factory.init,
            layer=number,
            logit_bias=kind.router_bias,
            in_model_dtype=kind.router_dtype == "model",
            expert_scale=kind.expert_scale,
        )
        self.latent_in = self.latent_out = None
        width, latent = model.hidden_size, kind.expert_latent
        if latent:
            self.latent_in = OwnTokensLinear(f"{name}.latent_in", width, latent, factory.init, factory)
            self.latent_out = OwnTokensLinear(f"{name}.latent_out", latent, width, factory.output_init, factory)
        made = plain_activation if kind.plain_experts else gated_activation
        activation = made(kind, model, factory.kernels.activation_of_experts)
        if kind.weighted_inputs:
            activation = partial(_of_weighted_inputs, activation)
        self.experts = factory.experts(
            f"{name}.experts",
            self.num_experts,
            latent or width,
            moe.moe_intermediate_size,
            activation=activation,
            token_share=Fraction(moe.num_experts_per_tok, self.num_experts),
            bias=kind.expert_bias,
            inner=("up",) if kind.plain_experts else ("gate", "up"),
        )
        self.shared = SharedExpert(name, kind, model, moe, factory) if moe.shared_expert_intermediate_size else None
        self.averages_shared = kind.averages_shared

    def forward(self, x_sbh: Tensor, context: ForwardContext, routed_by_sbh: Tensor | None = None) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape. The router reads `routed_by_sbh`, or else x."""
        own_sbh = _tokens_of_rank(self._copied(x_sbh), self.sharding)
        read_sbh = own_sbh
        if routed_by_sbh is not None:
            read_sbh = _tokens_of_rank(self._copied(routed_by_sbh), self.sharding)
        routing, dispatch = self._route(read_sbh, context)
        experts = self.experts
        rows_sbl = own_sbh if self.latent_in is None else self.latent_in(own_sbh)
        arriving = send(rows_sbl.flatten(0, 1), routing.weights, dispatch, self.impl, experts.products)
        # The shared expert runs while the rows travel.
        shared_sbh = None
        if self.shared is not None:
            shared_sbh = self.shared(x_sbh, context)
        returning = compute(experts, arriving, dispatch, self.impl)
        y_sbh = combine(returning, dispatch, self.impl, experts.products_of_down).view(rows_sbl.shape)
        if self.latent_out is not None:
            y_sbh = self.latent_out(y_sbh)
        if self.training and self.router.balance.has_loss:
            y_sbh = self._with_losses(y_sbh, routing, context)
        y_sbh = _tokens_of_all(y_sbh, x_sbh.shape[0], self.sharding)
        if shared_sbh is not None:
            y_sbh = y_sbh + shared_sbh
            if self.averages_shared:
                y_sbh = y_sbh / 2
        return y_sbh

    def _copied(self, x_sbh: Tensor) -> Tensor:
        """`x_sbh`. If all tp ranks have the same, backward adds up their gradients: each covers one part."""
        if self.sharding.sequence_parallel:
            return x_sbh
        return copy_to_tp(x_sbh, self.sharding.tp)

    def _route(self, own_sbh: Tensor, context: ForwardContext) -> tuple[Routing, Dispatch]:
        """The experts of each token of this rank, and the dispatch of their rows.

        A recomputed forward pass gets the experts of the first one: its logits may differ in the last bit on a GPU, and
        other experts would be another function.
        """
        dispatch = context.dispatches.get(self.number)
        if dispatch is not None:
            return self.router(own_sbh, dispatch.indices_tk), dispatch
        routing = self.router(own_sbh)
        sharding = self.sharding
        dispatch = plan_dispatch(
            routing.indices,
            self.num_experts,
            sharding.ep,
            sharding.etp,
            self.number,
            sharding.expert_load,
            sharding.expert_chunks,
            self.place_e,
            sharding.expert_gradients,
        )
        context.dispatches[self.number] = dispatch
        self.router.count(dispatch.chosen_e)
        return routing, dispatch

    def _with_losses(self, y_sbh: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """`y_sbh`. Its backward also runs the backward of the experts' balance losses."""
        weights_sb = _tokens_of_rank(rows_of_rank(context.batch.weights_bs.t(), self.sharding), self.sharding)
        loss = self.router.loss(routing, weights_sb, (self.sharding.tp, self.sharding.cp))
        return add_loss(y_sbh, loss, context.batch, ROUTER_LOSS)


class DenseAndExperts(nn.Module):
    """A gated MLP and a mixture of experts beside it, with norms of their own (Gemma 4).

    It reads the residual stream itself, so the layer has no norm in front of it (`LayerKind.mlp_norms`). The router
    reads the stream times a weight [h], after a norm without weight, and divided by the root of the width.
    """

    READS = DenseMLP.READS | MixtureOfExperts.READS - {"averages_shared", "weighted_inputs"}

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name, width = f"layers.{number}", model.hidden_size
        self.dense = DenseMLP(number, kind, model, factory)
        self.mixture = MixtureOfExperts(number, kind, model, factory)
        self.norm = factory.norm(f"{name}.mlp_norm", width, kind.norm)
        self.dense_output_norm = factory.norm(f"{name}.mlp.dense_output_norm", width, kind.norm)
        self.experts_norm = factory.norm(f"{name}.mlp.experts_norm", width, kind.norm)
        self.experts_output_norm = factory.norm(f"{name}.mlp.experts_output_norm", width, kind.norm)
        # Its weight multiplies what is rounded already, as in transformers: experts are chosen by the result.
        rule = NormRule(kind.norm.eps, cast_first=True)
        self.router_norm = factory.norm(f"{name}.mlp.router_norm", width, rule)
        self.router_factor = width**-0.5

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        dense_sbh = self.dense_output_norm(self.dense(recompute.remade(self.norm, x_sbh), context))
        routed_by_sbh = recompute.remade(self._routed_by, x_sbh)
        experts_sbh = self.mixture(recompute.remade(self.experts_norm, x_sbh), context, routed_by_sbh)
        return dense_sbh + self.experts_output_norm(experts_sbh)

    def _routed_by(self, x_sbh: Tensor) -> Tensor:
        normed_sbh: Tensor = self.router_norm(x_sbh)
        return normed_sbh * self.router_factor


def _of_weighted_inputs(activation: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = OfWeightedInputs.apply(x, weights, activation)
    return y


def _tokens_of_rank(x_sb: Tensor, sharding: Sharding) -> Tensor:
    """The tokens routed by this rank, of hidden states [s, b, h] or weights [s, b].

    Under sequence parallelism each tp rank has tokens of its own already. Otherwise all have the same, and each takes a
    part of the sequence, so no token is routed twice. The parts may be uneven.
    """
    tp = sharding.tp
    if tp.size == 1 or sharding.sequence_parallel:
        return x_sb
    start, stop = cut(x_sb.shape[0], tp)
    return x_sb[start:stop]


def _tokens_of_all(y_sbh: Tensor, length: int, sharding: Sharding) -> Tensor:
    """The inverse for results: the tokens of all tp ranks, [length, b, h], if they had the same before."""
    tp = sharding.tp
    if tp.size == 1 or sharding.sequence_parallel:
        return y_sbh
    start, stop = cut(length, tp)
    # The parts may be uneven, so they are not gathered but added: each rank has zeros where the others have tokens.
    return reduce_from_tp(F.pad(y_sbh, (0, 0, 0, 0, start, length - stop)), tp)


class OwnTokensLinear(nn.Module):
    """y = x W^T with the whole matrix [out, in] on every tp rank, for the tokens that this rank routes.

    So each rank has a part of the gradient.
    """

    def __init__(self, name: str, in_features: int, out_features: int, init: Init, factory: Factory):
        super().__init__()
        shape = (out_features, in_features)
        piece = shared_piece(f"{name}.weight", shape, factory.sharding.tp, partial=True)
        self.products = factory.products_of(name)
        self.weight = factory.sharding.parameter((piece,), shape, init, decay=True, update="matrix")

    def forward(self, x_sbi: Tensor) -> Tensor:
        return local_linear(x_sbi, self.weight, None, self.products)


class SharedExpert(nn.Module):
    """An MLP for every token, by option multiplied by sigmoid(gate x), one number for each token (Qwen2-MoE)."""

    def __init__(self, name: str, kind: LayerKind, model: ModelConfig, moe: MoEConfig, factory: Factory):
        super().__init__()
        width = moe.shared_expert_intermediate_size
        self.mlp: nn.Module
        if kind.plain_experts:
            self.mlp = UngatedMLP(f"{name}.shared", width, kind, model, factory)
        else:
            limit = kind.shared_activation_limit
            activation = gated_activation(kind, model, factory.kernels.activation, limit)
            self.mlp = GatedMLP(f"{name}.shared", model.hidden_size, width, activation, factory)
        self.gate = None
        if moe.shared_expert_gate:
            sharding = factory.sharding
            # Every rank multiplies the tokens that it has: all of them, or its part under sequence parallelism.
            shape = (1, model.hidden_size)
            piece = shared_piece(f"{name}.shared_gate.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
            self.gate = sharding.parameter((piece,), shape, factory.init, decay=True)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        y_sbh: Tensor = self.mlp(x_sbh, context)
        if self.gate is None:
            return y_sbh
        return F.linear(x_sbh, self.gate).sigmoid() * y_sbh
