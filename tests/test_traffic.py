"""Bytes sent by ranks in a step, counted by comm, equal those of README's table."""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from megapar_models.build import stage_layers

from megapar.config.options import Config
from megapar.step.step import train_step
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LENGTH, LLAMA, SAMPLES, Layout, make_state, micro_batches

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from benchmarks.traffic import expected_traffic
from megapar_tools.plan.parts import LayerPart
from megapar_tools.plan.work import Started

from tests.support import handing
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

PLAIN = replace(  # biases and norms of heads send gradients that the formulas leave out
    LLAMA, attention_bias=False, qk_norm=False, hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=128
)
WIDE = replace(PLAIN, hidden_size=128, head_dim=32)
BATCH = 6  # so that a step is two micro-batches


def sent_in_a_step(config: Config) -> dict[str, int]:
    """Bytes by axis sent by this rank in the second step."""
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    before = state.ctx.traffic()
    train_step(state, micro_batches(config, state.ctx, 1))
    after = state.ctx.traffic()
    return {axis: n - before[axis] for axis, n in after.items() if n > before[axis]}


def with_partition(config: Config) -> Config:
    partition = tuple(len(layers) for layers in stage_layers(config))
    return replace(config, parallel=replace(config.parallel, partition=partition))


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute"),
    slow_but([0, 4, 5], product([False, True], ["none", "selective", "full"])),
    ids=str,
)
def test_bytes_of_tensor_parallel_steps_are_those_of_the_formulas(sequence_parallel: bool, recompute: str) -> None:
    layout = Layout(PLAIN, tp=2, sequence_parallel=sequence_parallel, recompute=recompute, micro_batch_size=BATCH)
    config = with_partition(layout.config())
    for sent in run_ranks(2, sent_in_a_step, config):
        assert sent == expected_traffic(config, 0)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute"), slow_but([0, 3], product([False, True], ["none", "full"])), ids=str
)
def test_bytes_of_chunks_are_those_of_the_formulas(sequence_parallel: bool, recompute: str) -> None:
    """With parallel.tp_overlap_chunks. A recomputed layer runs its last collective too, because it is part of a
    product."""
    layout = Layout(PLAIN, tp=2, sequence_parallel=sequence_parallel, recompute=recompute, micro_batch_size=BATCH)
    config = with_partition(replace(layout, tp_overlap_chunks=3).config())
    for sent in run_ranks(2, sent_in_a_step, config):
        assert sent == expected_traffic(config, 0)


@pytest.mark.parametrize(
    "layout",
    slow_but(
        [1, 2, 3, 6],
        [
            Layout(WIDE, cp=2, dp=2, micro_batch_size=BATCH),
            Layout(
                WIDE, cp=2, tp=2, sequence_parallel=True, micro_batch_size=BATCH, recompute="selective", zero_stage=0
            ),
            Layout(WIDE, cp=4, cp_attention="ring", micro_batch_size=BATCH, recompute="full"),
            Layout(WIDE, cp=2, pp=2, cp_attention="ring", micro_batch_size=BATCH, recompute="selective"),
            Layout(WIDE, cp=4, cp_attention="ulysses", micro_batch_size=BATCH),
            Layout(WIDE, cp=2, tp=2, cp_attention="ulysses", micro_batch_size=BATCH, recompute="full"),
            Layout(WIDE, cp=2, cp_attention="ulysses", micro_batch_size=BATCH, recompute="selective"),
        ],
    ),
    ids=lambda layout: f"{layout.cp_attention}-cp{layout.cp}-{layout.recompute}",
)
def test_bytes_of_context_parallel_steps_are_those_of_the_formulas(layout: Layout) -> None:
    """Fault cp-option-ignored."""
    config = with_partition(layout.config())
    ranks = run_ranks(layout.world, sent_in_a_step, config)
    # Buckets of four shards have padding, so their bytes are left out there.
    known = ("tp", "cp", "pp", "grad") if layout.cp * layout.dp == 2 else ("tp", "cp", "pp")
    stages = [0] * (layout.world // layout.pp) + [1] * (layout.world - layout.world // layout.pp)
    for stage, sent in zip(stages, ranks, strict=True):  # the stage is the slowest axis
        expected = expected_traffic(config, stage)
        assert {axis: sent.get(axis) for axis in known} == {axis: expected.get(axis) for axis in known}
        assert sent.keys() == expected.keys()


@pytest.mark.parametrize("cp", slow_but([0], [2, 4]))
@pytest.mark.parametrize("family", slow_but([1], ["HEADS_FAMILY", "CHANNELS_FAMILY"]))
def test_bytes_of_passed_states_are_those_of_the_plan(family: str, cp: int) -> None:
    """A run sends M [16, 16] and its state [16, 10] of each head, whatever the length, and three rows of inputs."""
    model = replace(LLAMA, family=f"tests.support.hybrids:{family}", attention_bias=False)
    layout = Layout(model, cp=cp, micro_batch_size=BATCH)
    sent = run_ranks(cp, sent_in_a_step, with_partition(layout.config()))
    config = layout.config()
    planned, of_delta = 0, []
    for number in range(model.num_hidden_layers):
        work = PARTS.recording(config, PARTS.context(config, 0), LayerPart(number, recomputed=False))
        started = [item for item in (*work.forward, *work.backward) if isinstance(item, Started) and item.axis == "cp"]
        planned += sum(item.nbytes for item in started)
        of_delta += [item.nbytes for item in started] if number % 2 else []
    micro_batches_of_step = 2
    expected = micro_batches_of_step * planned * (cp - 1) // cp
    assert {of_rank["cp"] for of_rank in sent} == {expected}
    states = 2 * cp * BATCH * 4 * 16 * (16 + 10) * 4
    key_channels = 4 if family == "CHANNELS_FAMILY" else 2
    inputs = 2 * cp * 3 * BATCH * (2 * key_channels * 16 + 4 * 10) * 4
    assert sorted(of_delta) == sorted([states, states, inputs, inputs] * 2)


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "more"),
    slow_but(
        [1, 3], [(LLAMA, False, 2), (LLAMA, True, 3), (replace(GPT, hidden_dropout=0.0), False, 2), (GPT, False, 4)]
    ),
    ids=["llama", "llama-sequence-parallel", "gpt", "gpt-hidden-dropout"],
)
def test_full_recompute_sends_what_the_readme_says(model, sequence_parallel: bool, more: int) -> None:
    """Times m L A (t-1)/t, for m micro-batches, L layers and hidden states of A bytes. A dropout's mask is made after
    the sum over tp, so a recomputed layer with hidden dropout runs to its end."""
    found = []
    for recompute in ("none", "full"):
        layout = Layout(model, tp=2, sequence_parallel=sequence_parallel, recompute=recompute, micro_batch_size=BATCH)
        found.append(run_ranks(2, sent_in_a_step, layout.config()))
    unit = SAMPLES * model.num_hidden_layers * (LENGTH * model.hidden_size * 4) * (2 - 1) // 2
    for none, full in zip(*found, strict=True):
        assert full["tp"] - none["tp"] == more * unit


@pytest.mark.parametrize(("tp", "pp"), slow_but([0], [(1, 2), (2, 3)]))
def test_bytes_between_stages_are_those_of_the_plan(tp: int, pp: int) -> None:
    """Layers hand on tensors beside the hidden states. Those of integers send no gradient, nor do marks.

    Fault handed-integers-without-gradient.
    """
    layout = Layout(handing.MODEL, tp=tp, pp=pp, sequence_parallel=tp > 1, micro_batch_size=BATCH)
    config = with_partition(layout.config())
    sent = run_ranks(layout.world, sent_in_a_step, config)
    between = [PARTS.recording(config, PARTS.context(config, 0), part) for part in first_parts(config)]
    number, x_nbytes = SAMPLES // BATCH, 4 * LENGTH * BATCH * config.model.hidden_size // tp
    for rank, of_rank in enumerate(sent):
        stage = rank // tp
        forward = between[stage].boundary_bytes if stage < pp - 1 else 0
        backward = between[stage - 1].boundary_gradient_bytes if stage else 0
        # The rest are sums over the pipeline, such as the loss: those of a model that hands on nothing else.
        sums = expected_traffic(config, stage)["pp"] - number * ((stage > 0) + (stage < pp - 1)) * x_nbytes
        assert of_rank["pp"] == sums + number * (forward + backward)
        place = 4 + 4  # a mark and an integer for each token
        if 2 <= sum(config.parallel.partition[: stage + 1]) <= 4:
            assert forward - between[stage].boundary_gradient_bytes == place * LENGTH * BATCH // tp


def first_parts(config: Config) -> list[LayerPart]:
    """The first layer of each stage but the first."""
    layers = PARTS.layer_parts(config, PARTS.context(config, 0))
    return [layers[sum(config.parallel.partition[:stage])] for stage in range(1, config.parallel.pp)]
