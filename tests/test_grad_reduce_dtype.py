"""Gradients traveling in bf16: each rank's part is rounded once, and nothing else differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_weights
from megapar_tools.verify.run import see_gradients
from torch import Tensor

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.step.step import train_step
from tests.support import close
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LLAMA,
    MIXTRAL,
    STEPS,
    Layout,
    alone,
    bitwise,
    make_state,
    micro_batches,
    name,
    reference,
)
from tests.support.sweeps import slow_but

Reduce = Callable[[Tensor, Axis], collectives.Pending]


def round_then_sum_in_fp32(flat: Tensor, axis: Axis) -> collectives.Pending:
    """What a reduction in bf16 must give, by other means: it sends fp32 numbers after rounding them to bf16."""
    if axis.size > 1:  # one rank sends nothing, and rounds nothing
        flat.copy_(flat.bfloat16())
    return collectives.reduce_scatter_shard_async(flat, axis)


def train(layout: Layout, reduce: Reduce | None) -> dict[str, Any]:
    """Gradients, weights and norms of all steps, and the bytes sent by this rank in reductions."""
    with pytest.MonkeyPatch.context() as patch:
        if reduce is not None:
            patch.setattr(collectives, "reduce_scatter_shard_in_bf16_async", reduce)
        state = make_state(layout.config())
        seen = see_gradients(state)
        steps = []
        for step in range(STEPS):
            result = train_step(state, micro_batches(state.config, state.ctx, step))
            steps.append((result.grad_norm, seen.gradients, held_weights(state)))
    return {"steps": steps, "sent": state.ctx.grad.shards.traffic.sent.get("reduce_scatter", 0)}


def train_three_ways(layout: Layout) -> list[dict[str, Any]]:
    """In bf16, by `round_then_sum_in_fp32`, and in fp32."""
    in_fp32 = replace(layout, grad_reduce_dtype="fp32")
    return [train(layout, None), train(layout, round_then_sum_in_fp32), train(in_fp32, None)]


SMALL = replace(LLAMA, num_hidden_layers=2)
SMALL_GPT = replace(GPT, num_hidden_layers=2)
LAYOUTS = [
    Layout(SMALL, dp=3, micro_batch_size=2),
    Layout(SMALL, dp=2, micro_batch_size=3, overlap=False),
    Layout(MIXTRAL, dp=4, ep=2, micro_batch_size=3),  # experts have two replicas, other weights four
    Layout(SMALL_GPT, tp=2, dp=2, sequence_parallel=True, zero_stage=2, micro_batch_size=3),
    Layout(SMALL_GPT, dp=2, pp=2, zero_stage=3, micro_batch_size=3, schedule="zb-h1"),
    Layout(SMALL, dp=4, zero_stage=3, shard_ranks=2, micro_batch_size=3),
]


@pytest.mark.parametrize(
    "layout", slow_but([1, 4], [replace(layout, grad_reduce_dtype="bf16") for layout in LAYOUTS]), ids=name
)
def test_each_part_is_rounded_once_and_the_sum_is_fp32(layout: Layout) -> None:
    ranks = run_ranks(layout.world, train_three_ways, layout)
    for found, expected, _ in ranks:
        assert [norm for norm, _, _ in found["steps"]] == [norm for norm, _, _ in expected["steps"]]
    for step in range(STEPS):
        for kind in (1, 2):  # gradients, weights
            found, expected, in_fp32 = (
                logical.assemble([rank[way]["steps"][step][kind] for rank in ranks]) for way in range(3)
            )
            assert bitwise(found, expected), f"step {step}"
            assert not bitwise(found, in_fp32), "nothing was rounded"
    # One process rounds nothing. Each part is off by 2^-9 at most, and parts that cancel are larger than their sum.
    first = logical.assemble([rank[0]["steps"][0][1] for rank in ranks])
    _, _, gradients, *_ = reference(alone(layout))["steps"][0]
    close.assert_close(first, logical.assemble([gradients]), 2**-7)
    for found, _, in_fp32 in ranks:
        assert found["sent"] * 2 == in_fp32["sent"] > 0
