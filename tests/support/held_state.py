"""The optimizer state of a rank by boxes of logical tensors: after given gradients, steps, a save and a resumption."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megapar.checkpoint.boxes import logical_boxes
from megapar.config.options import Config
from megapar.declare.params import Box, Init
from megapar.declare.random import initial_values
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.checkpoints import find, resume
from megapar.train.saver import Saver
from tests.support.grid import make_state, micro_batches

Part = tuple[str, Box, Sequence[int], Tensor]  # name with the state's, box in the logical tensor, its shape, values


def given_gradients(state: TrainState, step: int) -> None:
    """Gradients that follow from the logical tensor alone, so that every layout has the same."""
    for optimizer in state.optimizer.each:
        for visit in optimizer.visits:
            visit.grad.zero_()
            for slot in visit.shard.slots:
                local = torch.zeros(slot.end - slot.start)
                for piece, first, last in slot.spec.segments():
                    local[first:last] = initial_values(piece, Init("normal", 0.1), seed=100 + step).view(-1)
                start, stop = max(slot.start, visit.shard.start), min(slot.end, visit.shard.stop)
                visit.grad[start - visit.shard.start : stop - visit.shard.start] = local[
                    start - slot.start : stop - slot.start
                ]


def held_state(state: TrainState) -> list[Part]:
    """Main weights, moments and parameters of this rank, by boxes of logical tensors."""
    state.weights.wait()
    parts: list[Part] = []
    for item in state.optimizer.slices():
        for piece, box in logical_boxes(item.spec, item.start, item.stop):
            first = box.position - item.start
            for kind in item.tensors:
                values = item.values(kind, first, first + math.prod(box.size)).clone()
                parts.append((f"{kind}.{piece.name}", Box(box.offset, box.size), piece.shape, values))
    return parts


def whole(ranks: Sequence[Sequence[Part]]) -> dict[str, Tensor]:
    """Logical tensors. Copies of an element must be the same bits on all ranks."""
    found: dict[str, Tensor] = {}
    for tensor_name, box, shape, values in itertools.chain.from_iterable(ranks):
        if tensor_name not in found:
            found[tensor_name] = torch.full(tuple(shape), math.nan, dtype=values.dtype)
        there = found[tensor_name][box.slices]
        values = values.view(box.size)
        assert ((there == values) | there.isnan()).all(), f"copies of {tensor_name} differ"
        there.copy_(values)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def updated(config: Config) -> list[Part]:
    state = make_state(config)
    for step in range(3):
        given_gradients(state, step)
        state.optimizer.step(0.01)
    return held_state(state)


def one_step(state: TrainState) -> None:
    train_step(state, micro_batches(state.config, state.ctx, state.step))


def trained(config: Config, steps: int = 3) -> list[Part]:
    state = make_state(config)
    for _ in range(steps):
        one_step(state)
    return held_state(state)


def saved(config: Config, run_dir: Path) -> tuple[list[Part], list[Part]]:
    """State after two steps and a checkpoint of these, and after a third step."""
    state = make_state(config)
    one_step(state)
    one_step(state)
    with Saver(state, run_dir) as saver:
        saver.save(state)
    before = held_state(state)
    one_step(state)
    return before, held_state(state)


def resumed(config: Config, run_dir: Path) -> tuple[list[str], list[Part], list[Part]]:
    """Lines for the user, the state of the checkpoint, and that after another step."""
    state = make_state(config)
    notes = resume(state, run_dir, find(config, run_dir, state.ctx))
    before = held_state(state)
    one_step(state)
    return notes, before, held_state(state)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [key for key in found if not torch.equal(found[key], expected[key])]
    assert not wrong, wrong
