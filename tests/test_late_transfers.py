"""Collectives and transfers as late as CUDA allows (tests/support/late.py), in every kind of layout: no bit changes. A
missing wait is planted wherever a stream waits, and seen.

tests/test_late_rows.py has the all-to-alls over experts.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megapar.base.errors import NumericError
from megapar.expert_parallel import row_counts
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, ONE_KV_HEAD, SIGMOID, Layout, name
from tests.support.late import arrive_late, without_the_wait
from tests.support.late_runs import on_time_and_late, two_steps
from tests.support.runs import assert_bitwise
from tests.support.sweeps import slow_but

TWO_LAYERS = replace(LLAMA, num_hidden_layers=2)
SMALL_GPT = replace(GPT, num_hidden_layers=2)


ZERO_1 = Layout(TWO_LAYERS, dp=2, micro_batch_size=3)
ZERO_3 = Layout(TWO_LAYERS, dp=2, zero_stage=3, micro_batch_size=3)
COPIES = Layout(TWO_LAYERS, dp=4, zero_stage=3, shard_ranks=2, micro_batch_size=3)
SEQUENCE = Layout(TWO_LAYERS, tp=2, sequence_parallel=True, micro_batch_size=6)
CHUNKS = Layout(TWO_LAYERS, tp=2, sequence_parallel=True, tp_overlap_chunks=3, micro_batch_size=6)
PIPELINE = Layout(SMALL_GPT, pp=2, micro_batch_size=3)
RING = Layout(TWO_LAYERS, cp=2, cp_attention="ring", micro_batch_size=6)
EXPERTS = Layout(SIGMOID, dp=2, ep=2, micro_batch_size=3)
LAYOUTS = [
    ZERO_1,
    ZERO_3,
    CHUNKS,
    PIPELINE,
    RING,
    SEQUENCE,
    EXPERTS,
    Layout(SMALL_GPT, tp=2, micro_batch_size=6),
    Layout(SMALL_GPT, tp=2, tp_overlap_chunks=2, micro_batch_size=6, loss_chunk=5),
    Layout(TWO_LAYERS, dp=2, zero_stage=2, micro_batch_size=3),
    COPIES,
    Layout(TWO_LAYERS, dp=4, zero_stage=1, shard_ranks=2, micro_batch_size=3, grad_reduce_dtype="bf16"),
    Layout(TWO_LAYERS, cp=2, cp_attention="gather", micro_batch_size=6, recompute="full"),
    Layout(TWO_LAYERS, cp=2, cp_attention="ulysses", micro_batch_size=6),
    Layout(LLAMA, pp=2, vpp=2, schedule="zb-v", micro_batch_size=3, zero_stage=3),
    Layout(ONE_KV_HEAD, pp=2, tp=2, sequence_parallel=True, schedule="zb-h1", micro_batch_size=3),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, micro_batch_size=3, ep_overlap_chunks=2),
]


@pytest.mark.parametrize("layout", slow_but([0, 1, 2, 3, 4], LAYOUTS), ids=name)
def test_late_transfers_change_no_bit(layout: Layout) -> None:
    for found, expected in run_ranks(layout.world, on_time_and_late, layout):
        assert_bitwise(found, expected, "late")


# Planted


def counts_are_read_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    def early(self: row_counts.RowCounts) -> tuple[torch.Tensor, torch.Tensor]:
        copy = self.numbers.args[0]._copy  # type: ignore[attr-defined]
        sent_e, arriving = copy.split([self.num_experts, self.arriving_qpe.numel()])
        return sent_e, arriving.view(self.arriving_qpe.shape)

    patch.setattr(row_counts.RowCounts, "on_host", property(early))


def is_seen(plant: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> str:
    """How: another bit, or an error. Nothing if it is not seen."""
    expected = two_steps(layout)
    with pytest.MonkeyPatch.context() as patch:
        arrive_late(patch)
        plant(patch)
        try:
            found = two_steps(layout)
        except (AssertionError, NumericError, RuntimeError) as error:  # torch refuses absurd counts
            return type(error).__name__
    return "bits" if any(not torch.equal(found[key], x) for key, x in expected.items()) else ""


PLANTED = [
    ("Gradients.finish", ZERO_1),
    ("FlatWeights._wait_for", ZERO_1),
    ("UnitWeights.wait_for", ZERO_3),
    ("UnitGradients.add", ZERO_3),
    ("UnitGradients.finish", COPIES),
    ("linear_backward", SEQUENCE),
    ("_one_ahead", CHUNKS),
    ("ChunkedScatterSum.leave_in_chunks", CHUNKS),
    ("_Execution._run_action", PIPELINE),
    ("_RingAttention.forward", RING),
    ("_RingAttention.backward", RING),
    ("all_reduce", SEQUENCE),
    ("reduce_scatter", SEQUENCE),
    ("all_gather", SEQUENCE),
]
PLANTS = [
    *((without_the_wait(function), layout) for function, layout in PLANTED),
    (counts_are_read_without_a_wait, EXPERTS),
]


@pytest.mark.parametrize("number", slow_but([1, 5, 9, 14], range(len(PLANTS))), ids=lambda n: PLANTS[n][0].__name__)
def test_a_missing_wait_is_seen(number: int) -> None:
    plant, layout = PLANTS[number]
    assert all(run_ranks(layout.world, is_seen, plant, layout))
