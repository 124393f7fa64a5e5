"""Norms, activations and rotations compiled by torch.compile (kernels.compile)."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from megapar_kernels import norm_formulas
from megapar_kernels.activations import bias_gelu, gelu, gelu_erf, relu, relu_squared, silu, swiglu
from megapar_kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megapar_kernels.one_graph import NoGraphError, OneGraph
from megapar_kernels.rope import rotate, rotate_qk, split_and_rotate_qkv
from megapar_models.registry import validate
from torch import Tensor
from torch._dynamo.utils import counters

from megapar.base.compiled import compiled_so_far
from megapar.base.errors import ConfigError
from megapar.config.options import option_types
from megapar.observe.rehearsal import rehearse
from megapar.pipeline.schedules import SCHEDULES
from megapar.step.step import train_step
from tests.support import program
from tests.support.distributed import apart, run_ranks
from tests.support.faults import session
from tests.support.grid import (
    GPT,
    LATENT,
    LLAMA,
    MIXTRAL,
    SAMPLES,
    SHARED,
    SIGMOID,
    STRADDLING,
    Layout,
    check,
    make_state,
    micro_batches,
    name,
    train_two_steps,
)
from tests.support.kernel_checks import TOLERANCE, relative_error
from tests.support.sweeps import slow_but


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def _compiled_ranks(layout: Layout) -> list[dict[str, Any]]:
    return run_ranks(layout.world, _train_compiled, layout)


def _train_compiled(layout: Layout) -> dict[str, Any]:
    shown = train_two_steps(layout.config(), layout.packed)
    graphs, breaks = compiled_so_far()
    assert graphs > 0
    assert not breaks
    return shown


LAYOUTS = [
    Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=2, recompute="light", compile=True),
    Layout(LLAMA, compile=True, packed=True),
    Layout(GPT, tp=2, dp=2, zero_stage=2, compile=True),
    Layout(GPT, pp=2, schedule="zb-h1", recompute="selective", compile=True),
    Layout(LLAMA, pp=2, schedule="1f1b", recompute="full", dp=2, zero_stage=3, compile=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="zb-v", recompute="light", compile=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved", compile=True),
    Layout(LATENT, pp=2, schedule="gpipe", recompute="all_but_attention", dp=2, zero_stage=0, compile=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="breadth", dp=2, zero_stage=2, compile=True),
    Layout(SHARED, pp=2, schedule="zb-2p", recompute="all_but_attention", compile=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="zb-interleaved", recompute="full", compile=True),
    Layout(GPT, pp=2, vpp=2, schedule="v-half", recompute="light", compile=True),
    Layout(LLAMA, pp=2, vpp=2, schedule="v-min", recompute="selective", compile=True),
    Layout(GPT, pp=2, vpp=2, schedule="dualpipe-v", compile=True),
    Layout(STRADDLING, tp=4, sequence_parallel=True, tp_overlap_chunks=2, micro_batch_size=3, compile=True),
    Layout(LLAMA, cp=2, cp_attention="ring", micro_batch_size=2, compile=True),
    Layout(LLAMA, cp=2, cp_attention="ulysses", zero_stage=1, compile=True),
    Layout(MIXTRAL, dp=2, ep=2, compile=True),
    Layout(SIGMOID, dp=2, ep=2, recompute="light", micro_batch_size=2, compile=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_compiled_training_is_eager_training(layout: Layout) -> None:
    check(layout, _compiled_ranks(layout))


def test_every_schedule_recomputation_and_zero_stage_is_compiled() -> None:
    """A schedule counts with a pipeline alone, and a ZeRO stage where several ranks hold the same weights."""
    assert all(layout.compile for layout in LAYOUTS)
    types = option_types()
    assert {layout.schedule for layout in LAYOUTS if layout.pp > 1} == set(SCHEDULES)
    assert {layout.recompute for layout in LAYOUTS} == set(get_args(types["train.recompute"]))
    stages = {layout.zero_stage for layout in LAYOUTS if layout.dp * layout.cp > 1}
    assert stages == set(get_args(types["optimizer.zero_stage"]))


def _traced(body: Callable[..., Any], *args: Any) -> Any:
    """`body(*args)` while torch's ops run the graphs: inductor takes a minute to compile its code. The code of ops is
    tested below, so this is a process of its own: a OneGraph keeps the compiler of its first call."""
    return apart(_trace, body, *args)


def _trace(body: Callable[..., Any], *args: Any) -> Any:
    compile_ = torch.compile
    traced: list[str] = []

    def trace(function: Callable[..., Any], *, fullgraph: bool, dynamic: bool, options: object) -> Callable[..., Any]:
        traced.append(function.__name__)
        return compile_(function, fullgraph=fullgraph, dynamic=dynamic, backend="aot_eager")

    torch.compile = trace  # type: ignore[assignment]
    result = body(*args)
    assert traced
    return result


def test_traced_training_is_eager_training() -> None:
    check(LAYOUTS[1], [_traced(_train_compiled, LAYOUTS[1])])


def _double_if_positive(x: Tensor, *_: Any) -> Tensor:
    return 2 * x if x.sum() > 0 else 3 * x


REASON = "Data-dependent branching: Detected data-dependent branching "


def _twice_or_thrice(x: Tensor) -> Tensor:
    y = _double_if_positive(x)
    return y if y.sum() > 0 else -y


def _rehearse_twice() -> list[str]:
    """The second time beside a function of the user that is compiled with graph breaks."""
    torch.compile(_double_if_positive, fullgraph=False, dynamic=False, options={})(torch.ones(3))  # counted before
    state = make_state(Layout(LLAMA, micro_batch_size=SAMPLES, compile=True).config())
    batches = micro_batches(state.config, state.ctx, 0)
    lines = [rehearse(state, batches)]
    theirs = torch.compile(_twice_or_thrice, fullgraph=False, dynamic=False, options={})

    def call(*_: Any) -> None:
        theirs(torch.ones(3))

    state.stages[0].register_forward_hook(call)
    return [*lines, rehearse(state, batches)]


def test_a_rehearsal_counts_graphs_and_names_breaks() -> None:
    """Of this run alone. A branch in a function that another calls has torch's long reason, and one in the compiled
    function a short one."""
    without, with_breaks = _traced(_rehearse_twice)
    begin = r"compiled in \d+\.\d s, before the first step; rank 0: "
    assert re.fullmatch(begin + "12 graphs, 0 graph breaks", without)
    place = rf"{re.escape(__file__)}:\d+: "
    breaks = rf"1 x {place}{REASON}.*; 1 x {place}generic_jump .*"
    assert re.fullmatch(begin + rf"\d graphs?, 2 graph breaks \({breaks}\)", with_breaks)


def _refused(name: str, reason: str) -> str:
    """The pattern of the one line that tells of a function of this file without a graph."""
    begin = f"kernels.compile=true: torch.compile cannot make one graph of {__name__}.{name}: {reason}"
    return re.escape(begin) + ".*; kernels.compile=false trains with torch's ops"


def _break_backward() -> str:
    norm_formulas.backward_in_one_graph.function = _double_if_positive
    state = make_state(Layout(LLAMA, micro_batch_size=SAMPLES, compile=True).config())
    with pytest.raises(NoGraphError) as caught:
        rehearse(state, micro_batches(state.config, state.ctx, 0))
    return str(caught.value)


def _double_three_shapes() -> str:
    double = OneGraph(_double)
    with torch._dynamo.config.patch(recompile_limit=2):
        double(torch.ones(3))
        double(torch.ones(4))
        with pytest.raises(NoGraphError) as caught:
            double(torch.ones(5))
    return str(caught.value)


def _double(x: Tensor) -> Tensor:
    return 2 * x


def test_nothing_falls_back_to_torch() -> None:
    """A function that is no graph is refused by name, in autograd's backward too, and so is one shape too many."""
    assert re.fullmatch(_refused("_double_if_positive", REASON), _traced(_break_backward))
    assert re.fullmatch(_refused("_double", "Dynamo recompile limit exceeded: "), _traced(_double_three_shapes))


def _break_forward() -> None:
    norm_formulas._forward_in_one_graph.function = _double_if_positive


def test_a_run_that_cannot_compile_ends_with_the_reason(tmp_path: Path) -> None:
    ended = program.run("--kernels.compile", cwd=tmp_path, plant=_break_forward)
    assert ended.code == 70
    line = json.loads((tmp_path / "run/error.json").read_text())["message"]
    assert re.fullmatch(_refused("_double_if_positive", REASON), line)
    assert ended.err.endswith(f"NoGraphError: {line}\n")


@pytest.mark.slow
def test_a_layer_is_twelve_graphs_without_a_break() -> None:
    """Forward the norms of x, of x + attention, of q and of k, the rotation and the activation; and their backwards.

    One code serves all layers. Matrix products, core attention and the last addition of a layer are in no graph.
    """
    state = make_state(Layout(LLAMA, micro_batch_size=SAMPLES, compile=True).config())
    assert len(list(state.stages[0].layers)) > 1
    for step in range(2):
        train_step(state, micro_batches(state.config, state.ctx, step))
        assert compiled_so_far() == (12, ())


@pytest.mark.slow
def test_a_rehearsal_compiles_and_leaves_no_trace() -> None:
    """Also none in the tally by which a router's bias is moved."""
    found = []
    for rehearses in (False, True):
        state = make_state(Layout(SIGMOID, micro_batch_size=2, compile=rehearses).config())
        batches = micro_batches(state.config, state.ctx, 0)
        if rehearses:
            state = make_state(replace(state.config, kernels=replace(state.config.kernels, compile=True)))
            rehearse(state, batches)
            compiled = counters["stats"]["unique_graphs"]
            assert compiled > 0
        found.append([train_step(state, micro_batches(state.config, state.ctx, step)) for step in range(2)])
    assert counters["stats"]["unique_graphs"] == compiled, "a step compiled what the rehearsal had not"
    for eager, after in zip(*found, strict=True):
        assert after.loss == pytest.approx(eager.loss, rel=1e-5)
        assert after.grad_norm == pytest.approx(eager.grad_norm, rel=1e-5)
        assert after.tallies["expert"].tolist() == eager.tallies["expert"].tolist()


OPS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w, i: rms_norm(x, w, 1e-5, i), [(3, 5, 48), (48,)]),
    "layer_norm": (lambda x, w, b, i: layer_norm(x, w, b, 1e-5, i), [(3, 5, 48), (48,), (48,)]),
    "add_rms_norm": (lambda x, r, w, i: add_rms_norm(x, r, w, 1e-5, i), [(3, 5, 48), (3, 5, 48), (48,)]),
    "add_layer_norm": (
        lambda x, r, w, b, i: add_layer_norm(x, r, w, b, 1e-5, i),
        [(3, 5, 48), (3, 5, 48), (48,), (48,)],
    ),
    "swiglu": (lambda x, i: swiglu(x, impl=i), [(3, 5, 32)]),
    "bias_gelu": (bias_gelu, [(3, 5, 32), (32,)]),
    **{op.__name__: (op, [(3, 5, 32)]) for op in (silu, gelu, gelu_erf, relu, relu_squared)},
    "split_and_rotate_qkv": (lambda x, c, s, i: split_and_rotate_qkv(x, 4, 2, c, s, i), [(6, 2, 64), (6, 8), (6, 8)]),
    "split_and_rotate_a_part": (
        lambda x, c, s, i: split_and_rotate_qkv(x, 4, 2, c, s, i),
        [(6, 2, 64), (6, 4), (6, 4)],
    ),
    "rotate_qk": (lambda q, k, c, s, i: rotate_qk(q, k, c, s, impl=i), [(6, 2, 4, 8), (6, 2, 1, 8), (6, 8), (6, 8)]),
    "rotate": (rotate, [(6, 2, 4, 8), (6, 8), (6, 8)]),
}
TABLES = 2  # the last arguments of rotations, without a gradient


@pytest.mark.parametrize("dtype", slow_but([1], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("op", slow_but([2, 4], OPS))  # a norm, an activation
def test_compiled_ops_round_once(op: str, dtype: torch.dtype) -> None:
    """Values and gradients, beside torch's ops in fp64 of the same inputs."""
    function, shapes = OPS[op]
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if "rotate" in op:
        given[-TABLES:] = [torch.cat((x, x), -1) for x in (y[:, : y.shape[-1] // 2].float() for y in given[-TABLES:])]
    last = len(given) - (TABLES if "rotate" in op else 0)
    results: list[list[Tensor]] = []
    for impl, wide in (("inductor", False), ("torch", True)):
        inputs = [(x.double() if wide else x.clone()).requires_grad_(n < last) for n, x in enumerate(given)]
        ys = function(*inputs, impl)
        ys = [ys] if isinstance(ys, Tensor) else list(ys)
        upstream = [torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(dtype).to(y.dtype) for y in ys]
        results.append([*ys, *torch.autograd.grad(ys, inputs[:last], upstream)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, exact) < TOLERANCE[dtype]


def test_a_backend_with_kernels_and_compile_are_refused() -> None:
    config = Layout(LLAMA).config()
    config = replace(config, kernels=replace(config.kernels, backend="triton", compile=True))
    with pytest.raises(ConfigError, match=r"^kernels.compile=true, kernels.backend=triton: triton has kernels"):
        validate(config, 1)


@pytest.mark.slow
def test_a_launch_compiles_before_its_first_step_and_leaves_no_process(tmp_path: Path) -> None:
    """Forked ranks compile, after the launcher has imported the compiler."""
    flags = ("--launch.nproc", "2", "--parallel.pp", "2", "--kernels.compile", "--train.steps", "2")
    started = program.start(*flags, cwd=tmp_path)
    started.until("before the first step")
    assert len(session(started.pid)) == 3, "the launcher and two ranks"
    ended = started.wait(cap_seconds=300)
    assert ended.code == 0, ended.err
    assert "before the first step; rank 0: 8 graphs, 0 graph breaks\n" in ended.out
    assert session(started.pid) == []
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["step_seconds"] < 2 for line in lines)
    assert lines[0]["comm_bytes"] == lines[1]["comm_bytes"]
