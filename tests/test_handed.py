"""Tensors that layers hand on beside the hidden states: through cuts, recomputation, schedules and ZeRO."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.forward import ForwardContext
from megapar_models.handed import Bundle, Handed
from torch import Tensor

from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.params import spec_of
from megapar.declare.random import initialize
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import SCHEDULES
from tests.support import grid, handing, streamed
from tests.support.grid import Layout, micro_batches
from tests.support.sweeps import slow_but
from tests.support.width import trains_as_one_process

MODEL = handing.MODEL
LAYERS = MODEL.num_hidden_layers

# In layouts

LAYOUTS = {
    "tp 2 with sequence parallelism, pp 3": {"tp": 2, "pp": 3, "sequence_parallel": True},
    "pp 2, vpp 3, all layers again": {"pp": 2, "vpp": 3, "schedule": "interleaved", "recompute": "full"},
    "pp 2, ZeRO-3, every second layer again": {"pp": 2, "dp": 2, "zero_stage": 3, "recompute": "full", "every": 2},
    "pp 2, zero bubble, inputs on the host": {"pp": 2, "schedule": "zb-h1", "recompute": "full", "offload": 0.5},
    "cp 2, ZeRO-3": {"cp": 2, "zero_stage": 3},
    "pp 2, ZeRO-2, all but attention again": {"pp": 2, "dp": 2, "zero_stage": 2, "recompute": "all_but_attention"},
    "tp 2, light": {"tp": 2, "recompute": "light"},
    "selective": {"pp": 2, "recompute": "selective"},
}


@pytest.mark.parametrize("sizes", slow_but([0, 3], LAYOUTS.values()), ids=list(LAYOUTS))
def test_it_trains_as_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_trains_as_one_process_in_every_schedule(schedule: str) -> None:
    sizes = {"pp": 2, "vpp": SCHEDULES[schedule].vpp.nearest_to(2), "schedule": schedule}
    trains_as_one_process(MODEL, sizes)


# Cuts


def gradients_in_one_process(config: Config, cuts: Sequence[int]) -> dict[str, Tensor]:
    """The gradients of two micro-batches by name, in one process with stages that end in front of the layers `cuts`."""
    ctx = context.single()
    layers = [range(*pair) for pair in pairwise((0, *cuts, config.model.num_hidden_layers))]
    parallel = replace(config.parallel, vpp=len(layers), schedule="interleaved" if cuts else "1f1b")
    config = replace(config, parallel=parallel)
    stages = build_stages(config, ctx, layers=layers)
    initialize(stages.values(), config.train.seed)
    runtime = PipelineRuntime(dict(stages), ctx, config.parallel.schedule, config.parallel.vpp)
    runtime.step(micro_batches(config, ctx, 0)[:2], scale=0.25)
    return {spec_of(x).name: x.grad for stage in stages.values() for x in stage.parameters() if x.grad is not None}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_cut_anywhere_changes_no_bit(recompute: str) -> None:
    """Fault handed-tensor-over-a-cut."""
    config = Layout(MODEL, micro_batch_size=3, recompute=recompute).config()
    expected = gradients_in_one_process(config, ())
    assert {"scale", "layers.1.note_out.weight", "layers.4.note_in.weight", "note_last.weight"} < expected.keys()
    for number in (1, 2, LAYERS - 1):
        for cuts in combinations(range(1, LAYERS), number):
            found = gradients_in_one_process(config, cuts)
            assert found.keys() == expected.keys()
            assert not [name for name, grad in found.items() if not torch.equal(grad, expected[name])], cuts


PLAIN = replace(grid.LLAMA, attention_bias=False, qk_norm=False)
OTHERS = {
    **streamed.MODELS,
    "sums of blocks": replace(PLAIN, family="tests.test_depth:FAMILY", num_hidden_layers=5),
    "chosen keys": replace(
        PLAIN, family="tests.test_shared_indices:FAMILY", num_key_value_heads=4, num_hidden_layers=7
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "all_but_attention", "light", "selective"])
@pytest.mark.parametrize("name", OTHERS)
def test_neither_cuts_nor_recomputation_change_a_bit_of_other_families(name: str, recompute: str) -> None:
    model = OTHERS[name]
    layout = Layout(model, micro_batch_size=3)
    expected = gradients_in_one_process(layout.config(), ())
    last = model.num_hidden_layers - 1
    for cuts in ((1,), (last,), (2, last), tuple(range(1, last + 1))):
        found = gradients_in_one_process(replace(layout, recompute=recompute).config(), cuts)
        assert found.keys() == expected.keys()
        assert not [name for name, grad in found.items() if not torch.equal(grad, expected[name])], cuts


def test_recomputation_changes_no_bit_and_keeps_what_is_handed_on_once() -> None:
    """Fault shared-keys-recomputed."""
    layout = Layout(MODEL, micro_batch_size=3)
    expected = gradients_in_one_process(layout.config(), (3,))
    for recompute in ("full", "all_but_attention", "light", "selective"):
        found = gradients_in_one_process(replace(layout, recompute=recompute).config(), (3,))
        assert not [name for name, grad in found.items() if not torch.equal(grad, expected[name])], recompute


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "all_but_attention"])
def test_what_was_handed_on_is_freed_without_garbage_collection(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault handed-tensors-in-a-circle."""
    through = handing.HandingToy.forward
    alive: list[weakref.ref[Tensor]] = []

    def forward(layer: handing.HandingToy, x: Tensor, info: ForwardContext, *args: object, **options: object) -> Tensor:
        y = through(layer, x, info, *args, **options)
        alive.extend(weakref.ref(handed) for handed in info.handed.values())
        return y

    monkeypatch.setattr(handing.HandingToy, "forward", forward)
    config = Layout(MODEL, micro_batch_size=3, recompute=recompute).config()
    stages = build_stages(config, context.single())
    initialize(stages.values(), config.train.seed)
    batch = micro_batches(config, context.single(), 0)[0]
    gc.collect()
    gc.disable()
    try:
        # The calls that all_but_attention keeps hold their graph up to a backward pass, in every model.
        for backward in (True,) if recompute == "all_but_attention" else (True, False):
            loss = stages[0](None, batch)
            if backward:
                loss.backward()
            del loss
            assert alive, "nothing was handed on"
            assert not [x for x in alive if x() is not None], "with" if backward else "without"
    finally:
        gc.enable()


# What crosses a cut


def test_what_crosses_a_cut_was_written_before_and_is_read_later() -> None:
    bundle = handing.HandingStage.bundle(MODEL)
    names = [[one.name for one in bundle.at(number)] for number in range(LAYERS + 1)]
    first = ["embedding", "scale"]
    # Layer 4 writes the note again: the new one has the last place.
    assert names == [first, first, *3 * [[*first, "note", "mark", "place"]], [*first, "note"], ["note"]]


def test_a_name_written_again_before_it_is_read_does_not_cross() -> None:
    note = Handed(name="note", shape=(1,))
    bundle = Bundle([(), ("note",), (), ("note",)], [(note,), (), (note,), ()])
    assert [len(bundle.at(number)) for number in range(5)] == [0, 1, 0, 1, 0]


def test_a_name_that_nobody_writes_is_an_error_of_the_family() -> None:
    with pytest.raises(ValueError, match="layer 1 reads keys, which no layer before it writes"):
        Bundle([(), ("keys",)], [(), (Handed(name="keys", shape=(1,)),)])
    with pytest.raises(ValueError, match="the end of the model reads keys"):
        Bundle([()], [()], ends=("keys",))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "layer 1 declares that it writes note, and does not"),
        (
            torch.zeros(24, 3, 5),
            r"layer 1 writes note as \[24, 3, 5\] torch.float32, and declares \[24, 3, 6\] torch.float32",
        ),
        (torch.zeros(24, 3, 6).half(), "layer 1 writes note as .* torch.float16, and declares .* torch.float32"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_tensor_unlike_its_declaration_is_refused(
    made: Tensor | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stage would wait for other bytes. Fault handed-unlike-declared."""
    through = handing.HandingToy.forward

    def forward(layer: handing.HandingToy, x: Tensor, info: ForwardContext, *args: object, **options: object) -> Tensor:
        y = through(layer, x, info, *args, **options)
        if layer.note_out is not None:
            del info.handed["note"]
            if made is not None:
                info.handed["note"] = made
        return y

    monkeypatch.setattr(handing.HandingToy, "forward", forward)
    with pytest.raises(ValueError, match=message):
        gradients_in_one_process(Layout(MODEL, micro_batch_size=3).config(), ())
