"""ZeRO-2 and 3: every layout trains as ZeRO-1 does, with the memory and traffic that the plan says."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megapar.train.step import evaluate, train_step
from tests.support import layouts
from tests.support.distributed import run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    STEPS,
    STRADDLING,
    Layout,
    bitwise,
    check,
    held_gradients,
    held_weights,
    make_state,
    micro_batches,
    name,
)

BREADTH = "tests.support.grid:BREADTH_FIRST"
UNTIED = replace(GPT, tie_word_embeddings=False)


# Every layout trains as ZeRO-1 does


def train_at_stages(layout: Layout) -> dict[int, Any]:
    """What `train_two_steps` shows, by ZeRO stage. The states share their process groups' ranks, and nothing else."""
    shown: dict[int, Any] = {}
    for stage in (1, 2, 3):
        state = make_state(replace(layout, zero_stage=stage).config())
        shown[stage] = {"initial": held_weights(state), "steps": []}
        for step in range(STEPS):
            result = train_step(state, micro_batches(state.config, state.ctx, step))
            found = (result.loss, result.grad_norm, held_gradients(state), held_weights(state))
            shown[stage]["steps"].append(found)
        shown[stage]["evaluation"] = evaluate(state, micro_batches(state.config, state.ctx, STEPS))
    return shown


# With one micro-batch a replica, or breadth-first, each gradient is summed over micro-batches before it is reduced, as
# with ZeRO-1. Otherwise the sums have another order. So they have for an embedding that two fine stages use.
SAME_SUMS = [
    Layout(LLAMA, dp=2, micro_batch_size=6),
    Layout(LLAMA, dp=2, schedule=BREADTH),
    Layout(UNTIED, dp=3, micro_batch_size=2, schedule=BREADTH, recompute="selective"),
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=6),
    Layout(GPT, dp=2, pp=2, micro_batch_size=6),
    Layout(LLAMA, dp=2, micro_batch_size=12),  # the second replica has no micro-batch
]
OTHER_SUMS = [
    Layout(GPT, dp=2, micro_batch_size=3, recompute="selective"),
    Layout(ONE_KV_HEAD, dp=2, micro_batch_size=4, recompute="full"),  # replicas with two micro-batches and one
    Layout(STRADDLING, cp=2, micro_batch_size=6),
    Layout(UNTIED, dp=3, micro_batch_size=3, recompute="full", every=2),
    Layout(ONE_KV_HEAD, tp=2, dp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(GPT, dp=2, pp=2, schedule="gpipe"),
    Layout(LLAMA, dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3, recompute="full"),
    Layout(DENSE_BETWEEN, tp=2, dp=2, ep=2, micro_batch_size=3),
    Layout(LLAMA, dp=4, micro_batch_size=2, overlap=False),
    Layout(STRADDLING, tp=2, pp=2, micro_batch_size=2),  # one replica
]


def check_stages(layout: Layout, *, same_sums: bool) -> None:
    """Stages 2 and 3 against 1: bitwise with `same_sums`; otherwise the first gradients to 1e-6, and all that follows
    as against one process."""
    ranks = run_ranks(layout.world, train_at_stages, layout)
    for stage in (2, 3):
        check(replace(layout, zero_stage=stage), [rank[stage] for rank in ranks])
        for step in range(STEPS):
            for kind in (2, 3):  # gradients, weights
                first = layouts.assemble([rank[1]["steps"][step][kind] for rank in ranks])
                found = layouts.assemble([rank[stage]["steps"][step][kind] for rank in ranks])
                if same_sums:
                    assert bitwise(found, first), f"stage {stage}, step {step}"
                else:
                    layouts.assert_close(found, first, 1e-6 if (step, kind) == (0, 2) else 1e-5)


@pytest.mark.parametrize("layout", SAME_SUMS, ids=name)
def test_stages_agree_bitwise_where_sums_have_one_order(layout: Layout) -> None:
    check_stages(layout, same_sums=True)


@pytest.mark.parametrize("layout", OTHER_SUMS, ids=name)
def test_stages_agree_to_rounding(layout: Layout) -> None:
    check_stages(layout, same_sums=False)
