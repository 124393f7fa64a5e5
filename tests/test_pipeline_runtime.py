"""The pipeline runtime on real gloo ranks: a split toy model must give the losses and gradients of the unsplit one."""

import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Action, make, placement
from megapar.system.device import DeviceClock
from megapar.system.recorder import Recorder
from tests.support.distributed import run_ranks
from tests.support.sweeps import slow_but

WIDTH, VOCAB = 6, 11
LAYOUTS = (("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3))
IN_HALVES = (
    ("zb-h1", 1),
    ("zb-2p", 1),
    ("zb-interleaved", 2),
    ("zb-v", 2),
    ("v-half", 2),
    ("v-min", 2),
    ("dualpipe-v", 2),
)


class Double(torch.autograd.Function):
    """Written in Python: its node alone does not keep the graph behind it alive."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class ToyStage(PipelineStage):
    """Links carry hidden states [s, b, h], a gate [b, s, 1] ignored by the last stage, and int64 token ids.

    In float64, so errors beyond rounding show.
    """

    def __init__(self, stage: int, num_stages: int, jitter: random.Random | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.first, self.last, self.jitter = stage == 0, stage == num_stages - 1, jitter
        self.embedding = nn.Embedding(VOCAB, WIDTH) if self.first else None
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCAB) if self.last else None
        for parameter in self.double().parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        if self.first:
            return ()
        b, s = batch.tokens_bs.shape
        floats = (TensorSpec((s, b, WIDTH), torch.float64), TensorSpec((b, s, 1), torch.float64))
        return (*floats, TensorSpec((b, s), torch.int64))

    def forward(self, x, batch: MicroBatch):
        if self.jitter is not None:
            time.sleep(self.jitter.choice((0, 0, 0.001)))
        if self.first:
            x_sbh, tokens_bs = self.embedding(batch.tokens_bs).transpose(0, 1), batch.tokens_bs
            gate = None
        else:
            x_sbh, gate, tokens_bs = x
        gate = torch.ones(*tokens_bs.shape, 1, dtype=x_sbh.dtype) if self.first or self.last else gate
        x_sbh = x_sbh + torch.tanh(self.linear(x_sbh)) * gate.transpose(0, 1) + tokens_bs.t().unsqueeze(-1) / VOCAB
        if not self.last:
            return Double.apply(x_sbh.transpose(0, 1)).transpose(0, 1) / 2, self.gate(x_sbh).transpose(0, 1), tokens_bs
        log_probs = self.head(x_sbh).transpose(0, 1).log_softmax(-1)
        return -(log_probs.gather(-1, batch.targets_bs.unsqueeze(-1)).squeeze(-1) * batch.weights_bs).sum().float()


def make_batches(m: int, seed: int, longest: int = 7) -> list[MicroBatch]:
    """Micro-batches of different lengths with a weight of its own for every token."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(m):
        shape = (2, int(torch.randint(1, longest + 1, (), generator=generator)))
        tokens, targets = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
        batches.append(MicroBatch.of_samples(tokens, targets, torch.rand(shape, generator=generator), torch.arange(2)))
    return batches


def unsplit(
    stages: list[nn.Module], batches: list[MicroBatch], scale: float
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Losses and every stage's gradients of the whole model in one process."""
    stages = copy.deepcopy(stages)
    losses = []
    for batch in batches:
        x = None
        for stage in stages:
            x = stage(x, batch)
        (x * scale).backward()
        losses.append(x.detach())
    return losses, [[p.grad for p in stage.parameters()] for stage in stages]


def assert_same(actual: Tensor, expected: Tensor, what: object, tolerance: float = 1e-6) -> None:
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"{what}: relative error {error}"


def check_step(ctx, runtime: PipelineRuntime, stages: list[nn.Module], batches: list[MicroBatch], what: object) -> None:
    scale = 1 / sum(float(b.weights_bs.sum()) for b in batches)
    losses, grads = unsplit(stages, batches, scale)
    actual = runtime.step(batches, torch.tensor(scale))
    has_last_stage = runtime.num_stages - 1 in runtime.stages  # on the first rank, if stages lie in a V
    assert len(actual) == (len(batches) if has_last_stage else 0), what
    for one, other in zip(actual, losses, strict=False):
        assert one.dtype == torch.float32, what
        assert not one.requires_grad, what
        assert_same(one, other, what)
    for number, stage in runtime.stages.items():
        for (name, p), grad in zip(stage.named_parameters(), grads[number], strict=True):
            nothing = torch.zeros_like(p)  # what an unused output gets: None in one graph, zeros over a link
            ours, theirs = (nothing if g is None else g for g in (p.grad, grad))
            assert_same(ours, theirs, (what, number, name), tolerance=1e-10)
            p.grad = None


def build(ctx, schedule: str, vpp: int, **options) -> tuple[PipelineRuntime, list[nn.Module]]:
    num_stages = ctx.pp.size * vpp
    stages = [ToyStage(s, num_stages, **options) for s in range(num_stages)]
    rank_of = placement(schedule, ctx.pp.size, vpp)
    mine = {s: copy.deepcopy(stages[s]) for s, rank in enumerate(rank_of) if rank == ctx.pp.rank}
    return PipelineRuntime(mine, ctx, schedule, vpp), stages


def every_schedule(pp: int) -> None:
    ctx = context.create(Grid(pp=pp))
    for schedule, vpp in (*LAYOUTS, *IN_HALVES):
        runtime, stages = build(ctx, schedule, vpp)
        for m in (1, 3, 8) if (schedule, vpp) in IN_HALVES else (1, 2, 3, 4, 8):
            check_step(ctx, runtime, stages, make_batches(m, seed=m), (schedule, pp, vpp, m))


@pytest.mark.parametrize("pp", slow_but([0, 1], [1, 2, 4]))
def test_every_schedule_equals_the_unsplit_model(pp):
    """Faults pipeline-schedules-agree, ragged-micro-batches, interleaved-on-two-ranks: losses and all gradients, for
    any number of micro-batches, several tensors on each link."""
    run_ranks(pp, every_schedule, pp)


def twenty_steps() -> None:
    ctx = context.create(Grid(pp=4))
    jitter = random.Random(ctx.pp.rank)
    runtime, stages = build(ctx, "interleaved", 2)
    for stage in runtime.stages.values():
        stage.jitter = jitter
    for step in range(20):
        check_step(ctx, runtime, stages, make_batches(1 + step % 7, seed=step, longest=40), step)


def test_twenty_steps_with_random_lengths_finish():
    """Fault changing-sequence-lengths: lengths change from micro-batch to micro-batch and ranks run at changing
    speeds."""
    run_ranks(4, twenty_steps)


def evaluations() -> None:
    ctx = context.create(Grid(pp=2))
    for schedule, vpp in LAYOUTS:
        runtime, stages = build(ctx, schedule, vpp)
        for m in (1, 3, 4):
            losses = unsplit(stages, make_batches(m, seed=m), 1.0)[0]
            actual = runtime.evaluate(make_batches(m, seed=m))
            assert len(actual) == (m if ctx.pp.last else 0)
            for one, other in zip(actual, losses, strict=False):
                assert_same(one, other, (schedule, vpp, m))
            assert all(p.grad is None for stage in runtime.stages.values() for p in stage.parameters())


def test_evaluation_gives_the_same_losses_and_no_gradients():
    run_ranks(2, evaluations)


class CountedWork:
    """A transfer counting the waits for it."""

    def __init__(self, work: dist.Work):
        self.work, self.waits = work, 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:  # gloo never returns from a second wait
            self.work.wait()


def counted_waits() -> list[int]:
    ctx = context.create(Grid(pp=2), use_shared_memory=False)
    works = []
    real = dist.batch_isend_irecv

    def counting(operations):
        made = [CountedWork(work) for work in real(operations)]
        works.extend(made)
        return made

    dist.batch_isend_irecv = counting
    runtime, _ = build(ctx, "interleaved", 2)
    runtime.step(make_batches(3, seed=0))
    runtime.evaluate(make_batches(3, seed=0))
    return [work.waits for work in works]


def test_every_work_of_a_batch_is_waited_for_once():
    """Fault all-transfers-waited-for: gloo returns one for each tensor: on 3 links 3 forward and 2 back, then 3
    forward in evaluation."""
    for waits in run_ranks(2, counted_waits):
        assert waits == [1] * (3 * 3 * (3 + 2 + 3))


class SentOutputs(PipelineStage):
    """A stage with a graph not needing its output; notes how many earlier outputs are alive when it runs."""

    def __init__(self, last: bool):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), last
        self.outputs: list[StorageWeakRef] = []
        self.alive_at_forward: list[int] = []
        self.alive_at_backward: list[int] = []

    def alive(self) -> int:
        return sum(not output.expired() for output in self.outputs)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return (TensorSpec((3, 4), torch.float32),)

    def forward(self, x, batch: MicroBatch):
        self.alive_at_forward.append(self.alive())
        y = self.linear(torch.ones(3, 4) if x is None else x)
        if self.last:
            return y.sum()
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        y.register_hook(lambda grad: self.alive_at_backward.append(self.alive()))
        return y


def sent_outputs(schedule: str) -> tuple[list[int], list[int]]:
    ctx = context.create(Grid(pp=2))
    stage = SentOutputs(last=ctx.pp.last)
    PipelineRuntime({ctx.pp.rank: stage}, ctx, schedule, 1).step(make_batches(8, seed=0))
    return stage.alive_at_forward, stage.alive_at_backward


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sent_activations_are_freed_before_their_backward(schedule):
    """Only the newest may be alive: GPipe would otherwise hold all 8 when its first backward begins."""
    at_forward, at_backward = run_ranks(2, sent_outputs, schedule)[0]
    assert len(at_forward) == len(at_backward) == 8
    assert max(at_forward) <= 1
    assert max(at_backward) <= 1


def gradients(stage: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in stage.parameters() if p.grad is not None]


def last_backwards() -> None:
    ctx = context.create(Grid(pp=2))
    for schedule, vpp in LAYOUTS:
        runtime, _ = build(ctx, schedule, vpp)
        recorder = ctx.flight.recorder = Recorder(DeviceClock(ctx.device), 1)
        calls = []

        def begin(last, runtime=runtime, calls=calls):
            backwards = sum(span.name == "B" for span in ctx.flight.recorder.finish().spans)
            calls.append((last, backwards, {s: gradients(stage) for s, stage in runtime.stages.items()}))

        runtime.step(make_batches(4, seed=0), 1.0, begin)
        ((last, backwards, grads),) = calls
        stage_of_last = [span.numbers[0] for span in recorder.finish().spans if span.name == "B"][-1]
        assert last == ("B", stage_of_last)
        assert backwards == 4 * vpp - 1
        for s, stage in runtime.stages.items():
            final = [torch.equal(then, now) for then, now in zip(grads[s], gradients(stage), strict=True)]
            assert all(final) == (s != stage_of_last), (schedule, vpp, s)


def test_on_last_backward_runs_when_one_backward_is_left():
    run_ranks(2, last_backwards)


def frozen_first_stage() -> None:
    ctx = context.create(Grid(pp=2))
    runtime, stages = build(ctx, "1f1b", 1)
    for stage in (stages[0], *([runtime.stages[0]] if ctx.pp.first else [])):
        stage.requires_grad_(False)
    check_step(ctx, runtime, stages, make_batches(4, seed=0), "frozen")


def test_a_stage_without_trainable_weights_is_no_trouble():
    run_ranks(2, frozen_first_stage)


def recorded() -> list:
    ctx = context.create(Grid(pp=2))
    runtime, _ = build(ctx, "interleaved", 2)
    recorder = Recorder(DeviceClock(ctx.device), 1)
    ctx.flight.recorder = recorder
    runtime.step(make_batches(3, seed=0))
    spans = [span for span in recorder.finish().spans if not span.axis]
    return [(Action(span.name, *span.numbers), span.start, span.end) for span in spans]


def test_every_action_is_recorded_in_order_and_inputs_before_their_use():
    ends = {}
    ranks = run_ranks(2, recorded)
    for spans, order in zip(ranks, make("interleaved", 2, 2, 3), strict=True):
        assert [action for action, _, _ in spans] == order
        times = [t for _, start, end in spans for t in (start, end)]
        assert times == sorted(times)
        ends.update({action: end for action, _, end in spans})
    for action, start, _ in ranks[0] + ranks[1]:
        if action.kind == "F" and action.stage > 0:
            assert ends[action._replace(stage=action.stage - 1)] <= start


def test_stages_of_another_rank_and_impossible_schedules_are_refused():
    ctx = context.single()
    with pytest.raises(ValueError, match=r"pp rank 0 needs stages \[0, 1\], but was given \[1\]"):
        PipelineRuntime({1: ToyStage(1, 2)}, ctx, "gpipe", 2)
    with pytest.raises(ConfigError, match="interleaved"):
        PipelineRuntime({}, ctx, "1f1b", 2)
    with pytest.raises(ConfigError, match="micro-batches is 0"):
        make("1f1b", 1, 1, 0)


def test_a_replica_without_micro_batches_runs_an_empty_step() -> None:
    told: list[object] = []
    runtime = PipelineRuntime({0: ToyStage(0, 1)}, context.single(), "1f1b", 1)
    assert runtime.step([], on_last_backward=told.append) == []
    assert told == [None], "its gradients of zero must be reduced, too"
