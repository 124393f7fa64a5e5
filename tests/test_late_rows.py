"""All-to-alls over experts that arrive as late as CUDA allows (tests/support/late.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.base.errors import NumericError
from megapar.expert_parallel import dispatch, exchange
from tests.support.distributed import run_ranks
from tests.support.grid import MIXTRAL, SHARED, SIGMOID, Layout, name
from tests.support.late import arrive_late
from tests.support.late_runs import on_time_and_late, two_steps
from tests.support.runs import assert_bitwise
from tests.support.sweeps import slow_but

LAYOUTS = [
    Layout(SHARED, dp=2, ep=2, micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, recompute="full", micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, recompute="light", zero_stage=3, micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, recompute="all_but_attention", micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, schedule="zb-h1", micro_batch_size=3),
    Layout(SIGMOID, tp=2, etp=2, micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=3, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, ep_overlap_chunks=2, recompute="full", zero_stage=3, micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, ep_overlap_chunks=4, schedule="zb-h1", micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, ep_overlap_chunks=2, sequence_parallel=True, micro_batch_size=3),
]
IN_CHUNKS = LAYOUTS[7]


@pytest.mark.parametrize("layout", slow_but([1, 7], LAYOUTS), ids=name)
def test_late_rows_change_no_bit(layout: Layout) -> None:
    for found, expected in run_ranks(layout.world, on_time_and_late, layout):
        assert_bitwise(found, expected, "late")


# Planted


def rows_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    """In chunks: those on their way there. Rows on their way back are waited for together."""

    def forward(ctx: Any, parts: Sequence[exchange.ArrivingRows], *memories: Tensor) -> Tensor:
        ctx.parts = parts
        rows = parts[0].arrivals[0].take()
        early = rows.clone() if len(parts) == 1 else rows
        for part in parts:
            part.pending.wait()
        return early

    patch.setattr(exchange._Arrived, "forward", staticmethod(forward))


def results_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    """In chunks: the wait for the last chunk is missing on the way back."""

    def forward(ctx: Any, parts: Sequence[exchange.ArrivingRows], *memories: Tensor) -> Tensor:
        ctx.parts = parts
        for part in parts[: max(len(parts) - 1, 1)]:
            part.pending.wait()
        return parts[0].arrivals[0].take()

    patch.setattr(exchange._Arrived, "forward", staticmethod(forward))


def gradients_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *placeholders: Tensor) -> tuple[Tensor | None, None]:
        early = ctx.parts[0].gradients[0].take()
        kept = early.clone()
        for part in ctx.parts:
            part.pending.wait()
        return kept, None

    patch.setattr(exchange._Start, "backward", staticmethod(backward))


def gradients_of_one_chunk_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *placeholders: Tensor) -> tuple[Tensor | None, None]:
        for part in ctx.parts[1:] or ctx.parts:
            part.pending.wait()
        return ctx.parts[0].gradients[0].take(), None

    patch.setattr(exchange._Start, "backward", staticmethod(backward))


def memory_is_used_again_too_early(patch: pytest.MonkeyPatch) -> None:
    start_exchanges = dispatch.start_exchanges

    def start(x: Tensor, *others: Any, **named: Any) -> list[exchange.ArrivingRows]:
        arriving = start_exchanges(x, *others, **named)
        x.detach().zero_()
        return arriving

    patch.setattr(dispatch, "start_exchanges", start)


def memory_is_used_again_when_the_first_chunk_is_here(patch: pytest.MonkeyPatch) -> None:
    start_exchanges, wait = dispatch.start_exchanges, exchange.ArrivingRows.wait
    sent: list[Tensor] = []

    def start(x: Tensor, *others: Any, **named: Any) -> list[exchange.ArrivingRows]:
        sent.append(x.detach())
        return start_exchanges(x, *others, **named)

    def wait_and_overwrite(self: exchange.ArrivingRows) -> Tensor:
        rows = wait(self)
        sent[-1].zero_()
        return rows

    patch.setattr(dispatch, "start_exchanges", start)
    patch.setattr(exchange.ArrivingRows, "wait", wait_and_overwrite)


def is_seen(plant: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> bool:
    expected = two_steps(layout)
    with pytest.MonkeyPatch.context() as patch:
        arrive_late(patch)
        plant(patch)
        try:
            found = two_steps(layout)
        except (AssertionError, NumericError):
            return True
    return any(not torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (rows_are_read_too_early, LAYOUTS[0]),
        (gradients_are_read_too_early, LAYOUTS[0]),
        (memory_is_used_again_too_early, LAYOUTS[0]),
        (rows_are_read_too_early, IN_CHUNKS),
        (results_are_read_too_early, IN_CHUNKS),
        (gradients_of_one_chunk_are_not_waited_for, IN_CHUNKS),
        (memory_is_used_again_when_the_first_chunk_is_here, IN_CHUNKS),
    ],
    ids=lambda case: name(case) if isinstance(case, Layout) else case.__name__,
)
def test_what_a_gpu_would_punish_is_seen(plant: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> None:
    assert all(run_ranks(2, is_seen, plant, layout))
