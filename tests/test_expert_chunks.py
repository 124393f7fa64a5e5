"""The rows of experts in chunks (parallel.ep_overlap_chunks): every bit is that without chunks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from megapar_models.registry import validate
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.config.options import AdapterConfig, Config, ParallelConfig
from megapar.expert_parallel import experts
from megapar.expert_parallel.row_counts import experts_of, place_of_expert
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import DENSE_BETWEEN, LLAMA, MIXTRAL, SHARED, SIGMOID, Layout, make_state, micro_batches, name
from tests.support.mixture_runs import CASES, SPLITS_OF_4, check_runs, make_context
from tests.support.mixtures import Case, small_mixture
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but

FOUR_LAYERS = replace(SIGMOID, num_hidden_layers=4)
# On CPUs torch computes the last numbers of a tensor one by one if they do not fill two vectors, and rounds otherwise.
# With this width they do.
BIASES = tiny_models.model("gpt_oss", moe=replace(MIXTRAL.moe, moe_intermediate_size=64))
ADAPTER = AdapterConfig(rank=4, targets=("*.experts.*",))


def two_steps(layout: Layout) -> Bits:
    """The state after two steps, and the loss of an evaluation."""
    config = layout.config()
    state = make_state(config)
    for step in range(2):
        train_step(state, micro_batches(config, state.ctx, step))
    loss = torch.tensor(evaluate(state, micro_batches(config, state.ctx, 2)))
    return bits(state) | {"evaluated": loss}


def with_and_without(layout: Layout) -> tuple[Bits, Bits]:
    return two_steps(layout), two_steps(replace(layout, ep_overlap_chunks=1))


LAYOUTS = [
    # Of 5 experts one rank has 2, the other 3.
    Layout(MIXTRAL, dp=2, ep=2, ep_overlap_chunks=2, recompute="light", micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=4, recompute="full", zero_stage=3, micro_batch_size=3),
    Layout(SIGMOID, dp=2, pp=2, ep=2, ep_overlap_chunks=3, schedule="zb-h1", micro_batch_size=3),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=2, zero_stage=0),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=2, zero_stage=2, recompute="selective"),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=3, recompute="all_but_attention", micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, ep_overlap_chunks=4, sequence_parallel=True, micro_batch_size=3),
    Layout(SHARED, tp=2, ep=2, etp=1, ep_overlap_chunks=2, sequence_parallel=True, micro_batch_size=3),
    Layout(DENSE_BETWEEN, cp=2, dp=2, ep=4, ep_overlap_chunks=2, zero_stage=2, micro_batch_size=3),
    Layout(FOUR_LAYERS, dp=2, pp=2, ep=2, vpp=2, ep_overlap_chunks=2, schedule="zb-v", zero_stage=2),
    Layout(FOUR_LAYERS, dp=2, pp=2, ep=2, vpp=2, ep_overlap_chunks=2, schedule="dualpipe-v"),
    Layout(FOUR_LAYERS, dp=2, pp=2, ep=2, vpp=2, ep_overlap_chunks=2, schedule="interleaved", recompute="full"),
    Layout(SIGMOID, dp=2, pp=2, ep=2, ep_overlap_chunks=4, schedule="breadth", zero_stage=3),
    Layout(BIASES, dp=2, ep=2, ep_overlap_chunks=2, micro_batch_size=3),
    Layout(BIASES, tp=2, dp=2, etp=2, ep=2, ep_overlap_chunks=2, recompute="full", micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, ep_overlap_chunks=2, adapter=ADAPTER, micro_batch_size=3),
    Layout(MIXTRAL, dp=2, ep=2, ep_overlap_chunks=2, trainable=("*.router.*", "*.experts.*"), micro_batch_size=3),
]


@pytest.mark.parametrize("layout", slow_but([1, 13], LAYOUTS), ids=name)
def test_chunks_change_no_bit(layout: Layout) -> None:
    for found, expected in run_ranks(layout.world, with_and_without, layout):
        assert_bitwise(found, expected, "in chunks")


def test_chunks_against_one_process() -> None:
    """All tokens to one expert, experts without tokens, ranks without tokens and with fewer experts than others."""
    cases = [replace(case, chunks=2) for case in (CASES[1], CASES[4], CASES[7])]
    cases.append(replace(CASES[2], chunks=4))
    check_runs([(split, case) for split in (SPLITS_OF_4[1], SPLITS_OF_4[4]) for case in cases])


@pytest.mark.slow
def test_every_case_in_chunks_against_one_process() -> None:
    splits = [SPLITS_OF_4[number] for number in (1, 2, 4, 6)]
    check_runs([(split, replace(case, chunks=2)) for split in splits for case in CASES])


def test_rows_leave_by_chunk_and_then_by_expert() -> None:
    for number, ranks, chunks in ((8, 2, 4), (5, 2, 2), (11, 3, 3)):
        axis = Axis("ep", ranks, 0, tuple(range(ranks)))
        place_e = place_of_expert(number, axis, chunks, torch.device("cpu"))
        assert place_e is not None
        order = torch.argsort(place_e).tolist()
        assert sorted(order) == list(range(number))
        rank_of = [rank for rank in range(ranks) for _ in experts_of(number, replace(axis, rank=rank))]
        # Ascending within a chunk, and each chunk has experts of all ranks.
        falls = [at for at in range(1, number) if order[at] < order[at - 1]]
        assert len(falls) == chunks - 1
        for begin, end in zip([0, *falls], [*falls, number], strict=True):
            assert {rank_of[expert] for expert in order[begin:end]} == set(range(ranks))
    assert place_of_expert(8, axis, 1, torch.device("cpu")) is None


# What runs while rows travel


class Noted(Pending):
    """An all-to-all of rows, or of their weights, that notes when it starts and when somebody waits for it."""

    def __init__(self, inner: Pending, events: list[str], prefix: str):
        super().__init__()
        self.number = sum(event.startswith(f"{prefix}sent") for event in events)
        self._inner, self._events, self._prefix = inner, events, prefix
        events.append(f"{prefix}sent {self.number}")

    def wait(self) -> None:
        self._events.append(f"{self._prefix}waited {self.number}")
        self._inner.wait()


def events_of(case: Case) -> list[str]:
    """What a forward and a backward pass through a mixture do, in order."""
    noted: list[str] = []
    ctx = make_context({"dp": 2, "ep": 2})
    mixture = small_mixture(case, ctx=ctx)
    all_to_all_async, linear = collectives.all_to_all_async, experts._GroupedLinear

    def sent(x: Tensor, *args: Any) -> tuple[Tensor, Pending]:
        out, pending = all_to_all_async(x, *args)
        return out, Noted(pending, noted, "" if x.shape[1] > 1 else "weights ")

    def product(original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(ctx: Any, *args: Any) -> Any:
            noted.append("product")
            return original(ctx, *args)

        return noting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all_async", sent)
        patch.setattr(linear, "forward", staticmethod(product(linear.forward)))
        patch.setattr(linear, "backward", staticmethod(product(linear.backward)))
        out = mixture(case.inputs(ctx.world.rank).requires_grad_())
        noted.append("backward")
        out.sum().backward()
    return noted


def test_experts_work_on_one_chunk_while_others_travel() -> None:
    """Backward is the mirror of forward: gradients of results leave first, and those of rows are waited for last.

    The weights of all chunks leave before all rows, and their gradients behind those of all rows.
    """
    there = ["weights sent 0", *(f"sent {number}" for number in range(3)), "weights waited 0"]
    products = ["product", "product"]
    forward = [
        there,
        *([f"waited {n}", *products, f"sent {n + 3}"] for n in range(3)),
        ["waited 3", "waited 4", "waited 5"],
    ]
    back = [f"sent {number}" for number in range(6, 9)]
    backward = [back, *([f"waited {n + 6}", *products, f"sent {n + 9}"] for n in range(3)), ["weights sent 1"]]
    expected = list(chain(*forward, ["backward"], *backward))
    for noted in run_ranks(2, events_of, Case(num_experts=8, chunks=3)):
        assert noted[: len(expected)] == expected
        *last, weights = noted[len(expected) :]
        assert sorted(last) == ["waited 10", "waited 11", "waited 9"]
        assert weights == "weights waited 1"


# Options


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (LLAMA, {}, "parallel.ep_overlap_chunks=2: family llama has no experts; leave it at 1"),
        (
            MIXTRAL,
            {"dp": 2},
            "parallel.ep_overlap_chunks=2, parallel.ep=1: without expert parallelism no expert waits for other ranks; "
            "set parallel.ep, or leave it at 1",
        ),
        (
            MIXTRAL,
            {"dp": 4, "ep": 4},
            "parallel.ep_overlap_chunks=2, parallel.ep=4, model.moe.num_experts=5: a rank with 1 expert has no more "
            "chunks; use at most 1",
        ),
    ],
    ids=["dense", "ep 1", "one expert"],
)
def test_chunks_without_a_use_are_refused(model: Any, parallel: dict[str, int], said: str) -> None:
    config = Config(model=model, parallel=ParallelConfig(ep_overlap_chunks=2, **parallel))
    with pytest.raises(ConfigError) as error:
        validate(config, parallel.get("dp", 1))
    assert said in str(error.value).splitlines()
