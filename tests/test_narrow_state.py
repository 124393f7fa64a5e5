"""Moments in bf16 (optimizer.moments) and main weights as parameters with a remainder (optimizer.main_weights).

The same bits in every layout, exact checkpoints, and the bytes of a plan.
"""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megapar_models.registry import validate
from megapar_tools.plan.memory import report_rank

from megapar.base.errors import ConfigError
from megapar.checkpoint.save import snapshot, snapshot_bytes
from megapar.declare.params import MAIN, Box
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.logical_rows import lines, name_key
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SAMPLES,
    STRADDLING,
    Layout,
    make_state,
    name,
)
from tests.support.held_state import assert_same, one_step, resumed, saved, trained, updated, whole
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

BOTH: dict[str, Any] = {"moments": "bf16", "main_weights": "remainder"}
KINDS: list[dict[str, Any]] = [{}, {"moments": "bf16"}, {"main_weights": "remainder"}, BOTH]


# Where elements lie in logical tensors


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    return shape, Box(tuple(starts), tuple(sizes))


@given(boxes())
def test_lines_are_the_flat_indices_of_a_box(drawn: tuple[tuple[int, ...], Box]) -> None:
    shape, box = drawn
    expected = torch.arange(math.prod(shape)).view(shape)[box.slices].flatten()
    found = list(lines(shape, box))
    position = 0
    for part in found:
        assert part.position == position
        index = torch.arange(part.height)[:, None] * part.pitch + torch.arange(part.width) + part.first
        assert torch.equal(index.flatten(), expected[position : position + part.height * part.width])
        position += part.height * part.width
    assert position == box.numel
    assert len(found) == 1 or len(shape) > 2


def test_keys_differ_by_name_and_seed() -> None:
    keys = {name_key(seed, f"layers.{i}.weight") for seed in range(10) for i in range(100)}
    assert len(keys) == 1000
    assert all(0 <= key < 2**32 for key in keys)


# The same bits in every layout


LAYOUTS = [
    Layout(LLAMA, tp=2, sequence_parallel=True),
    Layout(MIXTRAL, dp=2, ep=2),
    Layout(LLAMA, dp=2, zero_stage=3),
    Layout(ONE_KV_HEAD, tp=4, zero_stage=0),
    Layout(STRADDLING, tp=4),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved"),
    Layout(GPT, pp=2, tp=2),
    Layout(LLAMA, dp=2, zero_stage=0),
    Layout(LLAMA, dp=3),
    Layout(LLAMA, dp=2, zero_stage=2),
    Layout(LLAMA, dp=4, zero_stage=3, shard_ranks=2),
    Layout(LLAMA, cp=2),
    Layout(MIXTRAL, tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(MIXTRAL, tp=2, pp=2),
]


@pytest.mark.parametrize("layout", slow_but([0, 1, 2], LAYOUTS), ids=name)
def test_no_layout_changes_a_bit_of_an_update(layout: Layout) -> None:
    for kind in (BOTH, {"moments": "bf16"}):
        ranks = run_ranks(layout.world, updated, replace(layout, **kind).config("bf16"))
        expected = whole([updated(Layout(layout.model, zero_stage=0, **kind).config("bf16"))])
        found = whole(ranks)
        assert found.keys() == expected.keys()
        wrong = [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])]
        assert not wrong, wrong


def test_rounding_is_random_by_element_and_not_to_nearest() -> None:
    """Of the moments that the first update sets exactly, about half go up; and another seed makes others do."""
    results = []
    for seed in (1, 2):
        config = Layout(LLAMA, **BOTH).config("bf16")
        results.append(whole([updated(replace(config, train=replace(config.train, seed=seed)))]))
    exact = whole([updated(Layout(LLAMA, main_weights="remainder").config("bf16"))])
    name_of = "exp_avg.layers.0.mlp.down.weight"
    nearest = exact[name_of].bfloat16()
    assert not torch.equal(results[0][name_of], nearest)
    assert not torch.equal(results[0][name_of], results[1][name_of])
    error = (results[0][name_of].double() - exact[name_of]).abs() / exact[name_of].abs()
    assert error.median() < 2**-7


@pytest.mark.parametrize("stages", [(2, 3), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_a_stage_of_zero_that_adds_gradients_in_the_same_order_changes_no_bit(stages: tuple[int, int]) -> None:
    first, second = (
        whole(run_ranks(2, trained, Layout(LLAMA, dp=2, zero_stage=stage, micro_batch_size=3, **BOTH).config("bf16")))
        for stage in stages
    )
    assert_same(second, first)


def test_an_update_of_weights_with_a_remainder_is_that_of_fp32() -> None:
    """Bit by bit. Later steps may differ, because a parameter halfway between two bf16 numbers is rounded otherwise."""
    expected, found = (
        whole([trained(Layout(LLAMA, zero_stage=0, micro_batch_size=6, **kind).config("bf16"), steps=1)])
        for kind in (KINDS[0], KINDS[2])
    )
    assert_same(found, expected)


def test_parameters_are_the_nearest_bf16_numbers() -> None:
    state = make_state(Layout(LLAMA, micro_batch_size=SAMPLES, **BOTH).config("bf16"))
    for _ in range(3):
        one_step(state)
    for item in state.optimizer.slices():
        param = item.param.detach().view(-1)[item.start : item.stop]
        halfway = (item.main.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(param[~halfway], item.main.bfloat16()[~halfway])
        assert item.remainder.any() or not item.main.any()


# Bytes


@pytest.mark.parametrize(("kind", "per_parameter"), zip(KINDS, (12, 8, 10, 6), strict=True))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_takes_the_bytes_of_the_plan(kind: dict[str, Any], per_parameter: int, stage: int) -> None:
    config = Layout(LLAMA, zero_stage=stage, **kind).config("bf16")
    state = make_state(config)
    assert state.optimizer.nbytes == per_parameter * state.weights.layout.numel
    assert state.optimizer.nbytes == report_rank(config, PARTS, 0).optimizer
    weights = state.weights.flat.untyped_storage().data_ptr()
    tensors = [tensor for item in state.optimizer.slices() for tensor in item.parts()]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    held = sum(size for place, size in sizes.items() if place != weights)
    assert held == state.optimizer.nbytes


PAGE = Path(__file__).parents[1] / "docs/optimizers.md"


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS[:2], ids=["fp32", "bf16"])
def test_the_page_has_the_bytes_that_are_measured(kind: dict[str, Any], share: float) -> None:
    """On a GPU without ZeRO. The host has the slots of travelling pieces besides."""
    row = f"| `moments {kind.get('moments', 'fp32')}`" + (", `offload 1` |" if share else " |")
    (said,) = [line for line in PAGE.read_text().splitlines() if line.startswith(row)]
    for cell, main_weights in zip(said.split("|")[2:4], ("fp32", "remainder"), strict=True):
        config = Layout(LLAMA, zero_stage=0, **{**kind, "main_weights": main_weights}).config("bf16")
        config = replace(config, optimizer=replace(config.optimizer, offload=share))
        if share and main_weights == "remainder":
            assert cell.strip() == "refused"
            with pytest.raises(ConfigError):
                validate(config, 1)
            continue
        state = make_state(config)
        numbers = [int(number) for number in re.findall(r"\d+", cell)]
        assert sum(numbers[:3]) == numbers[3]
        numel = state.weights.layout.numel
        slots = sum(optimizer.host_updates.nbytes for optimizer in state.optimizer.each)
        planned = report_rank(replace(config, launch=replace(config.launch, device="cuda")), PARTS, 0)
        assert planned.weights == state.weights.flat.nbytes == numbers[0] * numel
        assert planned.gradients == numbers[1] * numel
        assert planned.optimizer == state.optimizer.nbytes == numbers[2] * numel
        on_host = numbers[4] * numel + slots if share else 0
        assert planned.optimizer_on_host == state.optimizer.host_nbytes == on_host


# Checkpoints


@pytest.mark.parametrize("asynchronous", slow_but([1], [False, True]))
@pytest.mark.parametrize("kind", slow_but([0, 2], KINDS[1:]))
def test_a_resumed_run_goes_on_bit_by_bit(kind: dict[str, Any], asynchronous: bool, tmp_path: Path) -> None:
    config = Layout(LLAMA, micro_batch_size=6, **kind).config("bf16")
    config = replace(config, checkpoint=replace(config.checkpoint, async_save=asynchronous))
    _, expected = saved(config, tmp_path)
    _, _, found = resumed(config, tmp_path)
    assert_same(whole([found]), whole([expected]))


def test_a_snapshot_stays_as_it_is() -> None:
    """An asynchronous save writes it while the next updates change the state."""
    state = make_state(Layout(LLAMA, micro_batch_size=6, **BOTH).config("bf16"))
    one_step(state)
    slices = list(state.optimizer.slices())
    copies = snapshot(slices, torch.empty(snapshot_bytes(slices), dtype=torch.uint8))
    before = [item.values(kind).clone() for item in slices for kind in item.tensors]
    one_step(state)
    after = [item.values(kind) for item in copies for kind in item.tensors]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
    assert snapshot_bytes(slices) == pytest.approx(8 * state.weights.layout.numel, rel=0.1)


@pytest.mark.parametrize(("then", "now"), slow_but([2, 9], itertools.permutations(range(4), 2)))
def test_a_checkpoint_loads_with_any_other_kind_of_state(then: int, now: int, tmp_path: Path) -> None:
    """Main weights bit by bit, moments too if they become wider, and else rounded to nearest, which a line says."""
    layouts = {kind: Layout(LLAMA, micro_batch_size=6, **KINDS[kind]) for kind in (then, now)}
    before, _ = saved(layouts[then].config("bf16"), tmp_path)
    notes, after, _ = resumed(layouts[now].config("bf16"), tmp_path)
    stored, found = whole([before]), whole([after])
    narrower = "moments" in KINDS[now] and "moments" not in KINDS[then]
    for key, tensor in stored.items():
        expected = tensor if key.startswith(MAIN) else tensor.to(found[key].dtype)
        assert torch.equal(found[key], expected), key
    said = [note for note in notes if "rounded to bf16" in note]
    assert len(said) == narrower, notes


@pytest.mark.parametrize(
    ("then", "now"),
    slow_but(
        [0],
        [
            (Layout(LLAMA, tp=2, **BOTH), Layout(LLAMA, pp=2, **BOTH)),
            (Layout(LLAMA, dp=2, **BOTH), Layout(LLAMA, tp=2, **BOTH)),
            (Layout(MIXTRAL, dp=2, ep=2, **BOTH), Layout(MIXTRAL, **BOTH)),
            (Layout(LLAMA, dp=2, zero_stage=3, **BOTH), Layout(LLAMA, dp=2, zero_stage=0, **BOTH)),
        ],
    ),
    ids=lambda layout: name(layout),
)
def test_a_checkpoint_loads_into_another_layout(then: Layout, now: Layout, tmp_path: Path) -> None:
    then, now = (replace(layout, micro_batch_size=3) for layout in (then, now))
    stored = whole([before for before, _ in run_ranks(then.world, saved, then.config("bf16"), tmp_path)])
    found = whole([before for _, before, _ in run_ranks(now.world, resumed, now.config("bf16"), tmp_path)])
    assert_same(found, stored)


# What is refused


@pytest.mark.parametrize(
    ("precision", "optimizer", "backend", "words"),
    [
        (
            "fp32",
            {"main_weights": "remainder"},
            "auto",
            "main_weights=remainder, train.precision=fp32: only bf16",
        ),
        (
            "fp16",
            {"main_weights": "remainder"},
            "auto",
            "main_weights=remainder, train.precision=fp16: only bf16",
        ),
        ("bf16", {"main_weights": "remainder", "offload": 0.5}, "auto", "optimizer.offload=0.5: the parameters are"),
        ("bf16", {"main_weights": "remainder", "ema": 0.9}, "auto", "optimizer.ema=0.9: the average is that of whole"),
        ("bf16", {"moments": "bf16"}, "apex", "optimizer.moments=bf16, kernels.backend=apex: apex's AdamW keeps fp32"),
        ("bf16", {"main_weights": "remainder"}, "apex", "main_weights=remainder, kernels.backend=apex: apex's AdamW"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    precision: str, optimizer: dict[str, Any], backend: str, words: str
) -> None:
    config = Layout(LLAMA).config(precision)
    config = replace(config, optimizer=replace(config.optimizer, **optimizer))
    config = replace(config, kernels=replace(config.kernels, backend=backend))
    with pytest.raises(ConfigError) as refused:
        validate(config, 1)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_moments_may_be_bf16_in_every_precision(precision: str) -> None:
    found = whole([updated(Layout(LLAMA, moments="bf16").config(precision))])
    assert found["exp_avg.norm.weight"].dtype == torch.bfloat16


def test_moments_on_the_host_round_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "HOST_ELEMENTS", 1000)
    config = Layout(LLAMA, moments="bf16", micro_batch_size=6).config("bf16")
    expected = whole([trained(config)])
    for share in (0.3, 1.0):
        other = replace(config, optimizer=replace(config.optimizer, offload=share))
        assert_same(whole([trained(other)]), expected)
