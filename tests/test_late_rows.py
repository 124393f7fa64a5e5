"""All-to-alls over experts that arrive as late as CUDA allows: rows are NaN until somebody waits for them, and what is
sent must not change before."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.comm import collectives, exchange
from megapar.context import Axis
from megapar.expert_parallel import dispatch
from megapar.train.step import train_step
from tests.support.distributed import run_ranks
from tests.support.grid import MIXTRAL, SHARED, SIGMOID, Layout, make_state, micro_batches, name
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but


class Late(collectives.Pending):
    """An operation started by the wait for it."""

    def __init__(self, start: Callable[[], None]):
        super().__init__()
        self._start: Callable[[], None] | None = start

    def wait(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start()


def arrive_late(patch: pytest.MonkeyPatch) -> None:
    on_time = collectives.all_to_all_async

    def late(
        x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis
    ) -> tuple[Tensor, collectives.Pending]:
        out = x.new_full((sum(received_rows), *x.shape[1:]), math.nan)
        sent = x.clone()

        def start() -> None:
            assert torch.equal(x, sent), "rows changed while they travelled"
            rows, pending = on_time(x, sent_rows, received_rows, axis)
            pending.wait()
            out.copy_(rows)

        return out, Late(start)

    patch.setattr(collectives, "all_to_all_async", late)


def two_steps(layout: Layout) -> Bits:
    config = layout.config()
    state = make_state(config)
    for step in range(2):
        train_step(state, micro_batches(config, state.ctx, step))
    return bits(state)


def on_time_and_late(layout: Layout) -> tuple[Bits, Bits]:
    expected = two_steps(layout)
    with pytest.MonkeyPatch.context() as patch:
        arrive_late(patch)
        return two_steps(layout), expected


LAYOUTS = [
    Layout(SHARED, dp=2, ep=2, micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, recompute="full", micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, recompute="light", zero_stage=3, micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, recompute="all_but_attention", micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, schedule="zb-h1", micro_batch_size=3),
    Layout(SIGMOID, tp=2, etp=2, micro_batch_size=3),
]


@pytest.mark.parametrize("layout", slow_but([0, 1], LAYOUTS), ids=name)
def test_late_rows_change_no_bit(layout: Layout) -> None:
    for found, expected in run_ranks(layout.world, on_time_and_late, layout):
        assert_bitwise(found, expected, "late")


# Planted


def rows_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    def forward(ctx: Any, memory: Tensor, rows: exchange.ArrivingRows) -> Tensor:
        ctx.rows = rows
        early = memory.clone()
        rows.pending.wait()
        return early

    patch.setattr(exchange._Finish, "forward", staticmethod(forward))


def gradients_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor | None, None]:
        early = ctx.rows.gradient.clone()
        ctx.rows.pending.wait()
        return early, None

    patch.setattr(exchange._Start, "backward", staticmethod(backward))


def memory_is_used_again_too_early(patch: pytest.MonkeyPatch) -> None:
    start_exchange = dispatch.start_exchange

    def start(x: Tensor, *others: Any) -> exchange.ArrivingRows:
        arriving = start_exchange(x, *others)
        x.detach().zero_()
        return arriving

    patch.setattr(dispatch, "start_exchange", start)


def is_seen(plant: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> bool:
    expected = two_steps(layout)
    with pytest.MonkeyPatch.context() as patch:
        arrive_late(patch)
        plant(patch)
        try:
            found = two_steps(layout)
        except (AssertionError, FloatingPointError):
            return True
    return any(not torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize(
    "plant", [rows_are_read_too_early, gradients_are_read_too_early, memory_is_used_again_too_early]
)
def test_what_a_gpu_would_punish_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert all(run_ranks(2, is_seen, plant, LAYOUTS[0]))
