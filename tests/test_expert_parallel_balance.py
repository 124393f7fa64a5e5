"""The balance of experts: each loss against its formula, and the same losses, counts and biases in every layout."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.grid import Grid
from megapar.declare import context
from megapar.declare.batch import MicroBatch, StepScope, add_loss
from megapar.declare.context import ParallelContext, single
from megapar.declare.params import Init
from megapar.declare.sharding import Sharding
from megapar.declare.tally import end_step
from megapar.expert_parallel import balance, route
from megapar.expert_parallel.balance import BalanceRule, Router
from megapar.expert_parallel.route import RouterRule
from tests.support import close
from tests.support.distributed import rank_device, run_ranks
from tests.support.flat import flatten

EXPERTS, HIDDEN, SAMPLES, LENGTH = 5, 6, 8, 12
NAME = "layers.0.mlp.router"
SOFTMAX = RouterRule(top_k=2)
SIGMOID = RouterRule(top_k=2, scoring_func="sigmoid")
SEQUENCE = BalanceRule("sequence", coef=0.5)
LAGGED = BalanceRule("global", coef=0.5)
Z = BalanceRule("none", z_coef=0.25)
BESIDE_BIAS = BalanceRule("bias+sequence", coef=0.5, bias_rate=0.03)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(step: int = 0) -> Tensor:
    """Hidden states of all samples of a step, [s, b, h]. Their first column is 1, so a router can prefer experts."""
    x = draw(LENGTH, SAMPLES, HIDDEN, seed=step)
    x[..., 0] = 1
    return x


def target_weights() -> Tensor:
    """[s, b]: all differ, some are 0, and one sample has no target."""
    weights = draw(LENGTH, SAMPLES, seed=77).abs()
    weights[::5] = 0
    weights[:, 3] = 0
    return weights


def router_weight(experts: int = EXPERTS) -> Tensor:
    return draw(experts, HIDDEN, seed=99)


def last_counts() -> Tensor:
    return torch.tensor([40, 0, 3, 17, 90])


# Formulas


def by_formula(logits_sbe: Tensor, weights_sb: Tensor, rule: RouterRule, kind: BalanceRule) -> Tensor:
    """The whole loss of a step, sample by sample and expert by expert. No bias takes part in it."""
    scores = logits_sbe.sigmoid() if rule.scoring_func == "sigmoid" else logits_sbe.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    scores_te = route.scores(logits_sbe.float().detach().flatten(0, 1), rule)
    chosen = route.select(scores_te, rule).view(*weights_sb.shape, rule.top_k)
    length, samples, experts = logits_sbe.shape
    loss = logits_sbe.new_zeros(())
    for sample in range(samples):
        for expert in range(experts):
            if kind.of_samples:
                frequency = experts / (rule.top_k * length) * int((chosen[:, sample] == expert).sum())
                mean = probabilities[:, sample, expert].mean()
                loss = loss + kind.coef * weights_sb[:, sample].sum() * frequency * mean
            elif kind.kind == "global":
                share = last_counts()[expert] / last_counts().sum()
                weighted = (weights_sb[:, sample] * probabilities[:, sample, expert]).sum()
                loss = loss + kind.coef * experts * share * weighted
    z = torch.log(torch.exp(logits_sbe).sum(-1)).square()
    return loss + kind.z_coef * (weights_sb * z).sum()


KINDS = [SEQUENCE, LAGGED, Z, replace(SEQUENCE, z_coef=0.1), BESIDE_BIAS]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rule", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_each_loss_is_its_formula(rule: RouterRule, kind: BalanceRule) -> None:
    """Faults moe-balance-loss-without-gradient, moe-masked-tokens: value and gradient of the router.

    Some tokens and a whole sample weigh nothing. A bias that turns every choice around changes no loss.
    """
    router = make_router(single(), rule, kind)
    router.last_counts.copy_(last_counts())
    if kind.has_bias:
        router.bias.copy_(torch.tensor([-3.0, 1, 2, -2, 2]))
    routing = router(tokens())
    loss = router.loss(routing, target_weights(), [])
    loss.backward()
    weight = router_weight().double().requires_grad_()
    expected = by_formula(tokens().double() @ weight.t(), target_weights().double(), rule, kind)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert router.weight.grad is not None
    assert weight.grad is not None
    assert weight.grad.norm() > 0.1
    assert (router.weight.grad - weight.grad).norm() < 1e-5 * weight.grad.norm()


def test_the_loss_beside_a_bias_counts_the_best_scores_of_all_groups() -> None:
    """DeepSeek-V3's equation 18: the choices of a token are limited to its best groups, those of the loss are not."""
    rule = RouterRule(top_k=2, scoring_func="sigmoid", n_group=3, topk_group=1)
    router = make_router(single(), rule, BESIDE_BIAS, experts=6)
    routing = router(tokens())
    logits = tokens().double() @ router_weight(6).double().t()
    assert (routing.indices // 2 == routing.indices[:, :1] // 2).all()  # both of one group
    expected = by_formula(logits, target_weights().double(), replace(rule, n_group=1), BESIDE_BIAS)
    assert router.loss(routing, target_weights(), []).item() == pytest.approx(expected.item(), rel=1e-5)
    of_choices = by_formula(logits, target_weights().double(), rule, BESIDE_BIAS)
    assert of_choices.item() != pytest.approx(expected.item(), rel=1e-3)


def test_shares_are_equal_at_the_first_step() -> None:
    router = make_router(single(), SOFTMAX, LAGGED)
    loss = router.loss(router(tokens()), target_weights(), [])
    assert loss.item() == pytest.approx(0.5 * target_weights().sum().item(), rel=1e-6)


def make_router(ctx: ParallelContext, rule: RouterRule, kind: BalanceRule, experts: int = EXPERTS) -> Router:
    router = Router(
        NAME,
        HIDDEN,
        experts,
        rule,
        kind,
        Sharding.of(ctx, torch.float32),
        init=Init("normal", 1.0),
    )
    logical.fill([router], {f"{NAME}.weight": router_weight(experts)})
    return router


# Layouts


@dataclass(frozen=True)
class Layout:
    """Positions are dealt over tp and cp, and samples over dp and micro-batches."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    samples: int = SAMPLES  # of a micro-batch

    def context(self) -> ParallelContext:
        return context.create(Grid(dp=self.dp, tp=self.tp, cp=self.cp), device=rank_device(dist.get_rank()))

    def micro_batches(self, x_sb: Tensor, ctx: ParallelContext) -> list[Tensor]:
        """This rank's parts of a tensor [s, b, ...] of all samples."""
        samples = x_sb.chunk(self.dp, dim=1)[ctx.dp.rank]
        positions = samples.chunk(self.tp * self.cp)[ctx.cp.rank * self.tp + ctx.tp.rank]
        return list(positions.split(self.samples, dim=1))


LAYOUTS_OF_4 = [
    Layout(dp=4, samples=1),
    Layout(tp=4, samples=2),
    Layout(cp=4, samples=8),
    Layout(tp=2, cp=2, samples=4),
    Layout(dp=2, tp=2, samples=2),
    Layout(dp=2, cp=2, samples=4),
]


def batch_of(grad_scale: Tensor) -> MicroBatch:
    nothing = torch.zeros(1, 1)
    batch = MicroBatch.of_samples(nothing.long(), nothing.long(), nothing, nothing[0].long())
    return replace(batch, scope=StepScope(grad_scale))


def losses_alone(layout: Layout, ctx: ParallelContext, rule: RouterRule, kind: BalanceRule) -> dict[str, Any]:
    """A step without a language loss: the sum of the losses, and the remaining gradients."""
    router = make_router(ctx, rule, kind)
    router.last_counts.copy_(last_counts())
    flat = flatten([router], ctx, zero_stage=0, bucket_mb=1)
    flat.start_step()
    axes = [ctx.tp, ctx.cp]
    losses = []
    gradients = []
    parts = zip(layout.micro_batches(tokens(), ctx), layout.micro_batches(target_weights(), ctx), strict=True)
    for x, weights_sb in parts:
        x = x.clone().requires_grad_()
        loss = router.loss(router(x), weights_sb, axes)
        out = add_loss(x, loss, batch_of(torch.tensor(0.125)), "router")
        (out * 0).sum().backward()
        losses.append(loss.item())
        gradients.append(x.grad)
    flat.gradients.finish()
    weights = logical.held([router], ctx, logical.main_gradients)
    return {"loss": sum(losses), "inputs": torch.cat(gradients, dim=1), "weights": weights}


def losses_on_ranks(layouts_of_ranks: list[Layout]) -> list[list[dict[str, Any]]]:
    found = []
    for layout in layouts_of_ranks:
        ctx = layout.context()
        found.append([losses_alone(layout, ctx, rule, kind) for rule in (SOFTMAX, SIGMOID) for kind in KINDS])
    return found


def test_losses_alone_are_the_same_in_every_layout() -> None:
    """Fault moe-balance-loss-scaled: over dp, tp, cp and sizes of micro-batches."""
    alone = [losses_alone(Layout(), single(), rule, kind) for rule in (SOFTMAX, SIGMOID) for kind in KINDS]
    small = [losses_alone(Layout(samples=1), single(), rule, kind) for rule in (SOFTMAX, SIGMOID) for kind in KINDS]
    ranks = run_ranks(4, losses_on_ranks, LAYOUTS_OF_4)
    for number, expected in enumerate(alone):
        whole = logical.assemble([expected["weights"]])
        assert whole[f"{NAME}.weight"].norm() > 0.01
        close.assert_close(logical.assemble([small[number]["weights"]]), whole)
        for place, layout in enumerate(LAYOUTS_OF_4):
            found = [rank[place][number] for rank in ranks]
            assert sum(part["loss"] for part in found) == pytest.approx(expected["loss"], rel=1e-5)
            close.assert_close(logical.assemble([part["weights"] for part in found]), whole)
            for rank, part in enumerate(found):
                ctx = context.planned(Grid(dp=layout.dp, tp=layout.tp, cp=layout.cp), rank, device=torch.device("cpu"))
                mine = torch.cat(layout.micro_batches(expected["inputs"], ctx), dim=1)
                assert (part["inputs"] - mine).norm() <= 1e-5 * mine.norm()


# The bias


def route_and_count(router: Router, x_sbh: Tensor) -> None:
    router.count(route.counts(router(x_sbh).indices, EXPERTS))


def trajectory(layout: Layout, ctx: ParallelContext) -> list[Tensor]:
    """The bias after each of 20 steps."""
    router = make_router(ctx, SIGMOID, BESIDE_BIAS)
    found = []
    for step in range(20):
        for x in layout.micro_batches(tokens(step), ctx):
            route_and_count(router, x)
        router.eval()
        route_and_count(router, tokens(step))  # an evaluation counts nothing
        router.train()
        ((_, totals),) = end_step([router], torch.zeros(()))
        assert totals.sum() == LENGTH * SAMPLES * SIGMOID.top_k
        assert torch.equal(router.last_counts, totals)
        found.append(router.bias.clone())
    return found


def trajectories(layouts_of_ranks: list[Layout]) -> list[list[Tensor]]:
    return [trajectory(layout, layout.context()) for layout in layouts_of_ranks]


def test_biases_are_the_same_on_all_ranks_of_every_layout() -> None:
    """Fault moe-bias-drifts: 20 steps, bit for bit, and their mean stays 0."""
    expected = trajectory(Layout(), single())
    assert expected[-1].abs().max() > 0.1
    for bias in expected:
        assert bias.mean().abs() < 1e-7
    for rank in run_ranks(4, trajectories, LAYOUTS_OF_4):
        for found in rank:
            assert all(torch.equal(bias, other) for bias, other in zip(found, expected, strict=True))


def test_a_bias_moves_towards_the_mean_load() -> None:
    bias = torch.zeros(4)
    moved = balance.updated_bias(bias, torch.tensor([4, 2, 2, 0]), rate=0.5)
    assert moved.tolist() == [-0.5, 0.0, 0.0, 0.5]
    # Three experts gain and one loses: without its mean taken away, the bias would rise at each step.
    assert balance.updated_bias(bias, torch.tensor([9, 1, 1, 1]), rate=0.5).tolist() == [-0.75, 0.25, 0.25, 0.25]
    assert balance.updated_bias(bias, torch.zeros(4, dtype=torch.int64), rate=0.5).tolist() == [0.0] * 4


def test_biases_even_out_the_load() -> None:
    """Of tokens in favor of one expert: after 300 steps the fullest expert is near the mean."""
    router = make_router(single(), RouterRule(top_k=1, scoring_func="sigmoid"), BalanceRule("bias", bias_rate=0.02))
    router.weight.data[2, 0] += 3
    loads = []
    for _ in range(300):
        route_and_count(router, tokens())
        ((_, totals),) = end_step([router], torch.zeros(()))
        loads.append(totals.max().item() * EXPERTS / totals.sum().item())
    assert loads[0] > 2
    assert sum(loads[-20:]) / 20 < 1.3


def test_a_bias_at_rate_0_stays_as_it_is() -> None:
    router = make_router(single(), SIGMOID, replace(BESIDE_BIAS, bias_rate=0.0))
    router.bias.copy_(torch.tensor([0.3, 1, 2, 0.7, 2]))
    before = router.bias.clone()
    route_and_count(router, tokens())
    end_step([router], torch.zeros(()))
    assert torch.equal(router.bias, before)


def test_a_rank_without_routers_has_nothing_to_end() -> None:
    assert end_step([], torch.zeros(())) == []
