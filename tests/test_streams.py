"""Several residual streams (hyper-connections): as in transformers, and in every layout as in one process."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megapar_models.counts import WholeModel
from megapar_models.factory import Factory
from megapar_models.streams import HyperConnections, StreamConnection, StreamHead
from megapar_tools.plan.parts import LayerPart
from torch import Tensor, nn

from megapar.declare import context
from megapar.declare.params import Init
from megapar.declare.sharding import Sharding
from megapar.pipeline.schedules import SCHEDULES
from megapar.step.step import train_step
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import SAMPLES, Layout, check_on_ranks, make_state, micro_batches
from tests.support.plans import PARTS
from tests.support.streamed import GLM, HY4, MODELS, V4, Hy4Stage
from tests.support.sweeps import slow_but
from tests.support.width import computes_as_its_reference, sent_over_pp, trains_as_one_process

# Each module beside that of transformers

HIDDEN = 20
NOTHING: Any = None  # in the place of a context


def made(module: type, rule: HyperConnections) -> Any:
    """A module of ours in one process, with random weights."""
    sharding = Sharding.of(context.single(), torch.float32)
    made = module("streams", rule, HIDDEN, Factory(sharding, Init("normal", 0.1), Init("normal", 0.1)))
    torch.manual_seed(1)
    for param in made.parameters():
        nn.init.normal_(param, std=0.4)
    return made


def of_transformers(name: str, rule: HyperConnections, ours: nn.Module, prefix: str = "") -> Any:
    """The module of transformers with the same weights."""
    model_type = {"D": "deepseek_v4", "G": "glm5_next", "H": "hy_v4"}[name[0]]
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers")
    module = transformers.models.__getattr__(model_type)
    config = SimpleNamespace(
        hc_mult=rule.count,
        hc_sinkhorn_iters=rule.mixing_steps,
        hc_eps=rule.eps,
        hc_magnitude=rule.post_factor,
        rms_norm_eps=rule.norm_eps,
        hidden_size=HIDDEN,
    )
    theirs = getattr(getattr(module, f"modeling_{model_type}"), name)(config)
    values = {"fn": ours.weight, "base": torch.cat(list(ours.biases)), "scale": ours.scale}
    theirs.load_state_dict({f"{prefix}{key}": value.detach() for key, value in values.items()})
    return theirs


def branch(x: Tensor) -> Tensor:
    return (1.5 * x).tanh().flip(-1)


def mixed(theirs: nn.Module, x_bsnh: Tensor) -> Tensor:
    """A branch within streams as in the layers of DeepSeek V4 and GLM-5.3-Flash."""
    post, comb, read = theirs(x_bsnh)
    return post[..., None] * branch(read)[:, :, None] + comb.transpose(-1, -2) @ x_bsnh


def apart(theirs: nn.Module, x_bsnh: Tensor) -> Tensor:
    """A branch within streams as in the layers of Hy4."""
    post, read = theirs(x_bsnh)
    return post[..., None] * branch(read)[:, :, None] + x_bsnh


FORMS: dict[str, tuple[str, HyperConnections, Callable[[nn.Module, Tensor], Tensor]]] = {
    "deepseek_v4": ("DeepseekV4HyperConnection", V4, mixed),
    "glm5_next": ("Glm5NextTextHyperConnection", GLM, mixed),
    "hy_v4": ("HYV4HyperConnection", replace(HY4, post_eps=HY4.eps), apart),
}


def gradients_of(made: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
    """Gradients of the input, and of matrix, biases and factors."""
    total = (y * weights).sum()
    if not isinstance(made, StreamConnection | StreamHead):
        values = dict(made.named_parameters())
        keys = ("fn", "base", "scale") if "fn" in values else ("hc_fn", "hc_base", "hc_scale")
        return list(torch.autograd.grad(total, [x, *(values[key] for key in keys)]))
    x_grad, matrix, scale, *biases = torch.autograd.grad(total, [x, made.weight, made.scale, *made.biases])
    return [x_grad, matrix, torch.cat(biases), scale]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_connection_is_that_of_transformers(form: str) -> None:
    name, rule, theirs_with_branch = FORMS[form]
    ours = made(StreamConnection, rule)
    theirs = of_transformers(name, rule, ours)
    x_sbnh = torch.randn(5, 2, rule.count, HIDDEN, requires_grad=True)
    weights = torch.randn(5, 2, rule.count, HIDDEN)
    y = ours(x_sbnh.flatten(2), branch).unflatten(-1, (rule.count, -1))
    expected = theirs_with_branch(theirs, x_sbnh)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    found = gradients_of(ours, x_sbnh, y, weights)
    for grad, of_theirs in zip(found, gradients_of(theirs, x_sbnh, expected, weights), strict=True):
        torch.testing.assert_close(grad, of_theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [("DeepseekV4HyperHead", V4), ("HYV4HyperHead", HY4)])
def test_a_stream_head_is_that_of_transformers(name: str, rule: HyperConnections) -> None:
    ours = made(StreamHead, rule)
    theirs = of_transformers(name, rule, ours, prefix="hc_")
    x_sbnh = torch.randn(5, 2, rule.count, HIDDEN, requires_grad=True)
    weights = torch.randn(5, 2, HIDDEN)
    y, expected = ours(x_sbnh.flatten(2), NOTHING), theirs(x_sbnh)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    found = gradients_of(ours, x_sbnh, y, weights)
    for grad, of_theirs in zip(found, gradients_of(theirs, x_sbnh, expected, weights), strict=True):
        torch.testing.assert_close(grad, of_theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", MODELS)
def test_models_with_streams_compute_what_they_say(form: str) -> None:
    """Loss and every gradient are those of plain PyTorch."""
    computes_as_its_reference(MODELS[form])


# Layouts

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 with sp": {"tp": 2, "sequence_parallel": True},
    "tp 2": {"tp": 2},
    "pp 2 with vpp 2": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "zero bubble": {"pp": 2, "vpp": 2, "schedule": "zb-v", "dp": 2, "zero_stage": 2},
    "cp 2 with ZeRO-3": {"cp": 2, "zero_stage": 3},
    "ZeRO-3, recomputed": {"dp": 2, "zero_stage": 3, "recompute": "full", "pp": 2},
    "light": {"pp": 2, "recompute": "light", "schedule": "zb-h1"},
    "selective": {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "all but attention, offloaded": {"recompute": "all_but_attention", "offload": 0.5},
}
FORMS_IN_LAYOUTS = [(form, layout) for layout in LAYOUTS for form in ("glm", "hy4", "v4")]


@pytest.mark.parametrize(("form", "layout"), slow_but([0], FORMS_IN_LAYOUTS), ids=str)
def test_models_with_streams_train_as_in_one_process(form: str, layout: str) -> None:
    check_on_ranks(Layout(MODELS[form], micro_batch_size=3, **LAYOUTS[layout]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streams_beside_experts_train_as_in_one_process_in_every_schedule(schedule: str) -> None:
    sizes = {"pp": 2, "vpp": SCHEDULES[schedule].vpp.nearest_to(2), "schedule": schedule}
    trains_as_one_process(MODELS["v4"], sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}], ids=str)
def test_streams_go_beside_experts_dealt_to_ranks(sizes: dict[str, Any]) -> None:
    trains_as_one_process(MODELS["v4"], sizes)


@pytest.mark.slow
def test_all_streams_cross_a_cut() -> None:
    """As many bytes as the streams have, forward from the first rank, and backward from the second: as planned."""
    layout = Layout(MODELS["hy4"], pp=2, micro_batch_size=3, partition=(2, 2))
    config = layout.config()
    streams = 4 * HY4.count * layout.model.hidden_size * SAMPLES * layout.length  # fp32
    recording = PARTS.recording(config, PARTS.context(config, 0), LayerPart(2, recomputed=False))
    assert streams == recording.boundary_bytes * SAMPLES // 3 == recording.boundary_gradient_bytes * SAMPLES // 3
    sent = run_ranks(2, sent_over_pp, config)
    assert all(streams <= nbytes < 1.01 * streams for nbytes in sent)


# Counts, starts, and what is refused


def test_parameters_and_products_of_streams_are_counted() -> None:
    model, rule = MODELS["hy4"], HY4
    n, h = rule.count, model.hidden_size
    base = replace(model, family="llama")
    whole, one_stream = WholeModel(tiny_models.config(model).model), WholeModel(tiny_models.config(base).model)
    layer = sum(math.prod(p.shape) for name, p in one_stream.tensors().items() if name.startswith("layers.0."))
    # Four layers, of which one has no MLP and one no mixer: three of each branch.
    connection = 2 * n * n * h + 2 * n + 2
    more = 6 * connection + n * n * h + n + 1
    assert whole.parameters() - more == one_stream.parameters() - layer
    products = whole.products_of_layers(24)[0] - one_stream.products_of_layers(24)[0]
    assert products == 2 * (2 * h * 2 * n)


def test_streams_start_as_the_rule_says() -> None:
    stage = make_state(Layout(MODELS["hy4"]).config()).stages[0]
    connection = stage.layers["0"].stream.of["attention"]
    assert connection.scale.tolist() == [0.5, 0.5]
    assert connection.biases[0].tolist() == [-1.0] * 4
    assert connection.biases[1].tolist() == [0.0] * 4


@pytest.mark.slow
def test_bf16_models_have_factors_and_biases_in_fp32() -> None:
    """A step changes each of them, and the matrix."""
    config = Layout(MODELS["v4"]).config("bf16")
    state = make_state(config)
    connection = state.stages[0].layers["3"].stream.of["mlp"]
    assert {connection.scale.dtype, *(bias.dtype for bias in connection.biases)} == {torch.float32}
    before = [param.detach().clone() for param in connection.parameters()]
    assert math.isfinite(train_step(state, micro_batches(config, state.ctx, 0)).loss)
    for param, old in zip(connection.parameters(), before, strict=True):
        assert (param != old).all() if param.dim() == 1 else (param != old).any()


def test_layers_with_another_rule_than_the_first_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Hy4Stage.layer_kind

    def last_apart(cls: type, model: Any, number: int) -> Any:
        return replace(kind(model, number), stream=GLM if number < 3 else None)

    monkeypatch.setattr(Hy4Stage, "layer_kind", classmethod(last_apart))
    with pytest.raises(ValueError, match=r"^LayerKind.stream of layers \[3\]: another rule than in layer 0"):
        tiny_models.build(tiny_models.config(MODELS["hy4"]), context.single())


def test_streams_do_not_go_with_parallel_branches() -> None:
    with pytest.raises(ValueError, match=r"^LayerKind.stream, parallel: a branch"):
        replace(Hy4Stage.layer_kind(MODELS["hy4"], 0), parallel="one_norm")
