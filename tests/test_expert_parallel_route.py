"""Routing against plain formulas: the experts of a token, and their weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapar.expert_parallel import route
from megapar.expert_parallel.route import RouterRule
from tests.support.mixtures import HIDDEN, Case, plain_select, plain_weights, small_mixture

SOFTMAX = RouterRule(top_k=2)
UNNORMALIZED = RouterRule(top_k=3, norm_topk_prob=False, routed_scaling_factor=2.5)
SIGMOID = RouterRule(top_k=2, scoring_func="sigmoid", routed_scaling_factor=2.5)
GROUPS = RouterRule(top_k=4, scoring_func="sigmoid", n_group=4, topk_group=2)
RULES = (SOFTMAX, UNNORMALIZED, SIGMOID, GROUPS, replace(GROUPS, top_k=2, topk_group=1), RouterRule(top_k=1))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_experts_are_chosen_as_by_hand(rule: RouterRule) -> None:
    """Fault moe-masked-groups-win: with groups made negative in their scores by a bias."""
    logits = draw(50, 8)
    logits[::5] = logits[::5].round()  # some scores are equal
    for bias in (None, draw(8, seed=1), draw(8, seed=2) - 5):
        scores_te = route.scores(logits, rule)
        rows = zip(scores_te, route.select(scores_te, rule, bias), strict=True)
        for scores, found in rows:
            biased = scores if bias is None else scores + bias
            assert found.tolist() == plain_select(biased.tolist(), rule)


def test_of_equal_scores_the_lowest_number_is_chosen() -> None:
    for experts in (5, 8, 64, 300):
        chosen = route.select(torch.zeros(33, experts), RouterRule(top_k=4))
        assert chosen.tolist() == [[0, 1, 2, 3]] * 33
    halves = torch.tensor([1.0, 2.0] * 40).expand(7, 80)
    assert route.select(halves, RouterRule(top_k=3)).tolist() == [[1, 3, 5]] * 7


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_follow_the_formulas(rule: RouterRule) -> None:
    logits = draw(40, 8, dtype=torch.float64).requires_grad_()
    scores_te = route.scores(logits, rule)
    indices = route.select(scores_te, rule)
    found = route.weights(scores_te, indices, rule)
    torch.testing.assert_close(found, plain_weights(logits, indices, rule), rtol=1e-12, atol=0)
    few = logits.detach()[:3].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route.weights(route.scores(x, rule), indices[:3], rule), few)


def test_a_softmax_over_chosen_logits_is_the_normalized_softmax() -> None:
    """Mixtral's paper writes the first, Hugging Face computes the second: bitwise these operations."""
    logits = draw(200, 8)
    scores_te = route.scores(logits, SOFTMAX)
    indices = route.select(scores_te, SOFTMAX)
    found = route.weights(scores_te, indices, SOFTMAX)
    torch.testing.assert_close(found, logits.gather(1, indices).softmax(-1), rtol=1e-6, atol=0)
    values, experts = torch.topk(torch.softmax(logits.float(), dim=-1), 2, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    assert torch.equal(found, values)
    assert torch.equal(indices, experts)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Fault moe-bias-in-weights: biases of -10 on chosen experts choose others, and their weights know no bias."""
    logits = draw(30, 8)
    scores_te = route.scores(logits, SIGMOID)
    first = route.select(scores_te, SIGMOID)
    bias = torch.zeros(8)
    bias[:4] = -10
    second = route.select(scores_te, SIGMOID, bias)
    assert (first < 4).any()
    assert (second >= 4).all()
    torch.testing.assert_close(
        route.weights(scores_te, second, SIGMOID), plain_weights(logits, second, SIGMOID), rtol=1e-6, atol=0
    )
    assert torch.equal(route.select(scores_te, SIGMOID, torch.full((8,), -10.0)), first)
    mixture = small_mixture(Case(num_experts=8, rule=SIGMOID, balance=replace(Case().balance, kind="bias")))
    x = Case(num_experts=8).inputs(0)
    expected = mixture.route(x)
    mixture.router.bias.fill_(-10)
    assert torch.equal(mixture.route(x).weights, expected.weights)


def test_selection_sees_what_16_bits_do_not() -> None:
    """Fault moe-selection-in-16-bit: logits different by less than a bf16 step, of 16-bit hidden states too."""
    logits = torch.tensor([[1.0, 1.0 + 2**-12, 0.5]])
    rule = RouterRule(top_k=1)
    assert route.select(route.scores(logits, rule), rule).tolist() == [[1]]
    mixture = small_mixture(Case(num_experts=3), torch.bfloat16)
    weight = torch.zeros(3, HIDDEN)
    weight[0, 0] = 1
    weight[1, :2] = torch.tensor([1, 2**-12])
    mixture.router.weight.data.copy_(weight)
    routing = mixture.route(torch.ones(1, HIDDEN, dtype=torch.bfloat16))
    assert routing.logits.dtype == torch.float32
    assert routing.logits.tolist() == [[1.0, 1.0 + 2**-12, 0.0]]
    assert routing.indices[0, 0] == 1


def test_counts() -> None:
    indices = torch.tensor([[0, 3], [3, 1]])
    assert route.counts(indices, 5).tolist() == [1, 1, 0, 2, 0]
    assert route.counts(indices[:0], 2).tolist() == [0, 0]


def test_logits_tell_experts_apart_whose_sigmoids_are_equal() -> None:
    rule = RouterRule(top_k=2, scoring_func="sigmoid", norm_topk_prob=False, selects_by="logit")
    logits = torch.tensor([[40.0, 50.0, -1.0, 60.0]])
    scores_te = route.scores(logits, rule)
    assert scores_te[0, 0] == scores_te[0, 1] == 1.0
    ranked_te = route.ranked_by(logits, scores_te, rule)
    assert route.select(ranked_te, rule).tolist() == [[3, 1]]
    # A bias of logits; weights are without it.
    indices = route.select(ranked_te, rule, torch.tensor([0.0, 0.0, 100.0, 0.0]))
    assert indices.tolist() == [[2, 3]]
    assert torch.equal(route.weights(scores_te, indices, rule), scores_te[:, [2, 3]])
