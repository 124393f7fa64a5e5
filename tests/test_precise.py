"""Parameters in fp32 whatever the model's dtype (`ParamSpec.precise`): the decay rates of gated delta nets.

The same bits in every layout and as in an fp32 model, exact checkpoints, and the bytes of a plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_tools.plan.memory import report_rank
from megapar_tools.plan.parts import LayerPart
from megapar_tools.verify import logical
from megapar_tools.verify.run import see_gradients
from torch import Tensor, nn

from megapar.base.errors import NumericError
from megapar.config.options import Config
from megapar.data_parallel.layout import FlatLayout
from megapar.declare import context
from megapar.declare.params import MAIN, ONES, ParamSpec, make_piece, parameter, spec_of
from megapar.declare.sharding import Sharding
from megapar.observe.replicas import check_replicas
from megapar.optimizer.adamw import AdamW
from megapar.step.step import train_step
from megapar.train.checkpoints import find, resume
from megapar.train.trainer import layout_of
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import LLAMA, Layout, make_state, micro_batches, name
from tests.support.held_state import assert_same, one_step, resumed, saved, trained, updated, whole
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

DELTA = replace(LLAMA, family="tests.support.hybrids:HEADS_FAMILY", num_key_value_heads=4, attention_bias=False)
RATES = ("A_log", "dt_bias")
BOTH: dict[str, Any] = {"moments": "bf16", "main_weights": "remainder"}


def rates_of(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in found.items() if key.endswith(RATES)}


def with_options(config: Config, **options: Any) -> Config:
    return replace(config, optimizer=replace(config.optimizer, **options))


# What is declared


def test_the_buffers_of_an_fp32_model_are_those_of_one_without_precise_parameters() -> None:
    """In a 16-bit model the fp32 parameters come last."""
    wide, narrow = (make_state(Layout(DELTA).config(precision)).weights for precision in ("fp32", "bf16"))
    assert (wide.precise.numel(), wide.flat.numel()) == (0, wide.layout.numel)
    assert [update.precise for update in wide.layout.updates()] == [False]
    starts = [slot.start for slot in narrow.layout.slots if slot.name.endswith(RATES)]
    assert [slot.start for slot in narrow.layout.slots][-len(starts) :] == starts
    assert narrow.precise.dtype == torch.float32
    assert narrow.precise.numel() == narrow.layout.numel - min(starts)
    assert narrow.flat.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_layers_make_them_in_fp32(precision: str) -> None:
    """A run makes its stages so, and generation."""
    stage = tiny_models.build(tiny_models.config(DELTA, precision=precision), context.single())
    sharding = Sharding.of(context.single(), torch.bfloat16)
    found = {spec_of(param).name: param.dtype for param in stage.parameters()}
    assert {dtype for key, dtype in found.items() if key.endswith(RATES)} == {torch.float32}
    others = {dtype for key, dtype in found.items() if not key.endswith(RATES)}
    assert others == {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    piece = make_piece("a", (3,), {})
    assert sharding.parameter((piece,), (3,), ONES, decay=False).dtype == torch.bfloat16


def test_a_precise_parameter_of_another_dtype_is_refused_by_name() -> None:
    spec = ParamSpec((make_piece("a", (3,), {}),), ONES, decay=False, grad_axis=context.single().grad, precise=True)
    module = nn.Module()
    module.a = parameter(spec, (3,), dtype=torch.float32, device="cpu")
    assert FlatLayout([module], 64, sharded=False).dtype == torch.float32
    module.a.data = module.a.data.bfloat16()
    with pytest.raises(TypeError, match=r"a is torch\.bfloat16: a parameter declared precise must"):
        FlatLayout([module], 64, sharded=False)


# The same bits in every layout


LAYOUTS = [
    Layout(DELTA, dp=2, zero_stage=3),
    Layout(DELTA, tp=2, sequence_parallel=True),
    Layout(DELTA, dp=2, zero_stage=0),
    Layout(DELTA, dp=2, zero_stage=1),
    Layout(DELTA, dp=2, zero_stage=2),
    Layout(DELTA, dp=4, zero_stage=3, shard_ranks=2),
    Layout(DELTA, dp=3),
    Layout(DELTA, tp=4),
    Layout(DELTA, pp=2, vpp=2, schedule="interleaved"),
    Layout(DELTA, pp=2, schedule="zb-h1", dp=2, zero_stage=3),
    Layout(DELTA, cp=2, zero_stage=2),
    Layout(DELTA, dp=2, zero_stage=3, **BOTH),
    Layout(DELTA, tp=2, dp=2, main_weights="remainder"),
]
FP32_MOMENTS = Layout(DELTA, zero_stage=0)


@pytest.mark.parametrize("layout", slow_but([0], LAYOUTS), ids=name)
def test_an_update_has_the_bits_of_an_fp32_model_in_every_layout(layout: Layout) -> None:
    """Of the same gradients. bf16 numbers would lose all but 8 bits at once."""
    alone = Layout(DELTA, zero_stage=0, moments=layout.moments)
    found = rates_of(whole(run_ranks(layout.world, updated, layout.config("bf16"))))
    assert_same(found, rates_of(whole([updated(alone.config())])))
    mains = [tensor for key, tensor in found.items() if key.startswith(MAIN)]
    assert len(mains) == 4  # of two layers
    assert all(((x - x.bfloat16().float()) != 0).all() for x in mains)


@pytest.mark.parametrize("options", slow_but([0], [{"name": "lion"}, {"name": "sgd"}, {"name": "muon"}]), ids=str)
@pytest.mark.parametrize("stage", slow_but([0], [3, 1]))
def test_every_optimizer_updates_them_in_fp32(options: dict[str, Any], stage: int) -> None:
    layout = Layout(DELTA, dp=2, zero_stage=stage, optimizer=options["name"])
    bf16, fp32 = (with_options(layout.config(precision), eps=1e-8) for precision in ("bf16", "fp32"))
    found = rates_of(whole(run_ranks(2, updated, bf16)))
    assert_same(found, rates_of(whole(run_ranks(2, updated, fp32))))


@pytest.mark.parametrize("share", slow_but([1], [1.0, 0.3]))
def test_state_on_the_host_changes_no_bit(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "HOST_ELEMENTS", 1000)
    config = Layout(DELTA, micro_batch_size=6).config("bf16")
    assert_same(whole([trained(with_options(config, offload=share))]), whole([trained(config)]))


def averaged(config: Config) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """The averages, the parameters while these are the weights, and whether the weights are back afterwards."""
    state = make_state(config)
    for _ in range(2):
        one_step(state)
    before = [param.detach().clone() for stage in state.stages.values() for param in stage.parameters()]
    found = {item.spec.name: item.tensors["average"].clone() for item in state.optimizer.slices()}
    assert state.optimizer.average is not None
    with state.optimizer.average.as_weights():
        shown = logical.assemble([logical.held_weights(state)])
    after = [param for stage in state.stages.values() for param in stage.parameters()]
    return found, shown, all(map(torch.equal, before, after))


def test_an_average_is_read_in_fp32() -> None:
    found, shown, back = averaged(with_options(Layout(DELTA, micro_batch_size=6).config("bf16"), ema=0.5))
    for key, average in rates_of(found).items():
        assert torch.equal(shown[key].view(-1), average)
        assert not torch.equal(average, average.bfloat16().float())
    assert back


# Steps of training


def two_steps(config: Config) -> tuple[list[Any], list[logical.Held], list[str]]:
    """Of each step the factor of gradients, the gradients and the weights; the weights before; the dtypes of rates."""
    state = make_state(config)
    seen = see_gradients(state)
    steps: list[Any] = []
    initial = logical.held_weights(state)
    for step in range(2):
        result = train_step(state, micro_batches(config, state.ctx, step))
        assert result.finite
        clip = min(config.optimizer.clip_grad / (result.grad_norm + 1e-6), 1.0)
        steps.append((clip / result.loss_scale.scale, seen.gradients, logical.held_weights(state)))
    check_replicas(state)
    params = [param for stage in state.stages.values() for param in stage.parameters()]
    dtypes = {str(param.dtype) for param in params if spec_of(param).name.endswith(RATES)}
    return steps, initial, sorted(dtypes)


def adamw(config: Config, weights: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """AdamW in fp64, without weight decay (arXiv 1711.05101, algorithm 2)."""
    options = config.optimizer
    first, second = options.betas
    x, m, v = (weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double())
    for number, grad in enumerate(gradients, start=1):
        m = first * m + (1 - first) * grad.double()
        v = second * v + (1 - second) * grad.double().square()
        rate = options.lr * min(number / max(options.warmup_steps, 1), 1.0)
        x = x - rate * (m / (1 - first**number)) / ((v / (1 - second**number)).sqrt() + options.eps)
    return x


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [0],
        [
            (Layout(DELTA, dp=2, zero_stage=3), "bf16"),
            (Layout(DELTA, dp=2, zero_stage=0), "bf16"),
            (Layout(DELTA, dp=2, zero_stage=1), "fp16"),
            (Layout(DELTA, dp=2, zero_stage=2), "bf16"),
            (Layout(DELTA, dp=2, zero_stage=3), "fp16"),
            (Layout(DELTA, tp=2, sequence_parallel=True), "bf16"),
            (Layout(DELTA, pp=2), "bf16"),
            (Layout(DELTA, dp=2, zero_stage=3, recompute="full", **BOTH), "bf16"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_two_steps_are_those_of_adamw_in_fp32(layout: Layout, precision: str) -> None:
    """Whatever rounding there is in bf16 before it: the gradients are those seen in the run."""
    config = replace(layout, micro_batch_size=3).config(precision)
    config = with_options(config, warmup_steps=0, schedule="constant")
    ranks = run_ranks(layout.world, two_steps, config)
    before = rates_of(logical.assemble([rank[1] for rank in ranks]))
    gradients = []
    for step in range(2):
        of_step = logical.assemble([rank[0][step][1] for rank in ranks])
        gradients.append({key: of_step[key].double() * ranks[0][0][step][0] for key in before})
    after = rates_of(logical.assemble([rank[0][1][2] for rank in ranks]))
    assert len(after) == 4
    for key, found in after.items():
        expected = adamw(config, before[key], [of_step[key] for of_step in gradients])
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(found, found.bfloat16().float())
    assert {dtype for rank in ranks for dtype in rank[2]} == {"torch.float32"}


# Checkpoints


ONE = Layout(DELTA, micro_batch_size=6)


@pytest.mark.parametrize(
    ("then", "now"),
    slow_but(
        [0],
        [
            (Layout(DELTA, dp=2, zero_stage=3), Layout(DELTA, tp=2)),
            (Layout(DELTA, tp=2), Layout(DELTA, pp=2, **BOTH)),
            (Layout(DELTA, pp=2, **BOTH), Layout(DELTA, dp=2, zero_stage=0, **BOTH)),
            (Layout(DELTA, dp=2, zero_stage=0), Layout(DELTA, dp=2, zero_stage=2)),
        ],
    ),
    ids=name,
)
def test_a_checkpoint_loads_into_another_layout(then: Layout, now: Layout, tmp_path: Path) -> None:
    then, now = (replace(layout, micro_batch_size=3) for layout in (then, now))
    stored = whole([before for before, _ in run_ranks(then.world, saved, then.config("bf16"), tmp_path)])
    found = whole([before for _, before, _ in run_ranks(now.world, resumed, now.config("bf16"), tmp_path)])
    if then.moments == now.moments:
        assert_same(found, stored)
    mains = {key: tensor for key, tensor in stored.items() if key.startswith(MAIN)}
    assert_same({key: found[key] for key in mains}, mains)
    assert len(rates_of(mains)) == 4


@pytest.mark.parametrize(("then", "now"), slow_but([0], [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")]))
def test_a_checkpoint_loads_in_another_precision(then: str, now: str, tmp_path: Path) -> None:
    before, _ = saved(ONE.config(then), tmp_path)
    _, after, _ = resumed(ONE.config(now), tmp_path)
    assert_same(whole([after]), whole([before]))


@pytest.mark.parametrize(
    "layout", slow_but([0], [Layout(DELTA, dp=2, zero_stage=3), ONE, replace(ONE, **BOTH)]), ids=name
)
def test_a_resumed_run_goes_on_bit_by_bit(layout: Layout, tmp_path: Path) -> None:
    config = replace(layout, micro_batch_size=3).config("bf16")
    expected = whole([after for _, after in run_ranks(layout.world, saved, config, tmp_path)])
    found = whole([after for _, _, after in run_ranks(layout.world, resumed, config, tmp_path)])
    assert_same(found, expected)


@pytest.mark.parametrize(
    "patterns", slow_but([0], [["*.A_log"], ["*.mlp.*"], ["*.A_log", "*.dt_bias", "*.mlp.*"]]), ids=str
)
@pytest.mark.parametrize("stage", slow_but([0], [3, 0]))
def test_some_are_trained_alone_or_frozen(patterns: list[str], stage: int, tmp_path: Path) -> None:
    """Those alone leave no 16-bit weights in the buffers, and main weights of a remainder have none to halve."""
    layout = Layout(DELTA, dp=2, zero_stage=stage, trainable=tuple(patterns), micro_batch_size=3, **BOTH)
    config = layout.config("bf16")
    stored = whole([before for before, _ in run_ranks(2, saved, config, tmp_path)])
    found = whole([before for _, before, _ in run_ranks(2, resumed, config, tmp_path)])
    assert_same(found, stored)
    assert sum(key.startswith(MAIN) for key in rates_of(stored)) == 2 * sum("mlp" not in p for p in patterns)


def test_a_frozen_one_is_stored_and_loaded_in_fp32(tmp_path: Path) -> None:
    config = Layout(DELTA, micro_batch_size=6, trainable=("*.mlp.*",)).config("bf16")
    saved(config, tmp_path)
    state = make_state(config)
    fresh = {spec_of(p).name: p for stage in state.stages.values() for p in stage.parameters()}
    expected = {key: param.detach().clone() for key, param in rates_of(fresh).items()}
    for param in rates_of(fresh).values():
        param.data.zero_()
    resume(state, tmp_path, find(config, tmp_path, state.ctx))
    assert_same({key: param.detach() for key, param in rates_of(fresh).items()}, expected)


# Bytes


def measured(config: Config) -> tuple[int, int, int]:
    """The bytes of weights and of optimizer state after a step, and of gradients."""
    state = make_state(config)
    one_step(state)
    assert state.weights.planned_nbytes(state.weights.layout) == state.weights.nbytes
    tensors = [tensor for item in state.optimizer.slices() for tensor in item.parts()]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for buffer in (state.weights.flat, state.weights.precise):
        held.pop(buffer.untyped_storage().data_ptr(), None)
    assert sum(held.values()) == state.optimizer.nbytes
    return state.weights.most_nbytes, state.grads.most_nbytes, state.optimizer.nbytes


@pytest.mark.parametrize(
    "layout",
    slow_but(
        [0],
        [
            Layout(DELTA, dp=2, zero_stage=3),
            Layout(DELTA, dp=2, zero_stage=2),
            Layout(DELTA, dp=2, zero_stage=1, main_weights="remainder"),
            Layout(DELTA, tp=2, **BOTH),
            Layout(DELTA, pp=2, zero_stage=0),
            Layout(DELTA, pp=2, dp=2, zero_stage=3, moments="bf16"),
        ],
    ),
    ids=name,
)
def test_a_plan_has_the_bytes_of_real_ranks(layout: Layout) -> None:
    config = layout.config("bf16")
    for rank, found in enumerate(run_ranks(layout.world, measured, config)):
        planned = report_rank(config, PARTS, rank)
        assert found == (planned.weights, planned.gradients, planned.optimizer), rank


def test_a_plan_counts_their_traffic() -> None:
    """ZeRO-1 and 2 gather what ZeRO-3 gathers: 4 bytes for each of 4 heads, twice a layer, and 2 for others."""
    config = Layout(DELTA, dp=2).config("bf16")
    found = PARTS.recording(config, PARTS.context(config, 0), LayerPart(1, recomputed=False))
    expected = {"grad": 2 * found.elements["grad"] + 2 * 2 * 4}
    assert found.weight_bytes == found.gathered_bytes == expected


def test_main_weights_are_the_parameters() -> None:
    """They take 4 bytes as weights and 8 as moments, whatever the 16-bit ones take."""
    for kind, of_others in (({}, 12), ({"main_weights": "remainder"}, 10)):
        config = Layout(DELTA, **kind).config("bf16")
        layout = layout_of(config.optimizer, list(make_state(config).stages.values()))
        by_update = {
            update.precise: AdamW.planned_nbytes(layout.shards_of(update), layout.dtype_of(update), config.optimizer)
            for update in layout.updates()
        }
        assert by_update[True][False] == 8 * (layout.numel - layout.precise_start)
        assert by_update[False][False] == of_others * layout.precise_start


# Checks of a run


def spoiled(config: Config) -> tuple[list[str], str]:
    """The names of weights that are not finite after one was spoiled, and what the check of replicas says after a
    change of the last bit on rank 1."""
    state = make_state(config)
    one_step(state)
    item = next(item for item in state.optimizer.slices() if item.spec.name.endswith(RATES))
    bits = item.tensors[MAIN].view(torch.int32)
    message = ""
    if state.ctx.world.rank == 1:
        bits[0] ^= 1
    try:
        check_replicas(state)
    except NumericError as error:
        message = str(error)
    item.tensors[MAIN][0] = math.nan
    return state.weights.not_finite(), message


@pytest.mark.parametrize("stage", slow_but([1], [1, 0, 3]))
def test_checks_see_them(stage: int) -> None:
    ranks = run_ranks(2, spoiled, Layout(DELTA, dp=2, zero_stage=stage, micro_batch_size=3).config("bf16"))
    for names, message in ranks:
        assert len(names) == 1
        assert names[0].endswith(RATES)
        assert (names[0] in message) or stage
