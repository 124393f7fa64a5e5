"""Expert parallelism: routing against plain formulas, and on real ranks dispatch and experts against one process."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapar import context, recompute
from megapar.config import OptimizerConfig
from megapar.context import ParallelContext
from megapar.expert_parallel import dispatch, route
from megapar.expert_parallel.route import RouterRule
from megapar.params import spec_of
from tests.support import layouts
from tests.support.distributed import rank_device, run_ranks
from tests.support.flat import flatten
from tests.support.mixtures import HIDDEN, NAME, Case, Mixture, plain_mixture, plain_select, plain_weights

SOFTMAX = RouterRule(top_k=2)
UNNORMALIZED = RouterRule(top_k=3, norm_topk_prob=False, routed_scaling_factor=2.5)
SIGMOID = RouterRule(top_k=2, scoring_func="sigmoid", routed_scaling_factor=2.5)
GROUPS = RouterRule(top_k=4, scoring_func="sigmoid", n_group=4, topk_group=2)
RULES = (SOFTMAX, UNNORMALIZED, SIGMOID, GROUPS, replace(GROUPS, top_k=2, topk_group=1), RouterRule(top_k=1))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Routing


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_experts_are_chosen_as_by_hand(rule: RouterRule) -> None:
    """Fault moe-masked-groups-win: with groups whose scores a bias makes negative."""
    logits = draw(50, 8)
    logits[::5] = logits[::5].round()  # some scores are equal
    for bias in (None, draw(8, seed=1), draw(8, seed=2) - 5):
        chosen = route.select(logits, rule, bias)
        rows = zip(route.scores(logits, rule), chosen, strict=True)
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
    indices = route.select(logits, rule)
    found = route.weights(logits, indices, rule)
    torch.testing.assert_close(found, plain_weights(logits, indices, rule), rtol=1e-12, atol=0)
    few = logits.detach()[:3].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route.weights(x, indices[:3], rule), few)


def test_a_softmax_over_chosen_logits_is_the_normalized_softmax() -> None:
    """Mixtral's paper writes the first, Hugging Face computes the second: bitwise these operations."""
    logits = draw(200, 8)
    indices = route.select(logits, SOFTMAX)
    found = route.weights(logits, indices, SOFTMAX)
    torch.testing.assert_close(found, logits.gather(1, indices).softmax(-1), rtol=1e-6, atol=0)
    values, experts = torch.topk(torch.softmax(logits.float(), dim=-1), 2, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    assert torch.equal(found, values)
    assert torch.equal(indices, experts)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Fault moe-bias-in-weights: biases of -10 on chosen experts choose others, whose weights know no bias."""
    logits = draw(30, 8)
    first = route.select(logits, SIGMOID)
    bias = torch.zeros(8)
    bias[:4] = -10
    second = route.select(logits, SIGMOID, bias)
    assert (first < 4).any()
    assert (second >= 4).all()
    torch.testing.assert_close(
        route.weights(logits, second, SIGMOID), plain_weights(logits, second, SIGMOID), rtol=1e-6, atol=0
    )
    assert torch.equal(route.select(logits, SIGMOID, torch.full((8,), -10.0)), first)
    mixture = small_mixture(Case(num_experts=8, rule=SIGMOID, balance=replace(Case().balance, kind="bias")))
    x = Case(num_experts=8).inputs(0)
    expected = mixture.route(x)
    mixture.router.bias.fill_(-10)
    assert torch.equal(mixture.route(x).weights, expected.weights)


def test_selection_sees_what_16_bits_do_not() -> None:
    """Fault moe-selection-in-16-bit: logits that differ by less than a bf16 step, of 16-bit hidden states too."""
    logits = torch.tensor([[1.0, 1.0 + 2**-12, 0.5]])
    assert route.select(logits, RouterRule(top_k=1)).tolist() == [[1]]
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


# Mixtures on ranks


def small_mixture(case: Case, dtype: torch.dtype = torch.float32, ctx: ParallelContext | None = None) -> Mixture:
    mixture = Mixture(case, ctx or context.single(), dtype)
    layouts.fill([mixture], case.weights())
    return mixture


def make_context(sizes: dict[str, int], use_shared_memory: bool = True) -> ParallelContext:
    return context.create(**sizes, device=rank_device(dist.get_rank()), use_shared_memory=use_shared_memory)


def train(case: Case, ctx: ParallelContext, micro_batches: int) -> dict[str, Any]:
    """Outputs and gradients of inputs by micro-batch, and the summed gradients of this rank's parameters."""
    # Uninitialized memory is filled with NaN.
    torch.use_deterministic_algorithms(True)
    mixture = small_mixture(case, ctx=ctx)
    flat = flatten([mixture], ctx, zero_stage=0, bucket_mb=0.001)
    rank = ctx.world.rank
    outputs = []
    input_gradients = []
    flat.start_step()
    for micro_batch in range(micro_batches):
        if micro_batch == micro_batches - 1:
            flat.gradients.begin()
        x = case.inputs(rank, micro_batch).requires_grad_()
        out = mixture(x)
        (out * case.coefficients(rank, micro_batch)).sum().backward()
        outputs.append(out.detach())
        input_gradients.append(x.grad)
    flat.gradients.finish()
    return {
        "outputs": outputs,
        "inputs": input_gradients,
        "weights": layouts.held([mixture], ctx, layouts.main_gradients),
    }


def on_ranks(sizes: list[dict[str, int]], cases: list[Case], use_shared_memory: bool) -> list[list[dict[str, Any]]]:
    return [
        [train(case, make_context(size, use_shared_memory), micro_batches=2) for case in cases] for size in sizes
    ]


def reference(case: Case, world: int, micro_batches: int) -> dict[str, Any]:
    """The same as `train` for all ranks in one process, fp64."""
    weights = {name: tensor.requires_grad_() for name, tensor in case.weights().items()}
    outputs: list[list[Tensor]] = []
    inputs: list[list[Tensor]] = []
    for rank in range(world):
        outputs.append([])
        inputs.append([])
        for micro_batch in range(micro_batches):
            x = case.inputs(rank, micro_batch, torch.float64).requires_grad_()
            out = plain_mixture(x, weights, case)
            (out * case.coefficients(rank, micro_batch, torch.float64)).sum().backward()
            outputs[-1].append(out.detach())
            inputs[-1].append(x.grad)
    return {"outputs": outputs, "inputs": inputs, "weights": {name: w.grad for name, w in weights.items()}}


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """To 1e-5 of the largest element. What is zero must be zero."""
    error = (found.double() - expected).abs().max().item() if expected.numel() else 0.0
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert error <= 1e-5 * largest, f"{what}: error {error:.3g} of {largest:.3g}"


def check_against_one_process(found: list[dict[str, Any]], case: Case, where: str) -> None:
    world = len(found)
    expected = reference(case, world, micro_batches=2)
    for rank, kind, micro_batch in itertools.product(range(world), ("outputs", "inputs"), range(2)):
        what = f"{where} {case} {kind} of rank {rank}, micro-batch {micro_batch}"
        assert_close(found[rank][kind][micro_batch], expected[kind][rank][micro_batch], what)
    weights = layouts.assemble([rank["weights"] for rank in found])
    assert weights.keys() == expected["weights"].keys()
    for name, gradient in weights.items():
        assert_close(gradient, expected["weights"][name], f"{where} {case} gradient of {name}")


EIGHT = 8
CASES = [
    Case(),
    Case(rule=RouterRule(top_k=1, norm_topk_prob=False), tokens=(5, 0, 3, 8)),
    Case(num_experts=EIGHT, rule=GROUPS, tokens=(6, 1, 0, 0)),
    Case(num_experts=EIGHT, rule=UNNORMALIZED),
    Case(rule=SIGMOID, routing="one", tokens=(4, 6, 0, 2)),
    Case(num_experts=EIGHT, rule=RouterRule(top_k=1, norm_topk_prob=False), routing="one"),
    Case(rule=SOFTMAX, routing="ties"),
    Case(rule=SOFTMAX, tokens=(0, 0, 0, 0)),
]
SPLITS_OF_4 = [
    *({"dp": 4, "ep": ep, "etp": etp} for ep, etp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))),
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1},
]
SPLITS_OF_8 = [
    {"dp": 8, "ep": 8, "etp": 1},
    {"dp": 4, "tp": 2, "ep": 4, "etp": 2},
    {"dp": 2, "tp": 4, "ep": 2, "etp": 2},
]


def check_grid(splits: list[dict[str, int]], cases: list[Case], use_shared_memory: bool = True) -> None:
    world = 1
    for name in ("dp", "tp"):
        world *= splits[0].get(name, 1)
    ranks = run_ranks(world, on_ranks, splits, cases, use_shared_memory)
    for i, split in enumerate(splits):
        for j, case in enumerate(cases):
            check_against_one_process([rank[i][j] for rank in ranks], case, str(split))


def test_one_process_is_the_reference() -> None:
    for case in CASES:
        found = train(case, context.single(), micro_batches=2)
        check_against_one_process([found], case, "single")
    torch.use_deterministic_algorithms(False)


def test_every_split_of_four_ranks_equals_one_process() -> None:
    """Faults moe-expert-gradient-scaled, moe-router-gradient-partial, moe-empty-expert-uninitialized and
    moe-rank-without-tokens-hangs: outputs and every gradient, expert by expert."""
    check_grid(SPLITS_OF_4, CASES)


def test_splits_of_eight_ranks_equal_one_process() -> None:
    """Ranks without an expert among them: 5 experts on 8 ranks."""
    check_grid(SPLITS_OF_8, [CASES[0], CASES[2], CASES[4]])


def test_hosts_that_share_no_memory_agree() -> None:
    check_grid([{"dp": 4, "ep": 4, "etp": 1}, {"dp": 4, "ep": 2, "etp": 2}], CASES[:2], use_shared_memory=False)
