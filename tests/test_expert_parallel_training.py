"""Mixtures of experts in training: recomputation, evaluation, skipped steps, and batches that replicas share."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapar import validate as checks
from megapar.config import Config, ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from megapar.context import coordinates, expert_rank_groups
from megapar.expert_parallel.balance import Router
from megapar.train.step import TrainState, evaluate, train_step
from tests.support.distributed import run_ranks
from tests.support.grid import DENSE_BETWEEN, SHARED, SIGMOID, Layout, make_state, micro_batches
from tests.support.runs import Bits, assert_bitwise, bits


def test_replicas_that_share_experts_need_equal_numbers_of_micro_batches() -> None:
    """For every small grid in every order: refused if, and only if, ranks of two replicas are in one group of experts.

    Otherwise a replica that has fewer micro-batches would not take part in an exchange.
    """
    mixture = ModelConfig(family="mixtral", moe=MoEConfig(num_experts=8))
    orders = ["-".join(axes) for axes in itertools.permutations(("tp", "cp", "dp", "pp"))]
    refused = 0
    for tp, cp, dp, order in itertools.product((1, 2, 3), (1, 2), (2, 3, 4), orders):
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": 2}
        ranks = tp * cp * dp
        for ep, etp in itertools.product(range(1, ranks + 1), range(1, ranks + 1)):
            if ranks % (ep * etp):
                continue
            expert_sizes = {"etp": etp, "ep": ep, "edp": ranks // (ep * etp)}
            groups = [g for axis in ("ep", "etp") for g in expert_rank_groups(sizes, expert_sizes, [axis], order)]
            shared = any(len({coordinates(rank, sizes, order)["dp"] for rank in group}) > 1 for group in groups)
            parallel = ParallelConfig(tp=tp, cp=cp, dp=dp, pp=2, ep=ep, etp=etp, order=order)
            for batch in (dp, dp + 1):
                config = Config(mixture, parallel, TrainConfig(global_batch_size=batch))
                problems = list(checks._expert_batch(config))
                assert bool(problems) == (shared and batch % dp > 0), (sizes, expert_sizes, order, batch)
                refused += len(problems)
    assert refused > 100


def test_a_ramp_that_replicas_cannot_share_is_refused_with_one_that_they_can() -> None:
    parallel = ParallelConfig(dp=4, ep=4, etp=1)
    config = Config(ModelConfig(family="mixtral", moe=MoEConfig(num_experts=8)), parallel)
    ramp = replace(config, train=TrainConfig(global_batch_size=12, batch_ramp=(2, 2, 30)))
    (problem,) = checks._expert_batch(ramp)
    assert problem.endswith("a multiple of 4; use 4 4 30")
    assert not list(checks._expert_batch(replace(ramp, train=replace(ramp.train, batch_ramp=(4, 4, 30)))))


def router_state(state: TrainState) -> list[Tensor]:
    routers = [m for stage in state.stages.values() for m in stage.modules() if isinstance(m, Router)]
    return [x.clone() for router in routers for x in (router.bias, router.last_counts, router.step_counts)]


def of_recompute(layout: Layout) -> list[Bits]:
    """Weights, optimizer state and routers' state after two steps in bf16, in which a rounding that differs shows."""
    found = []
    for recompute, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 2)):
        config = replace(layout, recompute=recompute, every=every).config("bf16")
        state = make_state(config)
        for step in range(2):
            train_step(state, micro_batches(config, state.ctx, step))
        routers = {f"router {number}": x for number, x in enumerate(router_state(state))}
        found.append(bits(state) | routers)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(SHARED, dp=2, ep=2, micro_batch_size=3),
        Layout(DENSE_BETWEEN, tp=2, cp=2, ep=4, etp=1, sequence_parallel=True, micro_batch_size=6),
    ],
    ids=["dp2-ep2", "tp2-cp2-ep4"],
)
def test_recomputation_changes_no_bit(layout: Layout) -> None:
    """Fault moe-counted-twice: the state of routers too."""
    for first, *others in run_ranks(layout.world, of_recompute, layout):
        for other in others:
            assert_bitwise(other, first, "recomputed")


def test_an_evaluation_and_a_skipped_step_leave_the_balance_as_it_is() -> None:
    """A step that overflows in fp16 has moved no weight, and must move no bias."""
    config = Layout(SIGMOID, micro_batch_size=6).config("fp16")
    state = make_state(config)
    assert train_step(state, micro_batches(config, state.ctx, 0)).finite
    before = router_state(state)
    assert any(x.any() for x in before)
    evaluate(state, micro_batches(config, state.ctx, 1))
    assert all(map(torch.equal, router_state(state), before))
    state.loss_scale.scale = 2.0**60
    assert train_step(state, micro_batches(config, state.ctx, 1)).overflowed
    assert all(map(torch.equal, router_state(state), before))
    state.loss_scale.scale = 2.0**8
    assert train_step(state, micro_batches(config, state.ctx, 1)).finite
    assert not all(map(torch.equal, router_state(state), before))
