"""Gradient buffers, AdamW and norm in many layouts against one process; every gradient and weight is compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapar.base.grid import Grid
from megapar.config.options import OptimizerConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.optimizer.clip import clip_coefficient, grad_norm
from megapar.optimizer.optimizers import Optimizers
from tests.support.distributed import run_ranks
from tests.support.flat import Flat, flatten
from tests.support.toy import Reference, Toy, local

TINY, ALL = 1e-4, 64.0  # MiB: a bucket of about 26 elements, that is a parameter each; one bucket a group


@pytest.fixture(autouse=True, scope="module")
def _import_compiler_once() -> None:
    """torch.optim's constructor takes a second to import torch's compiler: once here, not in every forked rank."""
    torch.optim.AdamW([torch.zeros(1)])


@dataclass(frozen=True)
class Case:
    tp: int
    dp: int
    pp: int
    kv_heads: int
    zero_stage: int
    bucket_mb: float
    overlap: bool = True
    clip: float = 0.05
    microbatches: int = 2
    dtype: torch.dtype = torch.float32
    steps: int = 3
    compare: bool = True

    @property
    def options(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=0.01,
            weight_decay=0.1,
            clip_grad=self.clip,
            zero_stage=self.zero_stage,
            bucket_mb=self.bucket_mb,
            overlap_grad_reduce=self.overlap,
        )


def make_buffer(modules: Sequence[nn.Module], ctx: ParallelContext, options: OptimizerConfig) -> Flat:
    return flatten(
        modules,
        ctx,
        zero_stage=options.zero_stage,
        bucket_mb=options.bucket_mb,
        overlap=options.overlap_grad_reduce,
    )


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Within 1e-5 of the expected tensor's norm."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error < 1e-5, f"{what}: relative error {error:.2e}"


def padded(real: Tensor, param: Tensor) -> Tensor:
    """Flat, with zeros for the padding rows of `param`."""
    return torch.cat([real.flatten(), real.new_zeros(param.numel() - real.numel())])


def check_gradients(adamw: Optimizers, expected: dict[str, Tensor], case: Case) -> None:
    """Every element of this rank's shards."""
    for s in adamw.slices():
        want = padded(local(s.spec, expected), s.param)[s.start : s.stop]
        got = s.param.main_grad.tensor.flatten()[s.start : s.stop]
        assert_close(got, want, f"{case}: gradient of {s.spec.name}")


def train(case: Case, ctx: ParallelContext) -> dict[str, Any]:
    """A few steps of the toy, compared with one process at each; returns what ranks must agree on."""
    toy = Toy(ctx, case.kv_heads, case.dtype)
    buffer = make_buffer([toy], ctx, case.options)
    adamw, reference = buffer.optimizers(case.options), Reference(case.options, case.kv_heads)
    early = []
    for step in range(case.steps):
        count = case.microbatches * ctx.dp.size
        samples = range(step * count, (step + 1) * count)
        mine = samples[ctx.dp.rank * case.microbatches : (ctx.dp.rank + 1) * case.microbatches]
        buffer.start_step()
        before = sum(ctx.grad.traffic.calls.values())
        for i, sample in enumerate(mine):
            if i == len(mine) - 1:
                buffer.gradients.begin()
            (toy(sample) / count).backward()
        early.append(sum(ctx.grad.traffic.calls.values()) - before)
        buffer.gradients.finish()
        buffer.check_padding()
        norm = grad_norm(buffer.gradients, ctx)
        if case.compare:
            expected = reference.gradients(samples)
            check_gradients(adamw, expected, case)
            norm_expected = reference.step(expected)
            assert math.isclose(norm.item(), norm_expected, rel_tol=1e-6), (case, step, norm.item(), norm_expected)
        adamw.step(case.options.lr, clip_coefficient(norm, case.clip))
        if case.compare:
            for name, param in toy.named_parameters():
                weight = padded(local(param.spec, reference.weights), param)
                assert_close(param.flatten(), weight, f"{case}: weight {name} after step {step}")
    pieces = {
        piece.name: (piece.held.offset[0], param.detach().flatten()[first:last].view(piece.local_shape).clone())
        for param in toy.parameters()
        for piece, first, last in param.spec.segments()
    }
    updated: dict[str, int] = {}
    for s in adamw.slices():
        updated[s.spec.name] = updated.get(s.spec.name, 0) + s.stop - s.start
    return {
        "pieces": pieces,
        "norm": norm,
        "early": early,
        "buckets": len(buffer.layout.buckets),
        "updated": updated,
        "sizes": {slot.name: slot.param.numel() for slot in buffer.slots},
        "line": (ctx.tp.rank, ctx.pp.rank),
        "places": {
            (slot.name, 0 if "tp" in slot.spec.same_over() else ctx.tp.rank): (
                slot.start - bucket.start,
                bucket.stop - bucket.start,
            )
            for slot, bucket in ((slot, buffer.layout.buckets[slot.bucket_index]) for slot in buffer.slots)
            if slot.spec.same_over()
        },
    }


def train_all(cases: Sequence[Case]) -> list[dict[str, Any]]:
    contexts: dict[tuple[int, int, int], ParallelContext] = {}
    results = []
    for case in cases:
        shape = (case.tp, case.dp, case.pp)
        if shape not in contexts:
            contexts[shape] = context.create(Grid(tp=case.tp, dp=case.dp, pp=case.pp))
        results.append(train(case, contexts[shape]))
    return results


def assert_copies_equal(ranks: Sequence[dict[str, Any]], case: Case) -> None:
    """Whatever rows of a tensor several ranks hold are bitwise equal, and all ranks have the same norm. A sum over
    three and more ranks rounds by the element's place in its bucket, so copies summed apart must lie alike."""
    places: dict[tuple[str, int], tuple[int, int]] = {}
    rows: dict[tuple[str, int], Tensor] = {}
    for rank in ranks:
        assert torch.equal(rank["norm"], ranks[0]["norm"]), case
        for (name, tp_rank), place in rank["places"].items():
            assert places.setdefault((name, tp_rank), place) == place, f"{case}: {name} lies elsewhere in its bucket"
        for name, (start, value) in rank["pieces"].items():
            for i, row in enumerate(value if name != "row" else []):
                held = rows.setdefault((name, start + i), row)
                assert torch.equal(held, row), f"{case}: copies of {name}[{start + i}] drifted apart"


LAYOUTS = {
    4: [(1, 4, 1, 2), (2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 3)],
    6: [(2, 3, 1, 3), (3, 2, 1, 2), (1, 3, 2, 2), (3, 1, 2, 1)],
}


def test_gradients_weights_and_norm_equal_one_process_in_every_layout() -> None:
    """ZeRO 0 and 1, tiny and large buckets, replicated and overlapping kv rows (faults
    norm-gradients-under-sequence-parallelism, kv-heads-fewer-than-tp, norms-shared-by-heads), tied ends (fault
    tied-embeddings-zero-pipeline), the norm (fault norm-counts-elements-once), clipping (fault
    clipping-changes-updates), shards splitting or missing parameters (fault empty-shards)."""
    missed = False
    for world, layouts in LAYOUTS.items():
        cases = [
            Case(*layout, zero_stage=zero, bucket_mb=bucket, clip=clip)
            for layout in layouts
            for zero, bucket, clip in [(0, TINY, 0.05), (1, TINY, 1e6), (1, ALL, 0.05)]
        ]
        results = run_ranks(world, train_all, cases)
        for case, *ranks in zip(cases, *results, strict=True):
            assert_copies_equal(ranks, case)
            for rank in ranks:
                missed |= any(name not in rank["updated"] for name in rank["sizes"])
                assert rank["early"][0] == 0
                if case.dp > 1:
                    assert rank["early"][1:] == [rank["buckets"]] * 2, "all buckets go during the last backward"
            for name, size in ranks[0]["sizes"].items():
                replicas = [rank["updated"].get(name, 0) for rank in ranks if rank["line"] == ranks[0]["line"]]
                assert sum(replicas) == size * (1 if case.zero_stage else case.dp), f"{case}: {name} is updated once"
    assert missed, "no shard is without some parameter"


@pytest.mark.slow  # tests/test_training.py compares copies as well
def test_copies_of_a_parameter_stay_bitwise_equal() -> None:
    """Tied ends over 100 steps with overlap on and off (fault tied-copies-stay-equal); norms, biases and kv rows over
    tensor ranks in bf16 (fault replicated-parameters-stay-equal). Three data-parallel ranks: there a sum rounds by the
    element's place in its bucket."""
    apart: dict[str, Any] = {"compare": False, "microbatches": 1}
    cases = [
        Case(1, 3, 2, 2, 1, TINY, overlap=True, steps=100, **apart),
        Case(1, 3, 2, 2, 1, ALL, overlap=False, steps=30, **apart),
        Case(1, 3, 2, 2, 0, ALL, steps=10, **apart),
        Case(2, 3, 1, 3, 1, ALL, steps=50, dtype=torch.bfloat16, **apart),
        Case(2, 3, 1, 3, 0, TINY, steps=10, **apart),
        Case(3, 2, 1, 2, 1, ALL, steps=10, **apart),
    ]
    results = run_ranks(6, train_all, cases)
    for case, *ranks in zip(cases, *results, strict=True):
        assert_copies_equal(ranks, case)


def test_overlap_buckets_and_zero_stage_change_no_bit() -> None:
    """20 steps on two data-parallel ranks (faults overlap-changes-no-bit, bucket-sizes): one set of bits in all."""
    cases = [
        Case(1, 2, 1, 2, zero, bucket, overlap, steps=20, compare=False, microbatches=1)
        for zero in (0, 1)
        for bucket in (TINY, 3e-4, ALL)
        for overlap in (True, False)
    ]
    for rank in run_ranks(2, train_all, cases):
        assert {case.overlap: sum(r["early"]) > 0 for case, r in zip(cases, rank, strict=True)} == {
            True: True,
            False: False,
        }
        for case, result in zip(cases, rank, strict=True):
            for name, (_, value) in result["pieces"].items():
                assert torch.equal(value, rank[0]["pieces"][name][1]), f"{case}: {name}"


def test_overlap_changes_no_bit_on_four_ranks() -> None:
    cases = [Case(1, 4, 1, 2, zero, TINY, on, steps=5, compare=False) for zero in (0, 1) for on in (True, False)]
    for rank in run_ranks(4, train_all, cases):
        for on, off in (rank[:2], rank[2:]):
            for name, (_, value) in on["pieces"].items():
                assert torch.equal(value, off["pieces"][name][1]), name
