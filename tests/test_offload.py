"""A share of main weights and moments in host memory (optimizer.offload): the same bits, and the bytes of the plan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_tools.plan.memory import report_rank
from torch import Tensor

from megapar.base.errors import ConfigError, NumericError
from megapar.config.options import Config
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.declaration import split_by_place
from megapar.optimizer.table import check
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.system.host_memory import available_bytes
from megapar.system.side_stream import SideStream
from megapar.train.checkpoints import find, resume
from megapar.train.host_memory import optimizer_bytes, too_small
from megapar.train.saver import Saver
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, Layout, make_state, micro_batches, name
from tests.support.late_stream import LateStream, NotAwaited
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

STEPS = 3
PIECE = 960  # elements: several pieces on each rank


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "HOST_ELEMENTS", PIECE + 63)


def offloaded(config: Config, share: float) -> Config:
    return replace(config, optimizer=replace(config.optimizer, offload=share))


def one_step(state: TrainState) -> None:
    train_step(state, micro_batches(state.config, state.ctx, state.step))
    state.weights.wait()


def held(state: TrainState) -> list[Tensor]:
    """The weights of this rank, then main weights and state by parameter, in pieces joined again."""
    by_parameter: dict[str, list[Tensor]] = {}
    for part in state.optimizer.slices():
        for tensor, values in part.tensors.items():
            by_parameter.setdefault(f"{part.spec.name} {tensor}", []).append(values.clone().cpu())
    return [state.weights.flat.clone().cpu(), *(torch.cat(parts) for _, parts in sorted(by_parameter.items()))]


def trained(config: Config, stream: Callable[[], SideStream] | None = None, steps: int = STEPS) -> list[Tensor]:
    state = make_state(config)
    if stream:
        for optimizer in state.optimizer.each:
            optimizer.host_updates.stream = stream()
            for slot in (*optimizer.host_updates._grads, *optimizer.host_updates._params):
                slot.fill_(float("nan"))
    for _ in range(steps):
        one_step(state)
    return held(state)


def shares(config: Config) -> list[str]:
    """Shares with a bit unlike those without offload, on this rank."""
    expected = trained(config)
    wrong = []
    for share in (0.3, 1.0):
        found = trained(offloaded(config, share))
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(f"{share=}")
    return wrong


LAYOUTS = [
    Layout(LLAMA),
    Layout(LLAMA, dp=2),
    Layout(LLAMA, dp=2, zero_stage=0),
    Layout(LLAMA, dp=2, zero_stage=2),
    Layout(GPT, dp=2, zero_stage=3, recompute="full"),
    Layout(LLAMA, tp=2, sequence_parallel=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved"),
    Layout(MIXTRAL, dp=2, ep=2),
    Layout(LLAMA, dp=4, zero_stage=3, shard_ranks=2),
]


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
@pytest.mark.parametrize("layout", slow_but([0, 4], LAYOUTS), ids=name)
def test_no_share_changes_a_bit(layout: Layout, precision: str) -> None:
    layout = replace(layout, micro_batch_size=3)
    for wrong in run_ranks(layout.world, shares, layout.config(precision)):
        assert not wrong


def distances(config: Config, steps: int) -> list[float]:
    """Relative distances of weights and state with half of the state on the host, on this rank. The weights first."""
    pairs = zip(trained(offloaded(config, 0.5), steps=steps), trained(config, steps=steps), strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs]


@pytest.mark.gpus
def test_a_gpu_s_share_is_updated_alike() -> None:
    """A GPU and its host round in other orders. The gradients of later steps are of weights that differ a little."""
    config = Layout(LLAMA, dp=2).config()
    for rank in run_ranks(2, distances, config, 1):
        assert max(rank) <= 1e-6
    for rank in run_ranks(2, distances, config, STEPS):
        assert rank[0] <= 1e-6


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
def test_copies_that_come_late_change_no_bit(precision: str) -> None:
    """Slots are NaN before the first copy. Each is written again only when its copy has left."""
    config = offloaded(Layout(LLAMA, micro_batch_size=6).config(precision), 1.0)
    for found, expected in zip(trained(config, LateStream), trained(config), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("skipped", ["_send", "_fetch"])
def test_a_missing_wait_is_seen(skipped: str) -> None:
    """Weights on their way to the device, or gradients from there, are not waited for."""
    config = offloaded(Layout(LLAMA, micro_batch_size=6).config(), 1.0)
    expected = trained(config)
    try:
        found = trained(config, partial(NotAwaited, skipped))
    except NumericError:  # weights became the NaN of a slot
        return
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_slots_are_made_once() -> None:
    state = make_state(offloaded(Layout(LLAMA).config("bf16"), 0.5))
    updates = state.optimizer.each[0].host_updates
    one_step(state)
    before = [slot.data_ptr() for slot in (*updates._grads, *updates._params)]
    one_step(state)
    assert before == [slot.data_ptr() for slot in (*updates._grads, *updates._params)]
    assert len(before) == 4
    assert updates.nbytes == 2 * PIECE * (4 + 2)
    sizes = [len(visit.grad) for visit in state.optimizer.each[0].visits if visit.shard.on_host]
    assert max(sizes) == PIECE, "of 1,023 elements, a multiple of the alignment"


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_counts_what_is_on_the_host_there(share: float, precision: str, stage: int) -> None:
    """On a GPU it is not in the device's sum. On a CPU all memory is the host's."""
    config = offloaded(Layout(LLAMA, zero_stage=stage).config(precision), share)
    state = make_state(config)
    measured = state.optimizer.nbytes, state.optimizer.host_nbytes
    assert measured[1] == optimizer_bytes(config, state.weights.layout)
    assert measured[1] > share * 8 * state.weights.layout.numel
    for device, sizes in {"cuda": measured, "cpu": (sum(measured), 0)}.items():
        planned = replace(config, launch=replace(config.launch, device=device))
        found = report_rank(planned, PARTS, 0)
        assert (found.optimizer, found.optimizer_on_host) == sizes
        assert found.total == found.weights + found.gradients + found.optimizer + found.activations


@pytest.mark.parametrize("bounds", [(0, 128), (64, 64 + 7 * 128), (0, 100), (256, 257)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_shard_is_cut_once_and_whole(bounds: tuple[int, int], share: float) -> None:
    parts = split_by_place(bounds, share)
    assert [parts[0][0], *(stop for _, stop, _ in parts)] == [
        bounds[0],
        *(start for start, _, _ in parts[1:]),
        bounds[1],
    ]
    assert [on_host for _, _, on_host in parts] == sorted(on_host for _, _, on_host in parts)
    on_host = sum(stop - start for start, stop, host in parts if host)
    assert share * (bounds[1] - bounds[0]) - 1 <= on_host < share * (bounds[1] - bounds[0]) + 128


def saved(config: Config, run_dir: Path) -> tuple[list[Tensor], list[Tensor]]:
    """State after two steps, and after a step from the first one's checkpoint with another share."""
    state = make_state(config)
    one_step(state)
    with Saver(state, run_dir) as saver:
        saver.save(state)
    one_step(state)  # while an asynchronous save may still write the step before
    other = make_state(offloaded(config, 1.0 - config.optimizer.offload))
    resume(other, run_dir, find(other.config, run_dir, other.ctx))
    one_step(other)
    return held(state), held(other)


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
@pytest.mark.parametrize("share", slow_but([0, 1], [0.0, 0.4, 1.0]))
@pytest.mark.parametrize("asynchronous", slow_but([1], [False, True]))
def test_a_checkpoint_goes_on_with_another_share(
    precision: str, share: float, asynchronous: bool, tmp_path: Path
) -> None:
    config = offloaded(Layout(LLAMA, micro_batch_size=6).config(precision), share)
    config = replace(config, checkpoint=replace(config.checkpoint, async_save=asynchronous))
    for found, expected in zip(*saved(config, tmp_path), strict=True):
        assert torch.equal(found, expected)


# What is refused


def test_a_share_that_nothing_can_keep_there_is_refused() -> None:
    options = offloaded(Layout(LLAMA).config(), 0.5).optimizer
    check(options, {"adamw"})
    momentum = "tests.test_width_optimizers:NormalizedMomentum"
    check(options, {"adamw", momentum})
    with pytest.raises(ConfigError, match=rf"optimizer.offload=0.5: no optimizer .* in host memory \({momentum}\)"):
        check(replace(options, eps=1e-8), {momentum})


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan"])
def test_a_share_is_from_0_to_1(share: str, tmp_path: Path) -> None:
    ended = program.run("--optimizer.offload", share, cwd=tmp_path)
    assert (ended.code, ended.err.count("\n")) == (ConfigError.exit_code, 1), ended.err
    assert "optimizer.offload" in ended.err


GIB = 2**30


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ([("a", 3 * GIB, 8 * GIB), ("a", 3 * GIB, 7 * GIB)], ""),
        ([("a", 4 * GIB, 8 * GIB), ("a", 4 * GIB, 7 * GIB)], "the 2 rank(s) of a take 8.0 GiB of host memory, and 7.0"),
        ([("a", 4 * GIB, 8 * GIB), ("b", 4 * GIB, 3 * GIB)], "the 1 rank(s) of b take 4.0 GiB"),
        ([("a", 4 * GIB, None)], ""),
    ],
)
def test_a_host_with_too_little_memory_is_named(needs: list[Any], words: str) -> None:
    assert too_small(needs).startswith(words)
    assert bool(too_small(needs)) == bool(words)


def test_a_run_whose_host_is_too_small_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from megapar.train import host_memory

    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    config = offloaded(Layout(LLAMA).config(), 1.0)
    state = make_state(config)
    with pytest.raises(
        ConfigError, match=r"optimizer.offload=1: the 1 rank\(s\) of .* take .*; lower optimizer.offload"
    ):
        host_memory.check(config, state.weights.layout, state.ctx)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    def write(**contents: str) -> Path:
        for file, text in contents.items():
            path = tmp_path / file.replace("__", "/").replace("memory_", "memory.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_the_limit_of_a_control_group_counts(files: Callable[..., Path]) -> None:
    assert available_bytes(files()) is None
    assert available_bytes(files(proc__meminfo="MemTotal: 9 kB\nMemAvailable:       8 kB\n")) == 8192
    group = {"sys__fs__cgroup__memory_max": "max\n", "sys__fs__cgroup__memory_current": "1000\n"}
    assert available_bytes(files(**group)) == 8192
    assert available_bytes(files(sys__fs__cgroup__memory_max="5000\n")) == 4000
