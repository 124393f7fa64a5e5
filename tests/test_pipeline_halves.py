"""A backward pass in two halves, I and W: the same bits as in one piece, in every layout, and memory only until W."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megapar_tools.plan.memory import report_rank
from megapar_tools.verify import logical
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.declare.context import ParallelContext
from megapar.declare.params import ONES, Init, spec_of
from megapar.declare.random import initialize
from megapar.declare.sharding import Sharding
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Action, Schedule, interleaved, one_f_one_b, placement
from megapar.step.step import train_step
from megapar.system.device import DeviceClock
from megapar.system.recorder import Recorder
from megapar.tensor_parallel.layers import (
    ColumnParallelLinear,
    Columns,
    VocabParallelEmbedding,
    column_linear,
    shared_vector,
)
from megapar.train.data import open_loaders
from tests.support import close
from tests.support.distributed import run_ranks
from tests.support.flat import flatten
from tests.support.grid import (
    GPT,
    LENGTH,
    LLAMA,
    ONE_KV_HEAD,
    SHARED,
    SIGMOID,
    STEPS,
    Layout,
    bitwise,
    check,
    make_state,
    micro_batches,
    name,
    train_two_steps,
)
from tests.support.plans import PARTS
from tests.support.schedules import BACK_AND_FORTH, all_forwards_first, back_and_forth
from tests.support.sweeps import slow_but

# Schedules. Those in halves have the order of those in one piece, with I in place of B.

Orders = list[list[Action]]
MakeOrders = Callable[[int, int, int], Orders]
NAME = f"{__name__}:"


def in_halves(delay: Callable[[int], float], make: MakeOrders, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The orders of `make` in halves. On rank r each W is deferred by `delay(r)` further I, or to the end."""
    orders = []
    for rank, whole in enumerate(make(pp, vpp, num_microbatches)):
        order: list[Action] = []
        deferred: list[Action] = []
        for action in whole:
            if action.kind == "F":
                order.append(action)
                continue
            order.append(action._replace(kind="I"))
            deferred.append(action._replace(kind="W"))
            if len(deferred) > delay(rank):
                order.append(deferred.pop(0))
        orders.append(order + deferred)
    return orders


def every_other_in_halves(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """1F1B with halves for micro-batches of odd numbers. Their number decides the last kind of action."""
    orders = []
    for whole in one_f_one_b(pp, vpp, num_microbatches):
        order: list[Action] = []
        for action in whole:
            halves = [action._replace(kind="I"), action._replace(kind="W")]
            order += halves if action.kind == "B" and action.microbatch % 2 else [action]
        orders.append(order)
    return orders


ZB_H1 = Schedule(partial(in_halves, lambda rank: rank, one_f_one_b))
LATE = Schedule(partial(in_halves, lambda rank: math.inf, one_f_one_b))
INTERLEAVED = Schedule(partial(in_halves, lambda rank: 2, interleaved))
V = Schedule(partial(in_halves, lambda rank: 1, all_forwards_first), back_and_forth)
V_WHOLE = BACK_AND_FORTH
EVERY_OTHER = Schedule(every_other_in_halves)
WITHOUT_W = Schedule(lambda *sizes: [order[:-1] for order in LATE.orders(*sizes)])
WHOLE = {"ZB_H1": "1f1b", "LATE": "1f1b", "INTERLEAVED": "interleaved", "V": f"{NAME}V_WHOLE", "EVERY_OTHER": "1f1b"}


def whole(layout: Layout) -> Layout:
    """`layout` with backward passes in one piece."""
    return replace(layout, schedule=WHOLE[layout.schedule.removeprefix(NAME)])


# Whole models

LLAMA3, GPT3, TIED3 = (replace(model, num_hidden_layers=3) for model in (LLAMA, GPT, ONE_KV_HEAD))

# In one process, where no order of communication can hide an error.
ALONE = [
    (Layout(LLAMA3, schedule=f"{NAME}LATE", micro_batch_size=6, recompute="selective", loss_chunk=7), "fp32"),
    (Layout(GPT3, schedule=f"{NAME}LATE", micro_batch_size=4, recompute="full"), "fp32"),
    (Layout(TIED3, schedule=f"{NAME}LATE", micro_batch_size=6), "bf16"),
    (Layout(SIGMOID, schedule=f"{NAME}LATE", micro_batch_size=4, recompute="full"), "fp32"),
    (Layout(SHARED, vpp=2, schedule=f"{NAME}INTERLEAVED", micro_batch_size=4, partition=(1, 1)), "bf16"),
]


def named(value: Layout | str) -> str:
    return value if isinstance(value, str) else name(value).replace(NAME, "")


@pytest.mark.parametrize(("layout", "precision"), slow_but([0, 1, 4], ALONE), ids=named)
def test_one_process_has_the_same_bits(layout: Layout, precision: str) -> None:
    ours = train_two_steps(layout.config(precision))
    theirs = train_two_steps(whole(layout).config(precision))
    same_bits([ours], [theirs])


def same_bits(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    """Losses, norms, gradients and weights of all steps are bitwise equal."""
    for step in range(STEPS):
        mine = [rank["steps"][step] for rank in ours]
        other = [rank["steps"][step] for rank in theirs]
        assert [rank[:2] for rank in mine] == [rank[:2] for rank in other]
        for kind in (2, 3):  # gradients, weights
            one, two = (logical.assemble([rank[kind] for rank in ranks]) for ranks in (mine, other))
            assert bitwise(one, two), [key for key in two if not torch.equal(one[key], two[key])]


# On ranks: untied weights and copies on different ranks have the same bits as in one piece. A tied matrix that is one
# parameter of two stages does not: in halves the additions of its stages come in another order.
THREE_IN_FOUR = (1, 1, 1, 0)  # layers of the stages
ON_RANKS = [
    Layout(
        LLAMA3,
        tp=2,
        pp=2,
        vpp=2,
        schedule=f"{NAME}V",
        sequence_parallel=True,
        micro_batch_size=4,
        partition=THREE_IN_FOUR,
    ),
    Layout(
        GPT3,
        tp=2,
        pp=2,
        vpp=2,
        schedule=f"{NAME}INTERLEAVED",
        sequence_parallel=True,
        tp_overlap_chunks=3,
        recompute="selective",
        micro_batch_size=4,
        partition=THREE_IN_FOUR,
    ),
    Layout(LLAMA3, tp=2, pp=2, schedule=f"{NAME}LATE", tp_overlap_chunks=2, recompute="full", micro_batch_size=4),
    Layout(TIED3, dp=2, pp=2, schedule=f"{NAME}ZB_H1", micro_batch_size=1, zero_stage=0, loss_chunk=5),
    Layout(
        SHARED,
        dp=2,
        pp=2,
        vpp=2,
        ep=2,
        schedule=f"{NAME}V",
        micro_batch_size=3,
        recompute="full",
        partition=(0, 1, 1, 0),
    ),
    Layout(SHARED, tp=2, pp=2, ep=2, etp=1, schedule=f"{NAME}ZB_H1", sequence_parallel=True, micro_batch_size=6),
]
TIED_ON_A_RANK = Layout(
    GPT3,
    pp=2,
    vpp=2,
    schedule=f"{NAME}V",
    micro_batch_size=4,
    recompute="full",
    partition=THREE_IN_FOUR,
)


@pytest.mark.gpus
@pytest.mark.parametrize("layout", slow_but([0, 4], ON_RANKS), ids=named)
def test_halves_have_the_bits_of_the_whole(layout: Layout) -> None:
    """Faults halves-recomputed, last-stage-on-first-rank, auxiliary-loss-in-schedules."""
    ours = run_ranks(layout.world, train_two_steps, layout.config())
    check(layout, ours)
    same_bits(ours, run_ranks(layout.world, train_two_steps, whole(layout).config()))


@pytest.mark.gpus
def test_a_tied_matrix_of_two_stages_on_a_rank() -> None:
    """Fault last-stage-on-first-rank."""
    ours = run_ranks(2, train_two_steps, TIED_ON_A_RANK.config())
    check(TIED_ON_A_RANK, ours)
    theirs = run_ranks(2, train_two_steps, whole(TIED_ON_A_RANK).config())
    for step in range(STEPS):
        one, two = (logical.assemble([rank["steps"][step][2] for rank in ranks]) for ranks in (ours, theirs))
        close.assert_close(one, two, rtol=1e-6)


def loss_of_delivered_batches(config: Config) -> tuple[bool, float]:
    """Whether the loader gives tokens to this rank, and the loss of a step."""
    state = make_state(config)
    loader, _ = open_loaders(config, state.ctx)
    batches = loader.next_step()
    loader.close()
    return bool(batches[0].targets_bs.any()), train_step(state, batches).loss


def test_targets_arrive_at_the_last_stage() -> None:
    """Fault last-stage-on-first-rank: only the first rank of a V needs tokens and targets."""
    layout = Layout(LLAMA, pp=3, vpp=2, schedule=f"{NAME}V", micro_batch_size=6, partition=(0, 1, 1, 1, 1, 0))
    ranks = run_ranks(3, loss_of_delivered_batches, layout.config())
    assert [has_targets for has_targets, _ in ranks] == [True, False, False]
    _, expected = loss_of_delivered_batches(Layout(LLAMA, micro_batch_size=6).config())
    for _, loss in ranks:
        assert loss == pytest.approx(expected, rel=1e-5)


# A small model: a matrix is used twice on one path, and with one stage another one is embedding and head

WIDTH = 16
VOCAB = 10


class Net(PipelineStage):
    """An embedding on the first stage, a matrix used twice, a gate, and on the last stage a head.

    If there is only one stage, the head is the embedding.
    """

    def __init__(self, stage: int, num_stages: int, ctx: ParallelContext):
        super().__init__()
        init = Init("normal", 0.5)
        sharding = Sharding.of(ctx, torch.float32)
        self.sharding = sharding
        self.word = VocabParallelEmbedding("word", VOCAB, WIDTH, sharding, init=init) if stage == 0 else None
        columns = [Columns.even(f"{stage}.twice", WIDTH, ctx.tp)]
        self.twice = ColumnParallelLinear(WIDTH, columns, sharding, init=init, bias=True)
        self.gate = shared_vector(f"{stage}.gate", WIDTH, ONES, sharding)
        self.head = None
        if stage == num_stages - 1:
            self.head = self.word or VocabParallelEmbedding("head", VOCAB, WIDTH, sharding, init=init)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return (TensorSpec((batch.seq_length, batch.size, WIDTH), torch.float32),) if self.word is None else ()

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        if self.word is not None:
            x_sbh = self.word(batch.tokens_bs.t())
        x_sbh = self.twice(self.twice(x_sbh * self.gate).tanh()).tanh()
        if self.head is None:
            return x_sbh
        logits = column_linear(x_sbh, self.head.weight, None, self.sharding)[..., :VOCAB].transpose(0, 1)
        log_probs = logits.log_softmax(-1).gather(-1, batch.targets_bs.unsqueeze(-1)).squeeze(-1)
        return -(log_probs * batch.weights_bs).sum()


def batches_of_net(number: int, seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(number):
        tokens, targets = (torch.randint(VOCAB, (2, 5), generator=generator) for _ in range(2))
        batches.append(MicroBatch.of_samples(tokens, targets, torch.rand(2, 5, generator=generator), torch.arange(2)))
    return batches


class Run:
    """The stages of a `Net` on this rank, their flat gradients in buckets of one parameter each, and their runtime."""

    def __init__(self, ctx: ParallelContext, schedule: str, vpp: int):
        rank_of = placement(schedule, ctx.pp.size, vpp)
        self.stages = {s: Net(s, len(rank_of), ctx) for s, rank in enumerate(rank_of) if rank == ctx.pp.rank}
        initialize(self.stages.values(), seed=1)
        self.flat = flatten(list(self.stages.values()), ctx, zero_stage=0, bucket_mb=1e-4)
        self.runtime = PipelineRuntime(self.stages, ctx, schedule, vpp)

    def step(self, *parts: list[MicroBatch]) -> tuple[dict[str, Tensor], int]:
        """A step of micro-batches in several parts. All but the last part are steps of the runtime alone.

        Returns the gradients, and the number of early buckets: their reduction began before the end of the last
        backward.
        """
        self.flat.start_step()
        for part in parts[:-1]:
            self.runtime.step(part, 0.5)
        self.runtime.step(parts[-1], 0.5, self.flat.gradients.begin)
        early = len(self.flat.gradients._started)
        self.flat.gradients.finish()
        self.flat.check_padding()
        return {slot.name: self.flat.grads[slot.start : slot.stop].clone() for slot in self.flat.slots}, early


def by_autograd(pp: int, vpp: int, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """The gradients of all stages, without queues and main gradients."""
    stages = [Net(s, pp * vpp, context.single()) for s in range(pp * vpp)]
    initialize(stages, seed=1)
    for batch in batches:
        x = None
        for stage in stages:
            x = stage(x, batch)
        (0.5 * x).backward()
    return {spec_of(p).name: p.grad.flatten() for stage in stages for p in stage.parameters() if p.grad is not None}


EVERY_SCHEDULE = (("ZB_H1", 1), ("LATE", 1), ("EVERY_OTHER", 1), ("INTERLEAVED", 2), ("V", 2))


def any_number_of_micro_batches(pp: int) -> dict[str, list[tuple[int, int]]]:
    """For each schedule, (buckets reduced early, all buckets) of each step; the numbers of micro-batches change."""
    ctx = context.create(Grid(pp=pp))
    seen: dict[str, list[tuple[int, int]]] = {}
    for schedule, vpp in EVERY_SCHEDULE:
        if pp == 1 and schedule == "V":
            continue
        ours = Run(ctx, NAME + schedule, vpp)
        theirs = Run(ctx, WHOLE[schedule], vpp)
        seen[schedule] = []
        for number in (*range(1, 2 * pp + 4), 0, 3):
            batches = batches_of_net(number, seed=number)
            found, early = ours.step(batches)
            seen[schedule].append((early, len(ours.flat.layout.buckets)))
            expected = by_autograd(pp, vpp, batches)
            for key, other in theirs.step(batches)[0].items():
                assert torch.equal(found[key], other), (schedule, number, key)
                if number:
                    error = (found[key][: expected[key].numel()] - expected[key]).norm()
                    assert error <= 1e-5 * expected[key].norm(), (schedule, number, key)
    return seen


@pytest.mark.parametrize("pp", [1, 2])
def test_any_number_of_micro_batches(pp: int) -> None:
    """Faults weight-used-twice-in-halves, late-weight-gradients, reduced-before-last-half.

    Every gradient starts as NaN. From the second step on with a kind of last action all buckets are reduced early.
    """
    for rank in run_ranks(pp, any_number_of_micro_batches, pp):
        for schedule, steps in rank.items():
            kinds = 2 if schedule == "EVERY_OTHER" else 1
            with_batches = [*steps[:-2], steps[-1]]
            assert all(early == 0 for early, _ in with_batches[:kinds]), (schedule, steps)
            assert all(early == buckets for early, buckets in with_batches[kinds:]), (schedule, steps)


def test_an_i_without_its_w_is_refused() -> None:
    run = Run(context.single(), f"{NAME}WITHOUT_W", 1)
    with pytest.raises(ConfigError, match="rank 0 never runs 0W1, which adds the gradients of weights"):
        run.step(batches_of_net(2, seed=0))


@pytest.mark.parametrize("schedule", ["LATE", "EVERY_OTHER"])
def test_steps_of_the_runtime_accumulate(schedule: str) -> None:
    """Fault steps-that-accumulate: two of 4 micro-batches add the same bits as one of 8."""
    batches = batches_of_net(8, seed=0)
    run = Run(context.single(), NAME + schedule, 1)
    for _ in range(2):
        at_once, _ = run.step(batches)
        in_parts, _ = run.step(batches[:4], batches[4:])
        assert bitwise(in_parts, at_once)


# What is kept and what is communicated


class Actions(Recorder):
    """A recorder calling `measure` after each action and keeping the results."""

    def __init__(self, measure: Callable[[], Any]):
        super().__init__(DeviceClock(torch.device("cpu")), 1)
        self.measure = measure
        self.measured: list[tuple[str, Any]] = []

    @contextmanager
    def span(self, name: str, numbers: tuple[int, int]) -> Iterator[None]:
        with super().span(name, numbers):
            yield
        self.measured.append((str(Action(name, *numbers)), self.measure()))


class Allocations(TorchDispatchMode):
    """Knows the storages made by operations, without those of the tensors `without`."""

    def __init__(self, without: Sequence[Tensor]):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in without}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of those still in memory."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def left_to_weight_gradients(layout: Layout) -> int:
    """Bytes left by the I of a micro-batch to its W, for the whole model of family llama."""
    model = layout.model
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    # Inputs and gradients of outputs: of q, k, v in one product, of o, of gate and up in one product, and of down.
    layer = 4 * model.hidden_size + 2 * queries + 2 * keys + 3 * model.intermediate_size
    head = model.hidden_size + 256  # rows of the padded vocabulary
    floats = model.num_hidden_layers * layer + head + model.hidden_size  # the last is the embedding's gradient
    # The gradients of norms and biases themselves. Those of q and k norms have the width of a head.
    small = model.num_hidden_layers * (2 * model.hidden_size + 2 * model.head_dim + queries + 2 * keys)
    small += model.hidden_size
    return layout.micro_batch_size * LENGTH * (4 * floats + 8) + 4 * small  # 8 for an id


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_only_what_weight_gradients_need_is_kept_until_then(recompute: str) -> None:
    """Fault memory-until-weight-gradients: all else is freed when I ends, and the rest when W ends."""
    layout = Layout(LLAMA, schedule=f"{NAME}LATE", micro_batch_size=6, recompute=recompute)
    state = make_state(layout.config())
    batches = micro_batches(state.config, state.ctx, 0)
    inputs = [x for batch in batches for x in (batch.tokens_bs, batch.targets_bs, batch.weights_bs)]
    allocations = Allocations([state.weights.flat, state.grads.flat, *inputs])
    trace = state.ctx.flight.recorder = Actions(allocations.alive)
    state.grads.zero()
    with allocations:
        state.pipeline.step(batches, 1.0)
    kept = dict(trace.measured)
    left = left_to_weight_gradients(layout)
    scale = loss = 4
    assert kept["0I0"] == left + scale + loss
    assert kept["0F1"] - kept["0I0"] == kept["0F0"] - scale
    assert kept["0I1"] == 2 * left + scale + 2 * loss
    assert kept["0W0"] == left + scale + 2 * loss
    assert kept["0W1"] == scale + 2 * loss
    # So does a plan. Two micro-batches are between I and W at one time, or one and a forward.
    planned = [report_rank(one.config(), PARTS, 0).activations for one in (layout, whole(layout))]
    assert planned[0] == left + max(left, planned[1])


@pytest.mark.parametrize(
    ("layout", "in_first_half"),
    [
        (Layout(SHARED, schedule=f"{NAME}LATE", micro_batch_size=6), ""),
        (Layout(GPT, schedule=f"{NAME}LATE", micro_batch_size=6, recompute="full"), ""),
        (Layout(LLAMA, schedule=f"{NAME}LATE", micro_batch_size=6, loss_chunk=7), "head.weight"),
    ],
    ids=named,
)
def test_gradients_are_added_in_the_second_half(layout: Layout, in_first_half: str) -> None:
    """All but the gradient of a head with its loss in chunks, as its stage says."""
    state = make_state(layout.config())
    params = [param for stage in state.stages.values() for param in stage.parameters()]
    names = {spec_of(param).name: param.main_grad for param in params}  # type: ignore[attr-defined]
    trace = state.ctx.flight.recorder = Actions(
        lambda: {key for key, main_grad in names.items() if not main_grad.is_stale}
    )
    state.grads.zero()
    state.pipeline.step(micro_batches(state.config, state.ctx, 0), 1.0)
    added = dict(trace.measured)
    assert added["0I0"] == set(in_first_half.split())
    assert [stage.adds_gradients_in_i for stage in state.stages.values()] == [bool(in_first_half)]
    assert added["0W0"] == set(names)


def collectives_of_actions(config: Config) -> dict[str, Counter[tuple[str, str]]]:
    """For each action of a step, how often this rank has called each (axis, collective)."""
    state = make_state(config)

    def calls() -> Counter[tuple[str, str]]:
        return Counter(
            {(axis.name, operation): n for axis in state.ctx.axes for operation, n in axis.traffic.calls.items()}
        )

    before = calls()
    trace = state.ctx.flight.recorder = Actions(calls)
    state.grads.zero()
    state.pipeline.step(micro_batches(config, state.ctx, 0), 1.0)
    found = {}
    for action, after in trace.measured:
        found[action] = after - before
        before = after
    return found


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(SHARED, dp=2, ep=2, schedule=f"{NAME}LATE", micro_batch_size=3), {}),
        # The input of q, k, v and that of gate and up in each of four layers, and that of the head.
        (
            Layout(LLAMA, tp=2, sequence_parallel=True, schedule=f"{NAME}LATE", micro_batch_size=6),
            {("tp", "all_gather"): 2 * 4 + 1},
        ),
    ],
    ids=["experts", "sequence-parallel"],
)
def test_weight_gradients_wait_only_for_inputs(layout: Layout, expected: dict[tuple[str, str], int]) -> None:
    """Fault expert-gradients-wait-for-nothing: rows are dispatched in F and I. A gathered input is gathered again."""
    for found in run_ranks(2, collectives_of_actions, layout.config()):
        assert found["0I0"]
        assert found["0W0"] == found["0W1"] == expected
