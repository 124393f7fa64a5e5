"""A small mixture of experts: on a rank of any layout, and whole in one process as a straightforward reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from megapar_kernels.activations import swiglu
from megapar_kernels.dispatch import Implementation
from megapar_tools.verify import logical
from torch import Tensor, nn

from megapar.declare.context import ParallelContext, single
from megapar.declare.params import Init
from megapar.declare.sharding import Sharding
from megapar.expert_parallel import dispatch
from megapar.expert_parallel.balance import BalanceRule, Router, Routing
from megapar.expert_parallel.experts import Experts
from megapar.expert_parallel.route import RouterRule
from megapar.expert_parallel.row_counts import place_of_expert

HIDDEN = 6
NAME = "layers.3.mlp"


@dataclass(frozen=True)
class Case:
    """A mixture and the routes of its tokens.

    `routing`: "free" by random logits; "one": all to expert 1, as far as top_k allows; "ties": all logits are equal.
    `tokens` of each rank in turn.
    """

    num_experts: int = 5
    rule: RouterRule = field(default_factory=lambda: RouterRule(top_k=2))
    routing: str = "free"
    tokens: tuple[int, ...] = (7, 4, 9, 6)
    width: int = 8
    balance: BalanceRule = field(default_factory=BalanceRule)
    impl: Implementation = "torch"
    chunks: int = 1

    def tokens_of(self, rank: int, micro_batch: int = 0) -> int:
        return self.tokens[(rank + micro_batch) % len(self.tokens)]

    def inputs(self, rank: int, micro_batch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tokens [t, h] of a rank. Their first column is 1, so a router can send all to one expert."""
        generator = torch.Generator().manual_seed(100 * rank + micro_batch)
        x = torch.randn(self.tokens_of(rank, micro_batch), HIDDEN, generator=generator, dtype=torch.float64)
        x[:, 0] = 1
        return x.to(dtype)

    def coefficients(self, rank: int, micro_batch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The loss is the sum of these times the outputs [t, h]."""
        generator = torch.Generator().manual_seed(7000 + 100 * rank + micro_batch)
        shape = self.tokens_of(rank, micro_batch), HIDDEN
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def weights(self) -> dict[str, Tensor]:
        """Every logical tensor, fp64."""
        generator = torch.Generator().manual_seed(self.num_experts)
        router = torch.randn(self.num_experts, HIDDEN, generator=generator, dtype=torch.float64)
        if self.routing == "ties":
            router.zero_()
        if self.routing == "one":
            router[:, 0] = 0
            router[1, 0] = 9
        tensors = {f"{NAME}.router.weight": router}
        for expert in range(self.num_experts):
            for matrix, shape in (
                ("gate", (self.width, HIDDEN)),
                ("up", (self.width, HIDDEN)),
                ("down", (HIDDEN, self.width)),
            ):
                values = torch.randn(shape, generator=generator, dtype=torch.float64)
                tensors[f"{NAME}.experts.{expert}.{matrix}.weight"] = 0.5 * values
        return tensors


class Mixture(nn.Module):
    """A rank's router and experts, uninitialized."""

    def __init__(self, case: Case, ctx: ParallelContext, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.case = case
        self.ctx = ctx
        sharding = Sharding.of(ctx, dtype)
        init = Init("normal", 0.5)
        self.router = Router(
            f"{NAME}.router",
            HIDDEN,
            case.num_experts,
            case.rule,
            case.balance,
            sharding,
            init=init,
        )
        self.experts = Experts(
            f"{NAME}.experts",
            case.num_experts,
            HIDDEN,
            case.width,
            sharding,
            activation=partial(swiglu, impl="torch"),
            init=init,
            output_init=init,
        )

    def plan(self, indices_tk: Tensor) -> dispatch.Dispatch:
        number, chunks, ep, waiting = self.case.num_experts, self.case.chunks, self.ctx.ep, self.ctx.expert_gradients
        place_e = place_of_expert(number, ep, chunks, indices_tk.device)
        return dispatch.plan_dispatch(
            indices_tk, number, ep, self.ctx.etp, chunks=chunks, place_e=place_e, meanwhile=waiting
        )

    def mix(self, x_th: Tensor, weights_tk: Tensor, plan: dispatch.Dispatch) -> Tensor:
        """The experts' weighted results [t, h]."""
        impl = self.case.impl
        returning = dispatch.compute(self.experts, dispatch.send(x_th, weights_tk, plan, impl), plan, impl)
        return dispatch.combine(returning, plan, impl)

    def route(self, x_th: Tensor, indices: Tensor | None = None) -> Routing:
        return self.router(x_th, indices)

    def forward(self, x_th: Tensor) -> Tensor:
        routing = self.route(x_th)
        return self.mix(x_th, routing.weights, self.plan(routing.indices))


def small_mixture(case: Case, dtype: torch.dtype = torch.float32, ctx: ParallelContext | None = None) -> Mixture:
    mixture = Mixture(case, ctx or single(), dtype)
    logical.fill([mixture], case.weights())
    return mixture


def plain_select(scores: Sequence[float], rule: RouterRule, bias: Sequence[float] | None = None) -> list[int]:
    """One token's experts as one would choose them by hand."""
    biased = [score + shift for score, shift in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(scores) // rule.n_group
    groups = [list(range(group * size, (group + 1) * size)) for group in range(rule.n_group)]

    def worth(group: list[int]) -> float:
        best = sorted((biased[expert] for expert in group), reverse=True)
        return sum(best[: max(rule.top_k // rule.topk_group, 1)])

    kept = sorted(groups, key=lambda group: (-worth(group), group[0]))[: rule.topk_group]
    allowed = [expert for group in kept for expert in group]
    return sorted(allowed, key=lambda expert: (-biased[expert], expert))[: rule.top_k]


def plain_weights(logits_te: Tensor, indices_tk: Tensor, rule: RouterRule) -> Tensor:
    """The weights of chosen experts by the formulas of the papers."""
    if rule.scoring_func == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_te))
    else:
        scores = torch.exp(logits_te) / torch.exp(logits_te).sum(-1, keepdim=True)
    chosen = scores.gather(1, indices_tk)
    if rule.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * rule.routed_scaling_factor


def plain_mixture(x_th: Tensor, weights: Mapping[str, Tensor], case: Case) -> Tensor:
    """The mixture of whole `weights` in one process, expert by expert."""
    logits = x_th @ weights[f"{NAME}.router.weight"].t()
    # Chosen by hand from fp32 scores, as a router does.
    score = torch.sigmoid if case.rule.scoring_func == "sigmoid" else partial(torch.softmax, dim=-1)
    rows = score(logits.detach().float()).tolist()
    indices = torch.tensor([plain_select(row, case.rule) for row in rows], dtype=torch.int64)
    indices = indices.view(-1, case.rule.top_k)
    factors = plain_weights(logits, indices, case.rule)
    out = torch.zeros_like(x_th)
    for expert in range(case.num_experts):
        gate, up, down = (weights[f"{NAME}.experts.{expert}.{kind}.weight"] for kind in ("gate", "up", "down"))
        share = (factors * (indices == expert)).sum(-1, keepdim=True)
        out = out + share * ((F.silu(x_th @ gate.t()) * (x_th @ up.t())) @ down.t())
    return out
