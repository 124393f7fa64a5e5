"""Layouts in bf16 with heads as wide as GPUs' attention takes them, so that `-m gpus` runs each branch for GPUs.

cuDNN's and FlashAttention's blocks of context parallelism, documents, gathered and released weights, experts' rows,
weight gradients apart from input gradients. A layout may be as far from fp32 as one process in bf16 is, and no bit is
expected: products of other shapes are rounded in another order.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_weights
from megapar_tools.verify.run import see_gradients
from torch import Tensor

from megapar.step.step import train_step
from tests.support.distributed import apart, run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, SAMPLES, Layout, make_state, micro_batches, name
from tests.support.sweeps import slow_but

STEPS = 2
WIDE = replace(LLAMA, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
WIDEST = replace(WIDE, num_key_value_heads=1, head_dim=128)
LEARNED = replace(GPT, hidden_size=128, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
DROPPING = replace(LEARNED, attention_dropout=0.2)
EXPERTS = replace(MIXTRAL, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)

# Each may be this much farther from fp32 than one process, and all of them together a little: one rounding more.
WITHIN = 1.25
FLOOR = 2**-10

LAYOUTS = [
    Layout(WIDE, tp=2, sequence_parallel=True),
    Layout(WIDE, tp=2, sequence_parallel=True, tp_overlap_chunks=2),
    Layout(WIDE, cp=2, cp_attention="gather"),
    Layout(WIDE, cp=2, cp_attention="ring"),
    Layout(WIDE, cp=2, cp_attention="ulysses"),
    Layout(WIDEST, cp=2, cp_attention="ring", packed=True),
    Layout(WIDE, cp=2, cp_attention="gather", packed=True),
    Layout(WIDE, dp=2, zero_stage=2, packed=True),
    Layout(WIDE, dp=2, zero_stage=3, recompute="full"),
    Layout(WIDEST, dp=2, zero_stage=3, recompute="selective"),
    Layout(WIDE, pp=2, vpp=2, schedule="zb-v"),
    Layout(LEARNED, pp=2, tp=2),
    Layout(LEARNED, dp=2, zero_stage=1),
    Layout(EXPERTS, dp=2, ep=2, zero_stage=1),
    Layout(EXPERTS, dp=2, ep=2, zero_stage=3, recompute="full"),
    Layout(EXPERTS, tp=2, ep=2, etp=1, sequence_parallel=True, packed=True),
    Layout(EXPERTS, pp=2, schedule="zb-h1"),
    Layout(WIDE, tp=2, sequence_parallel=True, moments="bf16", main_weights="remainder"),
    Layout(WIDE, dp=2, zero_stage=3, moments="bf16", main_weights="remainder"),
    Layout(EXPERTS, dp=2, ep=2, zero_stage=1, moments="bf16"),
    Layout(DROPPING, tp=2),
    Layout(DROPPING, cp=2, cp_attention="ring", packed=True),
]

Shown = dict[str, Tensor]


def trained(layout: Layout, precision: str) -> tuple[list[float], list[logical.Held], list[logical.Held]]:
    """The losses of two steps, the gradients of the second one, and the weights after it."""
    state = make_state(layout.config(precision))
    seen = see_gradients(state)
    losses = [
        train_step(state, micro_batches(state.config, state.ctx, step, layout.packed)).loss for step in range(STEPS)
    ]
    return losses, seen.gradients, held_weights(state)


@cache
def of_one_process(alone: Layout, precision: str) -> tuple[list[float], Shown, Shown]:
    losses, gradients, weights = apart(trained, alone, precision)
    return losses, logical.assemble([gradients]), logical.assemble([weights])


def distance(found: Shown, exact: Shown) -> float:
    """The norm of all differences over that of all values."""
    difference = sum((found[name].double() - exact[name].double()).square().sum() for name in exact)
    return float((difference / sum(exact[name].double().square().sum() for name in exact)) ** 0.5)


@pytest.mark.gpus
@pytest.mark.parametrize("layout", slow_but([0, 8, 17], LAYOUTS), ids=name)
def test_a_layout_in_bf16_is_as_close_to_fp32_as_one_process_is(layout: Layout) -> None:
    ranks = run_ranks(layout.world, trained, replace(layout, micro_batch_size=3), "bf16")
    one = Layout(layout.model, micro_batch_size=SAMPLES, zero_stage=0, packed=layout.packed)
    exact = of_one_process(one, "fp32")
    alone = of_one_process(replace(one, moments=layout.moments, main_weights=layout.main_weights), "bf16")
    for losses, _, _ in ranks:
        assert losses == pytest.approx(exact[0], rel=2e-3)
    for part in (1, 2):
        found = logical.assemble([rank[part] for rank in ranks])
        assert found.keys() == exact[part].keys()
        assert all(torch.isfinite(tensor).all() for tensor in found.values())
        assert distance(found, exact[part]) < WITHIN * distance(alone[part], exact[part]) + FLOOR
