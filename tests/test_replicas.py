"""Copies on several ranks are compared by hashes: drift is found, with its name, and healthy runs are not refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.observe import replicas
from megapar.observe.replicas import hash_of
from megapar.train import trainer
from tests.support import faults
from tests.support.faults import Scene
from tests.support.sweeps import slow_but

FLAGS = (
    "--train.steps",
    "4",
    "--train.global_batch_size",
    "8",
    "--train.micro_batch_size",
    "2",
    "--log.no-tensorboard",
)
FLAGS += ("--guard.check_replicas_every", "2", "--launch.timeout_seconds", "30")
TWO, FOUR = faults.TWO, ("--launch.nproc", "4")
EXPERTS = ("--model.family", "mixtral", "--model.moe.num_experts", "4")
LAYOUTS: dict[str, tuple[str, ...]] = {
    **faults.LAYOUTS,
    "tp2 sp": (*TWO, "--parallel.tp", "2", "--parallel.sequence_parallel"),
    "tied pp2 dp2": (*FOUR, "--parallel.pp", "2", "--model.tie_word_embeddings"),
    "cp2": (*TWO, "--parallel.cp", "2", "--train.seq_length", "32"),
    "ep2 dp4": (*FOUR, *EXPERTS, "--parallel.ep", "2"),
    "zero0 bf16": (*TWO, "--optimizer.zero_stage", "0", "--train.precision", "bf16"),
    "zero3 copies": (*FOUR, "--optimizer.zero_stage", "3", "--optimizer.shard_ranks", "2"),
    "remainder": (*TWO, "--train.precision", "bf16", "--optimizer.main_weights", "remainder"),
    "muon": (*TWO, "--optimizer.name", "muon"),
}


@pytest.mark.parametrize("layout", slow_but([8], LAYOUTS))
def test_a_healthy_run_is_not_refused_and_not_changed(layout: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *LAYOUTS[layout])
    assert (ended.code, ended.err) == (0, "")
    without = tmp_path / "without"
    without.mkdir()
    other = Scene(without)
    other.run(*FLAGS[:-4], *FLAGS[-2:], *LAYOUTS[layout])
    assert faults.weights(scene.work, 4) == faults.weights(other.work, 4)


def plant(rank: int, at: int, spoil: Callable[[Any], None]) -> Callable[[], None]:
    """Spoil the state of a rank after step `at`."""

    def install() -> None:
        real = trainer.queue_step

        def queue_step(state: Any, *args: Any, **named: Any) -> Any:
            queued = real(state, *args, **named)
            if state.ctx.world.rank == rank and state.step == at:
                spoil(state)
            return queued

        trainer.queue_step = queue_step

    return install


def next_number(part: str) -> Callable[[Any], None]:
    """Change the first element of the first parameter with `part` in its name to the next number."""

    def spoil(state: Any) -> None:
        for stage in state.stages.values():
            for name, param in stage.named_parameters():
                if part in name:
                    flat = param.data.view(-1)
                    flat[0] = torch.nextafter(flat[0], torch.tensor(9.0, dtype=flat.dtype))
                    return
        raise AssertionError(f"no parameter {part}")

    return spoil


def next_moment(state: Any) -> None:
    item = next(iter(state.optimizer.slices()))
    flat = item.tensors["exp_avg"]
    flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))


CASES = {
    "dp2": (1, next_number("norm"), "ranks? 1|rank 0"),
    "tp2 sp": (1, next_number("norm"), ""),
    "tied pp2 dp2": (1, next_number("embedding"), "embedding.weight"),
    "cp2": (0, next_number("norm"), ""),
    "ep2 dp4": (2, next_number("experts"), "experts"),
    "zero3 copies": (3, next_moment, "exp_avg"),
    "zero0 bf16": (1, next_moment, "exp_avg"),
}


@pytest.mark.parametrize("layout", slow_but([0, 2, 5], CASES))
def test_one_bit_on_one_rank_is_found_and_named_and_nothing_is_saved(layout: str, tmp_path: Path) -> None:
    """Fault unlike-copies."""
    rank, spoil, words = CASES[layout]
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, "--checkpoint.every", "1", *LAYOUTS[layout], plant=plant(rank, 2, spoil))
    assert ended.code == 5, ended.err
    (line,) = ended.err.splitlines()
    assert line.startswith("NumericError: step 2: copies of ")
    assert f"rank {rank} (" in line or f"against rank {rank};" in line or f" {rank} (" in line, line
    assert not words or any(word in line for word in words.split("|")), line
    assert scene.check_checkpoints() == [1]


def test_drift_between_two_checks_is_found_at_the_next(tmp_path: Path) -> None:
    """Without ZeRO nothing brings a replica back, so the moments stay unlike."""

    def other_moment(state: Any) -> None:
        # By more than one bit: rounding in the next step may hide that.
        next(iter(state.optimizer.slices())).tensors["exp_avg"][0] += 1.0

    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *LAYOUTS["zero0 bf16"], plant=plant(1, 3, other_moment))
    assert ended.err.startswith("NumericError: step 4: copies of "), ended.err


@pytest.mark.parametrize("chunk", [17, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_hash_sees_each_element_and_its_place(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", chunk)
    x = torch.arange(1, 1000).to(dtype)
    whole = hash_of(x)
    seen = {int(whole)}
    for index in range(0, len(x), 7):
        changed = x.clone()
        changed.view(torch.uint8)[index * x.element_size()] ^= 1
        seen.add(int(hash_of(changed)))
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    seen.add(int(hash_of(swapped)))
    assert len(seen) == 2 + len(range(0, len(x), 7))
    assert torch.equal(hash_of(torch.cat([x[:1], x])[1:]), whole), "in memory that begins elsewhere"
