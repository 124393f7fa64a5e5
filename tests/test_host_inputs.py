"""Inputs of recomputed layers in host memory (train.offload): the bits of a run without, and the bytes of the plan."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_tools.plan.memory import host_bytes_of_inputs, report_rank
from torch import Tensor

from megapar.activations import recompute
from megapar.activations.host_inputs import HostInputs
from megapar.activations.recompute import Recompute
from megapar.base.errors import ConfigError, NumericError
from megapar.config.options import Config
from megapar.observe import memory_report
from megapar.observe.kept import KeptBytes
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from megapar.system.side_stream import SideStream
from megapar.train import host_memory
from tests.support import gemma4, handing, program
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, SHARED, Layout, make_state, micro_batches, name
from tests.support.late_stream import LateStream, NotAwaited
from tests.support.plans import PARTS
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but

STEPS = 2


class PoisoningInputs(HostInputs):
    """Copies are made as late as a device may make them, and freed memory is NaN: that of inputs, and that of slots."""

    def __init__(self, stream: SideStream | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.stream = stream or LateStream()
        self.released = 0

    def _release(self, kept: Any) -> None:
        self.released += 1
        kept.x.fill_(math.nan)
        super()._release(kept)

    def _free_slot(self, kept: Any) -> None:
        # No later than this the copy back has been made.
        kept.in_slot().fill_(math.nan)
        super()._free_slot(kept)

    def _take_slot(self, nbytes: int) -> Tensor:
        slot = super()._take_slot(nbytes)
        slot.fill_(255)  # of any floating-point type a NaN
        return slot


def trained(config: Config, inputs: HostInputs | None = None) -> tuple[Bits, list[float]]:
    """State and losses after two steps, with an evaluation between them."""
    state = make_state(config)
    if inputs is not None:
        state.pipeline.host_inputs = inputs
    losses = []
    for step in range(STEPS):
        losses.append(train_step(state, micro_batches(config, state.ctx, step)).loss)
        losses.append(evaluate(state, micro_batches(config, state.ctx, STEPS)))
    return bits(state), losses


def with_and_without(layout: Layout, precision: str) -> tuple[int, list[tuple[Bits, list[float]]]]:
    """Without offload; with all of it, late and poisoned; with a share. Before them how many inputs were freed."""
    late = PoisoningInputs()
    config = layout.config(precision)
    shares = [(0.0, None), (1.0, late), (0.4, HostInputs(torch.device("cpu")))]
    found = [trained(replace(config, train=replace(config.train, offload=share)), inputs) for share, inputs in shares]
    assert not any(late._kept.values()), "a slot in use after a step"
    return late.released, found


LAYOUTS = [
    (Layout(LLAMA, recompute="full"), "bf16"),
    (Layout(LLAMA, pp=2, recompute="full"), "fp32"),
    (Layout(GPT, dp=2, zero_stage=3, recompute="full"), "fp32"),
    (Layout(GPT, pp=2, schedule="zb-h1", recompute="full"), "fp32"),
    (Layout(LLAMA, pp=2, vpp=2, schedule="dualpipe-v", recompute="full"), "fp32"),
    (Layout(LLAMA, pp=2, vpp=2, schedule="interleaved", recompute="all_but_attention"), "bf16"),
    (Layout(LLAMA, pp=2, vpp=2, schedule="zb-v", recompute="full"), "fp32"),
    (Layout(LLAMA, pp=2, recompute="full", layers=("0-1", "3")), "fp32"),
    (Layout(LLAMA, tp=2, sequence_parallel=True, recompute="full"), "fp32"),
    (Layout(GPT, cp=2, recompute="full"), "fp32"),
    (Layout(SHARED, dp=2, ep=2, recompute="full"), "fp32"),
    (Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=2, zero_stage=3, recompute="all_but_attention"), "fp32"),
    (Layout(LLAMA, pp=2, dp=2, zero_stage=3, schedule="breadth", recompute="full"), "fp32"),
    (Layout(LLAMA, vpp=2, schedule="breadth", zero_stage=2, recompute="full"), "fp32"),
    (Layout(LLAMA, pp=2, trainable=("head*", "layers.3.mlp.*"), recompute="full"), "fp32"),
]


@pytest.mark.parametrize(
    ("layout", "precision"), slow_but([1, 2], LAYOUTS), ids=lambda x: name(x) if isinstance(x, Layout) else x
)
def test_no_share_changes_a_bit(layout: Layout, precision: str) -> None:
    """Fault offloaded-input-raced."""
    ranks = run_ranks(layout.world, with_and_without, replace(layout, micro_batch_size=3), precision)
    for _, (without, *others) in ranks:
        for found, losses in others:
            assert_bitwise(found, without[0], "offload")
            assert losses == without[1]
    assert any(released for released, _ in ranks)


def distances(layout: Layout) -> list[float]:
    """Relative distances of this rank's state with all inputs on the host from that without."""
    config = layout.config("bf16")
    moved, _ = trained(replace(config, train=replace(config.train, offload=1.0)))
    expected, _ = trained(config)
    pairs = [(moved[key].double(), x.double()) for key, x in expected.items()]
    return [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs]


@pytest.mark.gpus
def test_a_gpu_copies_beside_its_stream() -> None:
    """Sums of a GPU may come in another order from run to run."""
    for rank in run_ranks(2, distances, Layout(LLAMA, pp=2, recompute="full", micro_batch_size=2)):
        assert max(rank) <= 1e-6


# Copies that come too late


def differs(config: Config, skipped: str) -> bool:
    """Whether a bit is another one if work of functions of this name is not waited for."""
    expected, _ = trained(config)
    try:
        found, _ = trained(config, PoisoningInputs(NotAwaited(skipped)))
    except NumericError:
        return True
    return any(not torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize("skipped", ["_Input.to_slot.", "_Input.from_slot."])
def test_a_missing_wait_is_seen(skipped: str) -> None:
    """Fault offloaded-input-raced: memory of an input is freed before it was copied, or read before it is back."""
    assert differs(Layout(LLAMA, recompute="full", offload=1.0, micro_batch_size=4).config(), skipped)


# Inputs of any form


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


WHOLE = torch.arange(1.0, 49.0).view(6, 8)
FORMS = {
    "view": lambda x: x[1:, 2:6],
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, ::3],
    "expanded": lambda x: x[:1].expand(4, 8),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[2, 3],
}


@pytest.mark.parametrize("form", FORMS)
def test_views_strided_and_shared_inputs_come_back_as_they_were(form: str) -> None:
    """Fault offloaded-input-raced. Two layers share two inputs, of which each layer keeps copies of its own."""
    gradients: list[Tensor | None] = []
    noted: list[Any] = []

    def layer(a: Tensor, b: Tensor) -> Tensor:
        noted.append((a.shape, a.stride(), b.shape, b.stride()))
        return Square.apply(a * b)

    for context in (lambda kept: nullcontext(), lambda kept: kept.forward((0, 0))):
        whole = WHOLE.clone().requires_grad_()
        kept = HostInputs(torch.device("cpu"))
        kept.stream = LateStream()
        kept.begin([(0, 0)])
        with context(kept):
            a, b = (FORMS[form](whole * factor) for factor in (1, 3))
            y = recompute.run(True, layer, a, b, offloads=True) + recompute.run(True, layer, a, b, offloads=True)
        y.sum().backward()
        kept.end_backward((0, 0))
        gradients.append(whole.grad)
    stays = form in ("expanded", "empty")
    assert kept.nbytes == (0 if stays else 4 * a.nbytes)
    assert torch.equal(*gradients)
    assert noted == noted[:1] * 8, "two passes of two layers, twice"


def test_an_input_is_taken_once_and_a_forgotten_graph_frees_its_slots() -> None:
    """Fault offload-without-backward."""
    x = torch.ones(3, requires_grad=True)
    kept = HostInputs(torch.device("cpu"))
    for _ in range(3):
        kept.begin([(0, 0)])
        with kept.forward((0, 0)):
            y = recompute.run(True, Square.apply, x * 2, offloads=True)
    assert kept.nbytes == x.nbytes
    kept.fetch_next()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.full((3,), 8.0))
    with kept.forward((0, 0)):
        taken = kept.keep(x)
    kept.give(taken)
    with pytest.raises(RuntimeError, match="taken twice"):
        kept.give(taken)


def test_forward_passes_without_a_backward_keep_nothing() -> None:
    """Fault offload-without-backward: an evaluation, and a stage called by itself, which no schedule knows."""
    config = Layout(LLAMA, recompute="full", offload=1.0, micro_batch_size=4).config()
    state = make_state(config)
    batches = micro_batches(config, state.ctx, 0)
    evaluate(state, batches)
    state.stages[0](None, batches[0]).backward()
    assert state.pipeline.host_inputs.nbytes == 0
    state.grads.zero()
    train_step(state, batches)
    assert state.pipeline.host_inputs.nbytes > 0


# Bytes


def measured_and_planned(config: Config, device: str) -> tuple[list[int], dict[str, int], dict[str, int]]:
    """Bytes of slots after each of three steps; rows of this rank in the second step and by plan."""
    state = make_state(config)
    slots = []
    for step in range(3):
        kept = KeptBytes(state.stages, state.pipeline.deferred_nbytes)
        state.pipeline.after_action[:] = [kept.note_action]
        with kept.counting():
            train_step(state, micro_batches(config, state.ctx, step))
        slots.append(state.pipeline.host_inputs.nbytes)
    planned = replace(config, launch=replace(config.launch, device=device))
    rank = state.ctx.world.rank
    assert host_bytes_of_inputs(planned, PARTS, rank) == slots[0]
    return slots, memory_report.measured(state, kept, device), report_rank(planned, PARTS, rank).rows


MEASURED = [
    Layout(LLAMA, pp=2, schedule="zb-h1", recompute="full", offload=1.0),
    Layout(LLAMA, pp=2, dp=2, zero_stage=3, recompute="full", offload=0.5),
    Layout(LLAMA, recompute="full", every=2, offload=1.0),
    Layout(LLAMA, pp=2, recompute="full", offload=0.25),
    Layout(handing.MODEL, pp=2, recompute="full", offload=0.5),
    Layout(GPT, tp=2, sequence_parallel=True, recompute="all_but_attention", offload=1.0),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved", recompute="full", offload=1.0),
    Layout(LLAMA, pp=2, vpp=2, schedule="dualpipe-v", recompute="full", offload=0.5),
    Layout(LLAMA, pp=2, dp=2, zero_stage=3, schedule="breadth", recompute="full", offload=1.0),
    Layout(GPT, vpp=2, schedule="breadth", zero_stage=2, recompute="full", offload=1.0),
    Layout(LLAMA, cp=2, recompute="full", offload=1.0),
    Layout(SHARED, dp=2, ep=2, recompute="full", offload=1.0),
    Layout(LLAMA, pp=2, trainable=("head*", "layers.3.mlp.*"), recompute="full", offload=1.0),
    Layout(gemma4.MODEL, pp=2, recompute="full", offload=0.5),
]


@pytest.mark.parametrize(
    ("layout", "device"),
    slow_but([1, 2], [(layout, device) for layout in MEASURED for device in ("cuda", "cpu")]),
    ids=lambda x: name(x) if isinstance(x, Layout) else x,
)
def test_a_step_takes_the_bytes_of_the_plan_on_both_sides(layout: Layout, device: str) -> None:
    """Fault offload-pool-grows. To the byte, and from the second step on no slot is made."""
    config = replace(layout, micro_batch_size=2, backend="torch").config()
    for slots, measured, planned in run_ranks(layout.world, measured_and_planned, config, device):
        assert measured == planned
        assert slots[1:] == slots[:-1]


def test_a_plan_moves_the_inputs_and_keeps_two() -> None:
    """Of 4 layers and one micro-batch of 2 x 24 tokens: each input is 48 x 48 fp32 numbers."""
    one = 48 * 48 * 4
    config = Layout(LLAMA, recompute="full", micro_batch_size=2, backend="torch").config()
    config = replace(config, launch=replace(config.launch, device="cuda"))
    without = report_rank(config, PARTS, 0)
    for share, layers in ((0.25, 1), (0.5, 2), (1.0, 4)):
        found = report_rank(replace(config, train=replace(config.train, offload=share)), PARTS, 0)
        assert found.inputs_on_host == layers * one
        assert without.activations - found.activations == (layers - 1) * one
        assert found.total == found.weights + found.gradients + found.optimizer + found.activations


@pytest.mark.parametrize(
    ("every", "share", "layers"),
    [(1, 0.5, [0, 2, 4, 6]), (2, 0.5, [0, 4]), (1, 0.01, [0]), (3, 1.0, [0, 3, 6]), (1, 0.3, [0, 3, 6]), (1, 0.0, [])],
)
def test_layers_are_spread_evenly(every: int, share: float, layers: list[int]) -> None:
    rule = Recompute("full", every, share)
    assert [number for number in range(8) if rule.offloads(number)] == layers
    assert not any(Recompute("light", 1, share).offloads(number) for number in range(8))


def test_of_named_layers_a_share_is_spread_evenly() -> None:
    for share, layers in ((0.0, []), (0.5, [1, 6]), (1.0, [1, 2, 6])):
        rule = Recompute("full", 1, share, (1, 2, 6))
        assert [number for number in range(8) if rule.layer(number)] == [1, 2, 6]
        assert [number for number in range(8) if rule.offloads(number)] == layers


# What is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train.offload", "0.5"), "train.offload=0.5, train.recompute=none: only inputs of recomputed layers"),
        (("--train.offload", "1", "--train.recompute", "light"), "set train.recompute full, or leave train.offload"),
        (("--train.offload", "1.5", "--train.recompute", "full"), "train.offload=1.5: must be from 0 to 1"),
    ],
)
def test_an_offload_of_nothing_is_refused(flags: tuple[str, ...], words: str, tmp_path: Path) -> None:
    ended = program.run(*flags, cwd=tmp_path)
    assert (ended.code, ended.err.count("\n")) == (ConfigError.exit_code, 1), ended.err
    assert words in ended.err


def test_a_host_with_too_little_memory_for_the_inputs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, by the bytes of the plan."""
    flags = (*program.TINY, "--train.steps", "2", "--train.recompute", "full", "--train.offload", "1")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    ended = program.run(*flags, cwd=tmp_path)
    assert (ended.code, ended.err.count("\n")) == (ConfigError.exit_code, 1), ended.err
    assert "train.offload=1: the 1 rank(s) of" in ended.err
    assert "are available; lower train.offload" in ended.err
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10_000_000)
    assert program.run(*flags, cwd=tmp_path).code == 0
