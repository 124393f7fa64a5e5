"""A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538).

Each token goes to a few of the experts, which lie on the ranks of ep. The rows of tokens travel there and back
(`megapar.expert_parallel.dispatch`). No token is dropped.

Shapes: s sequence (s/tp under sequence parallelism), b micro-batch, h hidden, t tokens that this rank routes, e experts,
k experts of a token.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megapar.batch import add_loss
from megapar.expert_parallel import balance, route
from megapar.expert_parallel.dispatch import combine, plan_dispatch, receive, send
from megapar.expert_parallel.experts import Experts
from megapar.expert_parallel.route import RouterRule
from megapar.expert_parallel.router import Router
from megapar.params import cut
from megapar.tensor_parallel.regions import copy_to_tp, reduce_from_tp
from megapar_models.stage import Blueprint, ForwardContext, Routing, rows_of_rank


def router_rule(blueprint: Blueprint) -> RouterRule:
    """How the options of `model.moe` turn logits into experts and weights."""
    moe = blueprint.model.moe
    return RouterRule(
        top_k=moe.num_experts_per_tok,
        scoring=moe.scoring_func,
        norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
    )


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of weight * expert(token), plus the shared expert's output if there is one.

    `activation` is the gated activation of the experts. `shared` maps x_sbh to x_sbh for every token.
    """

    def __init__(
        self,
        number: int,
        blueprint: Blueprint,
        activation: Callable[..., Tensor],
        shared: nn.Module | None = None,
    ):
        super().__init__()
        model = blueprint.model
        self.number = number
        self.moe = model.moe
        self.rule = router_rule(blueprint)
        self.sharding = blueprint.sharding
        name = f"layers.{number}.mlp"
        self.router = Router(f"{name}.router", model.hidden_size, model.moe, blueprint.sharding, init=blueprint.init)
        self.experts = Experts(
            f"{name}.experts",
            model.moe.num_experts,
            model.hidden_size,
            model.moe.moe_intermediate_size,
            blueprint.sharding,
            init=blueprint.init,
            output_init=blueprint.output_init,
            activation=activation,
            impl=blueprint.kernels.activation,
        )
        self.shared = shared

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Map [s or s/tp, b, h] to the same shape."""
        x_th = self._tokens_of_rank(x_sbh)
        logits_te = self.router(x_th)
        routing = self._routing(logits_te, context)
        arriving = send(x_th, routing.dispatch)
        # The shared expert runs while the rows travel.
        shared_sbh = None if self.shared is None else self.shared(x_sbh)
        rows = self.experts(receive(arriving, routing.dispatch), routing.dispatch.rows_of_expert)
        weights_tk = route.weights(logits_te, routing.indices_tk, self.rule)
        y_th = combine(rows, weights_tk, routing.dispatch)
        if self.training:
            y_th = self._with_losses(y_th, logits_te, routing, context)
        y_sbh = self._whole(y_th, x_sbh)
        return y_sbh if shared_sbh is None else y_sbh + shared_sbh

    def _routing(self, logits_te: Tensor, context: ForwardContext) -> Routing:
        """The experts of each token, and where rows go. A recomputed forward pass gets those of the first one.

        Recomputed logits may differ in the last bit on a GPU, and then other experts could be chosen.
        """
        routing = context.routings.get(self.number)
        if routing is None:
            indices_tk = route.select(logits_te, self.rule, self.router.bias)
            dispatch = plan_dispatch(indices_tk, self.moe.num_experts, self.sharding.ep, self.sharding.etp)
            routing = Routing(indices_tk, dispatch)
            context.routings[self.number] = routing
            if self.training:
                self.router.count(indices_tk)
        return routing
