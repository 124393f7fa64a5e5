"""Weight gradients of experts are computed while rows travel: every bit is that without, and nobody waits before."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.base.errors import CommunicationError, MegaparError
from megapar.comm import collectives
from megapar.comm.pending import Pending
from megapar.config.options import AdapterConfig
from megapar.expert_parallel import row_counts
from megapar.expert_parallel.exchange import ArrivingRows
from megapar.expert_parallel.experts import Experts
from megapar.linear.main_grad import DeferredWeightGradient
from megapar.linear.meanwhile import Meanwhile
from megapar.linear.torch_products import TorchProducts
from megapar.pipeline.actions import Action
from megapar.pipeline.runtime import _Execution
from megapar.step.state import TrainState
from megapar.step.step import train_step
from tests.support.distributed import run_ranks
from tests.support.flat import flatten
from tests.support.grid import MIXTRAL, SHARED, SIGMOID, Layout, make_state, micro_batches, name
from tests.support.mixture_runs import make_context
from tests.support.mixtures import Case, small_mixture
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but

FOUR_LAYERS = replace(MIXTRAL, num_hidden_layers=4)
LAYOUTS = [
    Layout(FOUR_LAYERS, dp=2, ep=2, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=3, zero_stage=3, micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, recompute="full", zero_stage=2, micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, schedule="zb-h1", micro_batch_size=3),
    Layout(FOUR_LAYERS, dp=2, pp=2, ep=2, vpp=2, schedule="dualpipe-v"),
    Layout(SIGMOID, dp=2, pp=2, ep=2, schedule="breadth", zero_stage=3),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, adapter=AdapterConfig(rank=4, targets=("*.experts.*",)), micro_batch_size=3),
]


def experts_of(state: TrainState) -> list[Experts]:
    return [module for stage in state.stages.values() for module in stage.modules() if isinstance(module, Experts)]


def two_steps(layout: Layout, *, deferred: bool = True) -> Bits:
    config = layout.config()
    state = make_state(config)
    for module in experts_of(state):
        assert module.meanwhile is not None
        if not deferred:
            module.meanwhile = None
    for step in range(2):
        train_step(state, micro_batches(config, state.ctx, step))
    return bits(state)


def in_all_ways(layout: Layout) -> list[Bits]:
    """Without, then as it comes, then with rows that are always and never there in time."""
    found = [two_steps(layout, deferred=False), two_steps(layout)]
    for arrived in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pending, "has_arrived", lambda _, arrived=arrived: arrived)
            found.append(two_steps(layout))
    return found


@pytest.mark.gpus
@pytest.mark.parametrize("layout", slow_but([0, 2, 6], LAYOUTS), ids=name)
def test_no_bit_depends_on_when_rows_arrive(layout: Layout) -> None:
    for expected, *others in run_ranks(layout.world, in_all_ways, layout):
        for found, what in zip(others, ("as they come", "in time", "late"), strict=True):
            assert_bitwise(found, expected, what)


def with_and_without_sorted_arrivals(layout: Layout) -> list[Bits]:
    found = [two_steps(layout)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_counts.RowChunk, "arrives_sorted", False)
        found.append(two_steps(layout))
    return found


@pytest.mark.parametrize("layout", slow_but([0, 2], LAYOUTS), ids=name)
def test_no_bit_depends_on_who_sorts_rows(layout: Layout) -> None:
    """The all-to-all through shared memory does, and a layer where it does not."""
    for sorted_rows, expected in run_ranks(layout.world, with_and_without_sorted_arrivals, layout):
        assert_bitwise(expected, sorted_rows, "sorted in the exchange")


# What is computed when


def events_of(case: Case, seconds: float) -> list[str]:
    """What a backward pass through a mixture does, in order. Rank 1 begins to send its last gradients so much later."""
    noted: list[str] = []
    ctx = make_context({"dp": 2, "ep": 2})
    mixture = small_mixture(case, ctx=ctx)
    flat = flatten([mixture], ctx, zero_stage=0, bucket_mb=0.001)
    flat.start_step()
    all_to_all_async, add = collectives.all_to_all_async, TorchProducts.add_grouped_weight_gradient
    wait = Pending.wait
    rows: list[Pending] = []

    def sent(x: Tensor, *args: Any) -> tuple[Tensor, Pending]:
        if x.shape[1] == 1:
            return all_to_all_async(x, *args)
        if len(rows) == 1 and ctx.ep.rank == 1:
            time.sleep(seconds)
        out, pending = all_to_all_async(x, *args)
        noted.append("sent")
        rows.append(pending)
        return out, pending

    def adding(self: TorchProducts, *args: Any, **options: Any) -> None:
        noted.append("weight gradient")
        add(self, *args, **options)

    def waiting(self: Pending) -> None:
        if self in rows:
            noted.append("waits")
        wait(self)

    x = case.inputs(ctx.world.rank).requires_grad_()
    out = mixture(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all_async", sent)
        patch.setattr(TorchProducts, "add_grouped_weight_gradient", adding)
        patch.setattr(Pending, "wait", waiting)
        out.sum().backward()
    flat.gradients.finish()
    return noted


def test_a_rank_computes_weight_gradients_while_it_waits_for_another() -> None:
    """The one that is waited for finds all rows there, and goes on to earlier layers at once."""
    first, second = run_ranks(2, events_of, Case(num_experts=4), 0.5)
    of_both = ["weight gradient", "weight gradient"]
    of_each_expert = 2 * of_both
    assert first == ["sent", "waits", "sent", *of_each_expert, "waits"]
    assert second == ["sent", "waits", "sent", "waits", *of_both]


def backward_without_a_rank(fault: Callable[[], None]) -> None:
    """Rank 1 has the fault before it sends its last gradients."""
    ctx = make_context({"dp": 2, "ep": 2})
    mixture = small_mixture(Case(num_experts=4), ctx=ctx)
    flat = flatten([mixture], ctx, zero_stage=0, bucket_mb=0.001)
    flat.start_step()
    out = mixture(Case().inputs(ctx.world.rank).requires_grad_())
    post_gradient = ArrivingRows.post_gradient
    posted = 0

    def post(self: ArrivingRows, grad: Tensor) -> Tensor:
        nonlocal posted
        posted += 1
        if posted == 2 and ctx.ep.rank == 1:
            fault()
        return post_gradient(self, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrivingRows, "post_gradient", post)
        out.sum().backward()


def end_at_once() -> None:
    os._exit(3)


def raise_an_error() -> None:
    raise MegaparError("planted")


@pytest.mark.parametrize("fault", [end_at_once, raise_an_error])
def test_a_rank_that_ends_is_named_by_the_one_that_computes_meanwhile(fault: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match=r"rank 0:(.|\n)*CommunicationError:.*rank 1"):
        run_ranks(2, backward_without_a_rank, fault)


def forward_without_a_rank(layout: Layout, fault: Callable[[], None]) -> None:
    """Rank 1 has the fault in the forward pass of the second micro-batch. Rank 0 has weight gradients of the first."""
    config = layout.config()
    state = make_state(config)
    run_action, has_arrived = _Execution._run_action, Pending.has_arrived
    with pytest.MonkeyPatch.context() as patch:

        def running(self: _Execution, action: Action) -> None:
            patch.setattr(Pending, "has_arrived", (lambda _: True) if action.kind == "B" else has_arrived)
            if action == Action("F", 0, 1):
                if state.ctx.ep.rank == 1:
                    patch.setattr(ArrivingRows, "post", lambda *_: fault())
                else:
                    assert state.pipeline.meanwhile.nbytes
            run_action(self, action)

        patch.setattr(_Execution, "_run_action", running)
        state.pipeline.step(micro_batches(config, state.ctx, 0))


@pytest.mark.parametrize("fault", [end_at_once, raise_an_error])
def test_a_rank_that_ends_in_a_forward_pass_is_named_too(fault: Callable[[], None]) -> None:
    layout = Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=2)
    with pytest.raises(AssertionError, match=r"rank 0:(.|\n)*CommunicationError:.*rank 1"):
        run_ranks(2, forward_without_a_rank, layout, fault)


def test_a_peer_that_is_gone_is_no_bare_error() -> None:
    """An operation that goes on while somebody asks for another one may have lost its peer."""

    class Lost:
        def wait(self) -> None: ...

        def is_completed(self) -> bool:
            raise RuntimeError("rank 1 of this host has closed its connection")

    with pytest.raises(CommunicationError, match="rank 1"):
        Pending([Lost()]).has_arrived()


def events_if_rows_arrive_after_one(case: Case) -> list[str]:
    answers = iter([False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "has_arrived", lambda _: next(answers, True))
        return events_of(case, 0.0)


def test_rows_are_asked_for_before_the_weight_gradient_of_each_expert() -> None:
    """The other expert's of the same parameter comes behind the wait, then both experts' of the other parameter."""
    for noted in run_ranks(2, events_if_rows_arrive_after_one, Case(num_experts=4)):
        assert noted == ["sent", "waits", "sent", "weight gradient", "waits", "weight gradient", "weight gradient"]


def most_kept(layout: Layout) -> int:
    """The most weight gradients in the queue at one time, where rows are always there."""
    append = Meanwhile.append
    kept = 0

    def counting(self: Meanwhile, entry: DeferredWeightGradient) -> None:
        nonlocal kept
        append(self, entry)
        kept = max(kept, len(self._entries))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "has_arrived", lambda _: True)
        patch.setattr(Meanwhile, "append", counting)
        two_steps(layout)
    return kept


def test_no_more_is_kept_than_three_layers_have() -> None:
    """Else a rank that others wait for would keep the rows of all four layers."""
    assert run_ranks(2, most_kept, LAYOUTS[0]) == [6, 6]


# What a backward pass leaves for the forward pass after it


def passes(layout: Layout, *, late_rows: bool) -> str:
    """The passes of a step, each with a "w" for each of its weight gradients.

    In forward passes alone rows are late, or only the numbers of rows are.
    """
    config = layout.config()
    state = make_state(config)
    all_gather_async = collectives.all_gather_async
    numbers: list[Pending] = []
    run_action, add = _Execution._run_action, TorchProducts.add_grouped_weight_gradient
    noted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def running(self: _Execution, action: Action) -> None:
            noted.append(f" {action.kind}")
            patch.setattr(Pending, "has_arrived", lambda it: action.kind != "F" or not (late_rows or it in numbers))
            run_action(self, action)

        def gathering(*args: Any) -> tuple[Tensor, Pending]:
            out, pending = all_gather_async(*args)
            numbers.append(pending)
            return out, pending

        def adding(self: TorchProducts, *args: Any, **options: Any) -> None:
            noted.append("w")
            add(self, *args, **options)

        patch.setattr(_Execution, "_run_action", running)
        patch.setattr(collectives, "all_gather_async", gathering)
        patch.setattr(TorchProducts, "add_grouped_weight_gradient", adding)
        state.pipeline.step(micro_batches(config, state.ctx, 0))
    return "".join(noted).strip()


@pytest.mark.parametrize("late_rows", [True, False], ids=["rows", "numbers"])
@pytest.mark.parametrize(("layout", "expected"), [
    # Two layers have four weight gradients, all of which may be left. While rows are awaited each is computed expert by
    # expert, of which rank 0 has two and rank 1 three. The last backward leaves none.
    (Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=2), "F B F{late} B F{late} Bwwww"),
    (Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=2, zero_stage=2), " ".join(["F F F F B Bww Bww B"] * 3)),
], ids=["ZeRO-1", "ZeRO-2"])  # fmt: skip
def test_a_backward_leaves_weight_gradients_for_the_next_forward(
    layout: Layout, expected: str, late_rows: bool
) -> None:
    """ZeRO-2 reduces gradients after each backward, so nothing may be left there."""
    assert run_ranks(2, partial(passes, late_rows=late_rows), layout) == [
        expected.format(late=4 * experts * "w") for experts in (2, 3)
    ]


# A step that fails, and plants


def steps_around_a_failure(layout: Layout, *, begun: bool = False) -> Bits:
    """The state after two steps. Between them a step fails after a backward, before its last weight gradients.

    If one is `begun`, that of its first expert has been added.
    """
    config = layout.config()
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))

    def fail(self: Meanwhile) -> None:
        assert self._entries
        if begun:
            self.run_until(iter([False, True]).__next__)
            assert self._begun is not None
        raise MegaparError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "has_arrived", lambda _: True)
        patch.setattr(Meanwhile, "run", fail)
        state.grads.zero()
        with pytest.raises(MegaparError, match="planted"):
            state.pipeline.step(micro_batches(config, state.ctx, 1))
    train_step(state, micro_batches(config, state.ctx, 1))
    return bits(state)


def with_and_without_a_failure(layout: Layout) -> list[Bits]:
    return [two_steps(layout), *(steps_around_a_failure(layout, begun=begun) for begun in (False, True))]


def test_what_a_failed_step_left_is_not_added_to_the_next() -> None:
    for expected, *others in run_ranks(2, with_and_without_a_failure, LAYOUTS[0]):
        for found, what in zip(others, ("none begun", "one begun"), strict=True):
            assert_bitwise(found, expected, f"after a failed step with {what}")


def nothing_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Meanwhile, "drop", lambda _: None)


def nothing_runs_after_a_backward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pending, "has_arrived", lambda _: True)
    patch.setattr(Meanwhile, "run", lambda _: None)


def is_seen(plant: Callable[[pytest.MonkeyPatch], None], steps: Callable[[Layout], Bits]) -> bool:
    expected = two_steps(LAYOUTS[0])
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            found = steps(LAYOUTS[0])
        except RuntimeError:
            return True
    return any(not torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize(
    ("plant", "steps"),
    [(nothing_is_dropped, steps_around_a_failure), (nothing_runs_after_a_backward, two_steps)],
    ids=lambda case: case.__name__,
)
def test_plants_are_seen(plant: Callable[[pytest.MonkeyPatch], None], steps: Callable[[Layout], Bits]) -> None:
    assert all(run_ranks(2, is_seen, plant, steps))
