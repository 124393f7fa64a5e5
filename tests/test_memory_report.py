"""The places of a rank's bytes: what is counted lives as long as a backward pass needs it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.declare.batch import StepScope
from megapar.observe.kept import BETWEEN, DEFERRED, ENDS, KeptBytes
from megapar.observe.memory_report import ALL, CONVERTED, OTHER
from tests.support import program
from tests.support.grid import GPT, LLAMA, SHARED, Layout, make_state, micro_batches
from tests.support.kept_bytes import kept_for_backward
from tests.support.sweeps import slow_but


@pytest.mark.parametrize(
    ("recompute", "model"),
    slow_but(
        [0, 4, 8, 9, 11, 13],  # each way to recompute, and each model in two
        product(["none", "selective", "light", "all_but_attention", "full"], [LLAMA, GPT, SHARED]),
    ),
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_bytes_are_counted_once_and_until_the_backward_pass(model: Any, recompute: str) -> None:
    config = Layout(model, micro_batch_size=2, recompute=recompute).config()
    state = make_state(config)
    (stage,) = state.stages.values()
    # With a scale, as the runtime gives it: without one the losses of routers are freed at once.
    first, second = (
        replace(batch, scope=StepScope(torch.ones(()))) for batch in micro_batches(config, state.ctx, 0)[:2]
    )
    known = [*stage.parameters(), *stage.buffers()]
    expected = kept_for_backward(lambda: stage(None, first), known)
    kept = KeptBytes(state.stages)
    with kept.counting():
        loss = stage(None, first)
    assert kept.live.total() == kept.peak == expected
    kinds = {kind for _, kind in kept.live}
    of_layers = {"full": set(), "all_but_attention": {"attention"}}.get(recompute, {"attention", "mlp"})
    assert kinds == {BETWEEN, ENDS, *of_layers}
    with kept.counting():
        other = stage(None, second)
    assert kept.peak == 2 * expected
    loss.backward()
    assert kept.live.total() == expected
    stage(None, first)  # outside the context
    other.backward()
    assert kept.live.total() == 0
    assert sum(kept.at_peak.values()) == kept.peak == 2 * expected


# The report of a run

IN_FP8 = (
    *("--train.fp8", "blocks", "--model.hidden_size", "256", "--model.intermediate_size", "256"),
    *("--model.num_attention_heads", "2", "--model.num_key_value_heads", "2", "--model.head_dim", "128"),
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--parallel.dp", "2", "--optimizer.zero_stage", "3"), id="zero3"),
        pytest.param(("--parallel.pp", "2", "--parallel.schedule", "zb-h1"), id="zb-h1"),
        pytest.param(("--parallel.pp", "2", "--train.recompute", "full", "--train.offload", "1"), id="offload"),
        # Frozen weights are in no buffer, and still in memory.
        pytest.param(("--parallel.pp", "2", "--train.trainable", "layers.1.*", "head.*"), id="frozen"),
        pytest.param(
            ("--parallel.tp", "2", "--adapter.rank", "4", "--train.precision", "bf16"),
            id="adapters",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--parallel.tp", "2", "--adapter.rank", "4", "--adapter.dora"), id="dora"),
        pytest.param((*IN_FP8, "--parallel.dp", "2", "--optimizer.zero_stage", "3"), id="fp8-zero3"),
        pytest.param(
            (*IN_FP8, "--parallel.tp", "2", "--parallel.sequence_parallel", "--train.recompute", "light"),
            id="fp8-sp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--parallel.pp", "2", "--parallel.schedule", "interleaved", "--parallel.vpp", "2"),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_measures_what_its_plan_says(flags: tuple[str, ...], tmp_path: Path) -> None:
    """To the byte: weights, gradients, optimizer, and activations of every stage and kind (fault fp8-copies-kept)."""
    steps = ("--train.steps", "2", "--train.memory_report", "--checkpoint.no_save_last")
    ended = program.run(*program.TINY, "--launch.nproc", "2", *steps, *flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    ranks = json.loads((tmp_path / "run/memory.json").read_text())["bytes_by_rank"]
    assert len(ranks) == 2
    for rank in ranks:
        measured = rank["measured"]
        everything = measured.pop(ALL)
        other = measured.pop(OTHER)
        assert measured == rank["planned"]
        assert other + sum(measured.values()) == everything
        assert other > 0
    names = {name for rank in ranks for name in rank["planned"]}
    # ZeRO-3 gathers codes, which count as weights.
    assert (CONVERTED in names) == ("--train.fp8" in flags and "--optimizer.zero_stage" not in flags)
    assert {"weights", "gradients", "optimizer"} < names
    assert any(name.startswith("activations of stage 2: ") for name in names) == ("interleaved" in flags)
    assert any(name.endswith(DEFERRED) for name in names) == ("zb-h1" in flags)
    assert "memory of rank " in ended.out
    assert "planned" in ended.out
