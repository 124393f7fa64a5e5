"""A GPU decides itself whether a step updates weights, and its numbers are read one step late. CPUs do the same here
(`behind_the_host`), and every run is compared with one reading its numbers in time.

tests/test_gpu_waits.py has the order of queuing and reading steps.
"""

import io
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages

from megapar.base.errors import NumericError
from megapar.base.grid import Grid
from megapar.base.precision import LossScale
from megapar.checkpoint.format import checkpoint_folders
from megapar.checkpoint.tiers import FOLDER
from megapar.config.options import CheckpointConfig, Config, LogConfig
from megapar.data.delivery import Delivery
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.step import step as step_module
from megapar.step.state import TrainState
from megapar.step.step import queue_step, train_step
from megapar.system import device
from megapar.train.data import open_loaders
from megapar.train.trainer import TrainingRun, start, train
from tests.support.distributed import rank_device, run_ranks
from tests.support.faults import SPEED
from tests.support.grid import GPT, LLAMA, ONE_KV_HEAD, SAMPLES, Layout, make_state, micro_batches
from tests.support.runs import assert_bitwise, behind_the_host, bits, stored
from tests.support.sweeps import slow_but


@dataclass(frozen=True)
class Case:
    layout: Layout
    precision: str = "fp32"
    overlap_param_gather: bool = False

    def config(self, run_dir: Path, steps: int) -> Config:
        config = self.layout.config(self.precision)
        return replace(
            config,
            train=replace(config.train, steps=steps),
            optimizer=replace(config.optimizer, overlap_param_gather=self.overlap_param_gather),
            checkpoint=CheckpointConfig(every=2),
            log=LogConfig(tensorboard=False),
            run_dir=str(run_dir),
        )


def started(config: Config) -> tuple[TrainState, Delivery]:
    """The state and the data of a run at its first step."""
    parallel = config.parallel
    where = rank_device(torch.distributed.get_rank())
    ctx = context.create(Grid(tp=parallel.tp, dp=parallel.dp, pp=parallel.pp, order=parallel.order), device=where)
    state, _ = start(config, ctx, build_stages(config, ctx))
    data, _ = open_loaders(config, ctx)
    return state, data


def before_each_step(data: Delivery, act: Callable[[], None]) -> None:
    """Make `data` call `act` before it hands out a step."""
    read = data.next_step

    def next_step() -> list[MicroBatch]:
        act()
        return read()

    data.next_step = next_step  # type: ignore[method-assign]


# A run


SMALL_GPT = replace(GPT, num_hidden_layers=2)
SMALL_LLAMA = replace(LLAMA, num_hidden_layers=2)
CASES = [
    Case(Layout(SMALL_GPT, dp=2, micro_batch_size=3), "bf16"),
    Case(Layout(SMALL_LLAMA, dp=2, micro_batch_size=3), "bf16", overlap_param_gather=True),
    Case(Layout(SMALL_LLAMA, tp=2, sequence_parallel=True, zero_stage=0, micro_batch_size=6)),
    Case(Layout(SMALL_LLAMA, pp=2, micro_batch_size=3), "fp16"),
]
STEPS = 5


def overflow_at_the_second_step(state: TrainState) -> None:
    if state.step == 1:
        state.loss_scale.scale = 2.0**40
    if state.step == 2:
        assert state.loss_scale == LossScale(2.0**39, dynamic=True)
        state.loss_scale.scale = 2.0**10


def run_all(folder: Path) -> list[Any]:
    """Bits and counts of each case, read in time and late."""
    shown = []
    for name, place in (("in time", nullcontext), ("late", behind_the_host)):
        for number, case in enumerate(CASES):
            run_dir = folder / name / str(number)
            run_dir.mkdir(parents=True, exist_ok=True)
            state, data = started(case.config(run_dir, STEPS))
            if case.precision == "fp16":
                before_each_step(data, lambda state=state: overflow_at_the_second_step(state))  # type: ignore[misc]
            with place(), redirect_stdout(io.StringIO()):
                assert train(TrainingRun(state, data, {}, run_dir, flops_per_token=1)) == ""
            shown.append((bits(state), state.step, state.consumed_samples, state.optimizer.step_count))
    return shown


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and memory add to it."""
    text = (folder / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k not in SPEED} for line in text.splitlines()]


def test_numbers_that_are_read_late_change_no_bit_of_a_run(tmp_path: Path) -> None:
    """Weights, moments, counts, every checkpoint and every line, an fp16 overflow among them."""
    for shown in run_ranks(2, run_all, tmp_path):
        in_time, late = shown[: len(CASES)], shown[len(CASES) :]
        for case, mine, theirs in zip(CASES, late, in_time, strict=True):
            assert_bitwise(mine[0], theirs[0], str(case))
            assert mine[1:] == theirs[1:], case
            assert mine[1:] == (STEPS, STEPS * SAMPLES, STEPS - (case.precision == "fp16")), case
    for number, case in enumerate(CASES):
        mine, theirs = tmp_path / "late" / str(number), tmp_path / "in time" / str(number)
        assert lines(mine) == lines(theirs), case
        assert [line["step"] for line in lines(mine)] == list(range(1, STEPS + 1)), case
        folders = [path.name for path in checkpoint_folders(mine / FOLDER)]
        assert len(folders) == 3, case
        for name in folders:
            assert_bitwise(stored(mine / FOLDER / name), stored(theirs / FOLDER / name), f"{case}: {name}")


# The device judges


TP_PP = Layout(SMALL_LLAMA, tp=2, pp=2, micro_batch_size=3)
DP_PP = Layout(SMALL_GPT, dp=2, pp=2, micro_batch_size=3)
TP_DP = Layout(replace(ONE_KV_HEAD, num_hidden_layers=2), tp=2, dp=2, micro_batch_size=3)
DP = Layout(SMALL_LLAMA, dp=4, zero_stage=0, micro_batch_size=3)
SPOILED = [
    (Case(TP_PP, "bf16"), math.inf),
    (Case(DP_PP, "bf16"), math.nan),
    (Case(TP_DP), math.nan),
    (Case(DP), math.inf),
    (Case(TP_PP, "fp16"), math.nan),
    (Case(DP_PP, "fp16"), math.inf),
    (Case(replace(DP_PP, zero_stage=3), "fp16"), math.inf),
    (Case(replace(TP_DP, zero_stage=3)), math.nan),
]


def spoil(patch: pytest.MonkeyPatch, state: TrainState, bad: float) -> None:
    """The reduced gradients of one rank hold `bad`."""
    finish = state.grads.finish

    def spoiled() -> None:
        finish()
        if state.ctx.world.rank == 2:
            state.grads.part(*state.grads.layout.shards()[0])[0] = bad

    patch.setattr(state.grads, "finish", spoiled)


def spoil_loss(patch: pytest.MonkeyPatch) -> None:
    total = step_module.sum_of_losses
    patch.setattr(step_module, "sum_of_losses", lambda *args: total(*args) * math.nan)


def judged(numbers: Sequence[int]) -> None:
    for number in numbers:
        left_out(*SPOILED[number])
    left_out(Case(TP_DP, "bf16"), math.nan, in_loss=True)


def left_out(case: Case, bad: float, *, in_loss: bool = False) -> None:
    """A good step, a spoiled one, and unless it can overflow a good one, queued before the host knows."""
    what = f"{case} {bad}"
    state = make_state(case.layout.config(case.precision))
    reference = make_state(case.layout.config(case.precision))
    batches = [micro_batches(state.config, state.ctx, number) for number in range(3)]
    train_step(state, batches[0])
    before = bits(state)
    with behind_the_host():
        with pytest.MonkeyPatch.context() as patch:
            if in_loss:
                spoil_loss(patch)
            else:
                spoil(patch, state, bad)
            spoiled = queue_step(state, batches[1])
        assert_bitwise(bits(state), before, f"{what}: the spoiled step")
        if case.precision == "fp16":
            assert spoiled.finish().overflowed
            assert (state.step, state.consumed_samples, state.optimizer.step_count) == (2, 2 * SAMPLES, 1), what
            assert state.loss_scale == LossScale(2.0**15, dynamic=True), what
            return
        queue_step(state, batches[2])
        assert_bitwise(bits(state), before, f"{what}: the step behind it")
        result = spoiled.finish()
        assert result.failed
        assert (result.step, result.consumed_samples) == (2, SAMPLES), what
        assert (state.step, state.consumed_samples, state.optimizer.step_count) == (1, SAMPLES, 1), what
        train_step(state, batches[2])
    # The state has lost nothing: it trains on as one that never had a spoiled step.
    train_step(reference, batches[0])
    train_step(reference, batches[2])
    assert_bitwise(bits(state), bits(reference), f"{what}: a good step afterwards")


@pytest.mark.parametrize("numbers", slow_but([0], [((0, 3, 6),), ((1, 2, 4, 5, 7),)]), ids=["few", "others"])
def test_a_step_that_is_not_finite_changes_no_bit_on_the_device(numbers: tuple[int, ...]) -> None:
    """Fault late-verdict. One rank's gradient, infinite or NaN, and a loss; in every layout and precision."""
    run_ranks(4, judged, numbers)


def test_a_nan_loss_is_no_overflow() -> None:
    state = make_state(Layout(LLAMA, micro_batch_size=3).config("fp16"))
    before = bits(state)
    with behind_the_host(), pytest.MonkeyPatch.context() as patch:
        spoil_loss(patch)
        result = queue_step(state, micro_batches(state.config, state.ctx, 0)).finish()
        with pytest.raises(NumericError, match="step 1: loss nan"):
            train_step(state, micro_batches(state.config, state.ctx, 0))
    assert result.failed
    assert not result.overflowed
    assert_bitwise(bits(state), before, "a NaN loss")
    assert (state.step, state.optimizer.step_count, state.loss_scale.scale) == (0, 0, 2.0**16)


# A request to stop


def stopped(folder: Path, asked_at: Sequence[int]) -> list[tuple[int, str, int]]:
    """The last rank is asked to stop before a step of each run of 6: the step, why the run stopped, its last step."""
    shown = []
    for step in asked_at:
        run_dir = folder / str(step)
        run_dir.mkdir(exist_ok=True)
        config = CASES[0].config(run_dir, 6)
        state, data = started(replace(config, checkpoint=CheckpointConfig(every=10)))

        def asked(state: TrainState = state, step: int = step) -> str:
            return "SIGTERM" if state.ctx.world.last and state.step >= step - 1 else ""

        with behind_the_host(), redirect_stdout(io.StringIO()):
            why = train(TrainingRun(state, data, {}, run_dir, 1, asked))
        shown.append((step, why, state.step))
    return shown


def test_a_run_that_is_asked_to_stop_saves_one_step_later(tmp_path: Path) -> None:
    """Fault request-to-stop, with the votes of a step read when the next one is queued."""
    ends = {1: 2, 4: 5, 5: 6, 6: 6}
    for shown in run_ranks(2, stopped, tmp_path, list(ends)):
        for step, why, last in shown:
            assert last == ends[step]
            saved = f"stopped by SIGTERM after step {last}, which is saved: start it again to go on"
            assert why == (saved if last < 6 else "")
    for step, last in ends.items():
        assert [line["step"] for line in lines(tmp_path / str(step))] == list(range(1, last + 1))
        assert [path.name for path in checkpoint_folders(tmp_path / str(step) / FOLDER)] == [f"step_{last:08d}"]


# Copies between host and device


def test_a_copy_for_the_host_has_the_numbers() -> None:
    numbers = torch.tensor([1.5, math.nan, 3.0])
    copy = device.HostCopy(numbers).wait()
    assert copy.device.type == "cpu"
    torch.testing.assert_close(copy, numbers, rtol=0, atol=0, equal_nan=True)
