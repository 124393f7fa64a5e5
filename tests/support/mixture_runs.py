"""Mixtures of experts on ranks, against one process: outputs and every gradient, expert by expert."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.grid import Grid
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.expert_parallel.route import RouterRule
from tests.support.distributed import rank_device, run_ranks
from tests.support.flat import flatten
from tests.support.mixtures import Case, plain_mixture, small_mixture

SOFTMAX = RouterRule(top_k=2)
UNNORMALIZED = RouterRule(top_k=3, norm_topk_prob=False, routed_scaling_factor=2.5)
SIGMOID = RouterRule(top_k=2, scoring_func="sigmoid", routed_scaling_factor=2.5)
GROUPS = RouterRule(top_k=4, scoring_func="sigmoid", n_group=4, topk_group=2)


def make_context(sizes: dict[str, int], use_shared_memory: bool = True) -> ParallelContext:
    return context.create(Grid(**sizes), device=rank_device(dist.get_rank()), use_shared_memory=use_shared_memory)


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
        "weights": logical.held([mixture], ctx, logical.main_gradients),
    }


def on_ranks(runs: list[tuple[dict[str, int], Case]], use_shared_memory: bool) -> list[dict[str, Any]]:
    return [train(case, make_context(split, use_shared_memory), micro_batches=2) for split, case in runs]


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
    weights = logical.assemble([rank["weights"] for rank in found])
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


def check_runs(runs: list[tuple[dict[str, int], Case]], use_shared_memory: bool = True) -> None:
    ranks = run_ranks(world_of(runs[0][0]), on_ranks, runs, use_shared_memory)
    for number, (split, case) in enumerate(runs):
        check_against_one_process([rank[number] for rank in ranks], case, str(split))


def world_of(split: dict[str, int]) -> int:
    return split["dp"] * split.get("tp", 1)
