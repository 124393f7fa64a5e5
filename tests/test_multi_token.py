"""Multi-token prediction: losses and gradients of a plain version, in every layout, and where tokens end."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megapar_models.build import build_stages, stage_layers
from megapar_models.counts import WholeModel, mtp_cost
from megapar_models.registry import find, validate
from megapar_tools.plan import explain, hardware
from megapar_tools.plan.target import with_planned_kernels
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.options import AdapterConfig, Config
from megapar.data import delivery
from megapar.data.samples import Samples, Treatment, micro_batch
from megapar.declare import context
from megapar.declare.batch import MicroBatch, StepScope, Targets, add_loss
from megapar.step.divisors import count_divisors
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support import close
from tests.support.grid import LATENT, LLAMA, Layout, check_on_ranks, make_context, make_state, micro_batches
from tests.support.multi_token import MODEL, OTHER, plain_losses
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

ONE = Layout(MODEL, micro_batch_size=12, zero_stage=0)
LATENTS = replace(LATENT, num_nextn_predict_layers=2)


def with_train(config: Config, **options: Any) -> Config:
    return replace(config, train=replace(config.train, **options))


def weights_of(state: TrainState) -> dict[str, Tensor]:
    return logical.assemble([logical.held(state.stages.values(), context.single())])


def gradients_of(state: TrainState, batches: list[MicroBatch]) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """The loss, the other losses and the gradients of a step that makes no update to speak of."""
    state.config = replace(state.config, optimizer=replace(state.config.optimizer, clip_grad=0.0, lr=1e-30))
    result = train_step(state, batches)
    return result.loss, dict(result.losses), logical.assemble([logical.held_gradients(state)])


# The plain version


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["embedding first", "hidden first"])
@pytest.mark.parametrize("weight", slow_but([0], [0.3, 1.0]))
def test_losses_and_gradients_are_those_of_the_plain_version(model: Any, weight: float) -> None:
    """Each loss is divided by the weights of its own targets; in the loss the mean of them has the option's weight."""
    config = replace(ONE, model=replace(model, mtp_loss_weight=weight)).config()
    state = make_state(config)
    (batch,) = micro_batches(config, state.ctx, 0)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights_of(state).items()}
    counts = [batch.targets(ahead).weights_bs.sum() for ahead in (1, 2, 3)]
    means = [loss / count for loss, count in zip(plain_losses(config.model, leaves, batch), counts, strict=True)]
    (means[0] + weight * (means[1] + means[2]) / 2).backward()
    loss, others, gradients = gradients_of(state, [batch])
    assert loss == pytest.approx(means[0].item(), rel=1e-6)
    assert others == pytest.approx({"mtp_1": means[1].item(), "mtp_2": means[2].item()}, rel=1e-6)
    close.assert_close(gradients, {name: leaf.grad for name, leaf in leaves.items()}, rtol=1e-5)


LAYOUTS: list[tuple[Any, Mapping[str, Any]]] = [
    (MODEL, {"pp": 2, "cp": 2}),
    (MODEL, {"tp": 2, "sequence_parallel": True, "zero_stage": 3, "dp": 2}),
    (OTHER, {"tp": 2, "pp": 2}),
    (OTHER, {"pp": 2, "zero_stage": 2, "dp": 2, "packed": True}),
    (OTHER, {"zero_stage": 3, "pp": 2, "dp": 2}),
    (MODEL, {"pp": 2, "vpp": 2, "schedule": "interleaved", "packed": True}),
    (MODEL, {"pp": 2, "schedule": "zb-h1"}),
    (MODEL, {"pp": 2, "vpp": 2, "schedule": "zb-v", "loss_chunk": 7}),
    (OTHER, {"pp": 2, "vpp": 2, "schedule": "dualpipe-v", "tp": 2}),
    (MODEL, {"pp": 2, "partition": (2, 0)}),
    (MODEL, {"pp": 3, "partition": (1, 1, 0), "recompute": "full"}),
    (MODEL, {"cp": 4, "cp_attention": "ring", "packed": True}),
    (MODEL, {"cp": 2, "cp_attention": "ulysses", "recompute": "selective"}),
    (MODEL, {"dp": 2, "recompute": "full", "offload": 0.5}),
    (MODEL, {"dp": 2, "recompute": "light", "loss_chunk": 9}),
    (MODEL, {"dp": 2, "recompute": "full", "layers": ("1-2",)}),
    (LATENTS, {"dp": 2, "ep": 2, "pp": 2}),
    (LATENTS, {"tp": 2, "ep": 2, "etp": 1, "cp": 2, "recompute": "full"}),
    (LATENTS, {"pp": 2, "schedule": "zb-h1", "dp": 2, "ep": 2, "zero_stage": 1}),
]


@pytest.mark.parametrize(
    ("model", "sizes"), slow_but([0], LAYOUTS), ids=[str(number) for number in range(len(LAYOUTS))]
)
def test_every_layout_trains_as_one_process(model: Any, sizes: Mapping[str, Any]) -> None:
    """Fault mtp-rolled-labels: at the ends of documents and of the positions of a context-parallel rank."""
    size = 6 if "ep" in sizes else 3
    check_on_ranks(Layout(model, micro_batch_size=size, **sizes))


# Where documents end


def packed(lengths: list[int], seed: int = 0) -> MicroBatch:
    """A sample of documents of these lengths, apart from each other, as a loader makes it."""
    total = sum(lengths)
    tokens = np.random.default_rng(seed).integers(0, 131, (1, total + 3))
    starts = [np.cumsum([0, *lengths])]
    return micro_batch(Samples(tokens, starts), np.array([0]), Treatment(apart=True), num_targets=3)


def test_packed_documents_are_documents_apart() -> None:
    """Fault mtp-rolled-labels: no target of a document is a token of the next one. Losses and every gradient."""
    lengths = [5, 1, 2, 9, 3, 4]
    together = packed(lengths)
    config = with_train(Layout(MODEL, micro_batch_size=1, length=sum(lengths)).config(), global_batch_size=1)
    state = make_state(config)
    bounds = np.cumsum([0, *lengths])
    alone = []
    for first, length in zip(bounds, lengths, strict=False):
        inside = slice(int(first), int(first) + length)
        # Of each document alone what follows is unlike what follows in the sample.
        parts = [Targets(t[:, inside].clone(), w[:, inside]) for t, w in (together.targets(n) for n in (1, 2, 3))]
        for ahead, part in enumerate(parts, 1):
            part.tokens_bs[:, max(length - ahead, 0) :] = 7
            assert not part.weights_bs[:, max(length - ahead, 0) :].any()
        tokens_bs, ids = together.tokens_bs[:, inside], torch.zeros(1, dtype=torch.int64)
        alone.append(MicroBatch.of_samples(tokens_bs, *parts[0], ids, later_targets=parts[1:]))
    found = gradients_of(state, [together])
    expected = gradients_of(make_state(with_train(config, global_batch_size=len(lengths))), alone)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    close.assert_close(found[2], expected[2])


def test_a_loss_without_targets_is_zero_and_gives_no_gradient() -> None:
    """Fault mtp-not-finite: documents of two tokens have targets of the model alone."""
    length = 12
    batch = packed([2] * 6)
    assert batch.weights_bs.any()
    assert not any(later.weights_bs.any() for later in batch.later_targets)
    config = with_train(Layout(MODEL, micro_batch_size=1, length=length).config(), global_batch_size=1)
    loss, losses, gradients = gradients_of(make_state(config), [batch])
    assert losses == {"mtp_1": 0.0, "mtp_2": 0.0}
    plain = replace(config, model=replace(config.model, num_nextn_predict_layers=0))
    expected_loss, _, expected = gradients_of(make_state(plain), [batch])
    assert loss == expected_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected.get(name, torch.zeros_like(gradient))), name


def test_a_depth_without_targets_leaves_the_other_one() -> None:
    """Fault mtp-not-finite."""
    batch = packed([3] * 4)
    config = with_train(Layout(MODEL, micro_batch_size=1, length=12).config(), global_batch_size=1)
    _, losses, gradients = gradients_of(make_state(config), [batch])
    assert losses["mtp_1"] > 1
    assert losses["mtp_2"] == 0.0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert gradients["layers.2.eh_proj.weight"].any()
    assert not gradients["layers.3.eh_proj.weight"].any()


# Who gets a gradient


def test_detached_losses_give_embedding_and_head_no_gradient() -> None:
    """Faults mtp-head-gradient and mtp-depths-not-detached: with every depth, and with a loss in chunks."""
    found = {}
    for chunk in (0, 7):
        config = replace(ONE, loss_chunk=chunk).config()
        batches = micro_batches(config, make_state(config).ctx, 0)
        for detach in (False, True):
            model = replace(config.model, mtp_detach=detach)
            found[detach] = gradients_of(make_state(replace(config, model=model)), batches)[2]
        plain_config = replace(config, model=replace(config.model, num_nextn_predict_layers=0))
        plain = gradients_of(make_state(plain_config), batches)[2]
        assert torch.equal(found[True]["head.weight"], plain["head.weight"])
        assert not torch.equal(found[False]["head.weight"], plain["head.weight"])
        # The trunk has the gradient of all losses, and so has the embedding through it.
        for name in ("norm.weight", "layers.0.mlp.up.weight", "embedding.weight"):
            assert not torch.equal(found[True][name], plain[name]), name
        assert not torch.equal(found[True]["embedding.weight"], found[False]["embedding.weight"])
        close.assert_close(
            *({n: g for n, g in each.items() if "layers.3." in n} for each in (found[True], found[False]))
        )


@pytest.mark.slow
def test_detached_losses_in_a_layout() -> None:
    """The copies of a tied embedding too."""
    check_on_ranks(Layout(replace(OTHER, mtp_detach=True), pp=2, tp=2, micro_batch_size=3))


def test_the_factor_of_a_loss_is_a_ratio_of_whole_counts() -> None:
    """Fault loss-divided-once: of the step's target tokens and the loss's own."""
    config = ONE.config()
    state = make_state(config)
    (batch,) = micro_batches(config, state.ctx, 0)
    divisors = count_divisors(state, [batch], 12)
    own = batch.targets(2).weights_bs.sum()
    assert divisors.own["mtp_1"] == own
    assert batch.scope.factors["mtp_1"] == pytest.approx(0.05 * (batch.weights_bs.sum() / own).item())


# A run


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    """With the selection biases of the experts of these layers."""
    experts = replace(LATENTS.moe, balance="bias", scoring_func="sigmoid")
    config = replace(Layout(replace(LATENTS, moe=experts), micro_batch_size=6).config(), run_dir=str(tmp_path))
    ctx = make_context(config)
    state, _ = start(config, ctx, build_stages(config, ctx))
    train_step(state, micro_batches(config, ctx, 0))
    Saver(state, tmp_path).save(state)
    straight = train_step(state, micro_batches(config, ctx, 1))
    resumed, _ = start(config, ctx, build_stages(config, ctx))
    assert resumed.step == 1
    again = train_step(resumed, micro_batches(config, ctx, 1))
    assert (again.loss, again.losses) == (straight.loss, straight.losses)
    expected, found = weights_of(state), weights_of(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in found)
    assert torch.equal(again.tallies["expert"], straight.tallies["expert"])
    assert len(again.tallies["expert"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2, "zero_stage": 3}])
def test_adapters_reach_further_layers(sizes: Mapping[str, Any]) -> None:
    layout = Layout(MODEL, adapter=AdapterConfig(rank=4), micro_batch_size=3, **sizes)
    check_on_ranks(layout)
    assert "layers.3.attention.q.lora_a" in WholeModel(layout.config().model, layout.adapter).tensors()


@pytest.mark.slow
def test_frozen_layers_leave_further_ones_to_train() -> None:
    check_on_ranks(Layout(MODEL, trainable=("layers.2.*", "layers.3.*"), pp=2, tp=2, micro_batch_size=3))


# Counts and plans


def test_flops_are_those_of_a_layer_more_with_its_projection_and_a_second_head() -> None:
    model = Layout(replace(MODEL, num_nextn_predict_layers=1)).config().model
    length = 24
    with_one, without = WholeModel(model), WholeModel(replace(model, num_nextn_predict_layers=0))
    shapes = {name: piece.shape for name, piece in with_one.tensors().items()}
    layer = sum(math.prod(shape) for name, shape in shapes.items() if "layers.1." in name and len(shape) == 2)
    joined = 2 * model.hidden_size**2
    head = model.vocab_size * model.hidden_size
    attention = without.products_of_layers(length)[0]
    more = with_one.flops_per_token(length) - without.flops_per_token(length)
    assert more == 6 * (layer + joined + head) + 3 * attention
    assert mtp_cost(with_one, length) == layer + joined + head + 3 * model.hidden_size + attention / 2 + _biases(shapes)
    # The trunk and the main head have none of their own if the further layers alone are trained.
    alone = with_one.flops_per_token(length, ("layers.2.*",))
    frozen = without.flops_per_token(length, ("nothing",))
    assert alone == frozen + 4 * head + 6 * (layer + joined) + 3 * attention
    detached = WholeModel(replace(model, mtp_detach=True)).flops_per_token(length)
    assert with_one.flops_per_token(length) - detached == 2 * head


def _biases(shapes: Mapping[str, Any]) -> int:
    return sum(shape[0] for name, shape in shapes.items() if "layers.1." in name and len(shape) == 1)


def test_balanced_stages_leave_the_last_one_room_for_further_layers() -> None:
    wide = replace(MODEL, num_hidden_layers=8)
    sizes = {}
    for depths in (0, 2):
        config = Layout(replace(wide, num_nextn_predict_layers=depths), pp=2).config()
        sizes[depths] = [len(layers) for layers in stage_layers(config)]
    assert sizes[0] == [4, 4]
    assert sizes[2] == [6, 2]


def test_a_plan_tells_the_share_of_further_layers() -> None:
    config = with_planned_kernels(Layout(MODEL, pp=2).config())
    machine = hardware.load("h100-80g")
    (line,) = explain.mtp_in_words(config, PARTS, machine, 1.0)
    assert line.startswith("2 layers of multi-token prediction, with the head: ")
    assert not [*explain.mtp_in_words(Layout(LLAMA).config(), PARTS, machine, 1.0)]


# Refusals


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({"family": "llama"}, {}, "model.num_nextn_predict_layers=2, model.family=llama: the family has no layers of"),
        ({"num_nextn_predict_layers": 0, "mtp_loss_weight": 0.3}, {}, "model.mtp_loss_weight=0.3"),
        ({"num_nextn_predict_layers": 0, "mtp_detach": True}, {}, "model.mtp_detach=true"),
        ({}, {"objective": "dpo"}, "pairs of answers have no targets further ahead; use 0"),
        ({"head": "score"}, {}, "share a head of tokens"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(model: Any, options: Any, words: str) -> None:
    config = with_train(Config(model=replace(MODEL, **model)), **options)
    with pytest.raises(ConfigError) as caught:
        validate(config, 1)
    assert words in str(caught.value)


def test_experts_of_these_layers_alone_are_declared() -> None:
    """With dense layers before them: their router's loss and their tally of tokens."""
    moe = replace(LATENT.moe, first_k_dense_replace=2)
    model = replace(LATENT, num_hidden_layers=2, num_nextn_predict_layers=1, moe=moe)
    declared = find(model.family).stage.declared(model)
    assert [loss.name for loss in declared.losses] == ["router", "mtp_1"]
    assert declared.tallies == {"expert": (3, moe.num_experts)}


def test_further_targets_cross_the_pipe_of_a_data_worker_as_arrays() -> None:
    """A tensor would take a file descriptor, and for each micro-batch that is read ahead."""
    batch = micro_batches(Layout(MODEL, micro_batch_size=3).config(), context.single(), 0)[0]
    values = delivery._values(batch)
    assert batch.later_targets
    assert not any(isinstance(x, Tensor) for targets in values["later_targets"] for x in targets)
    found = delivery._batch(pickle.loads(pickle.dumps(values)))
    for theirs, ours in zip(found.later_targets, batch.later_targets, strict=True):
        assert torch.equal(theirs.tokens_bs, ours.tokens_bs)
        assert torch.equal(theirs.weights_bs, ours.weights_bs)


def test_a_loss_that_trains_nothing_is_still_reported() -> None:
    """With frozen parameters before it no backward pass comes there."""
    scope = StepScope(torch.ones(()), loss_sums={"mtp_1": torch.zeros((), dtype=torch.float64)})
    batch = replace(micro_batches(Layout(MODEL).config(), context.single(), 0)[0], scope=scope)
    add_loss(torch.ones(3), torch.tensor(5.0), batch, "mtp_1")
    assert scope.loss_sums is not None
    assert scope.loss_sums["mtp_1"] == 5.0


@pytest.mark.parametrize("number", [-1, 65])
def test_a_number_of_layers_that_no_model_has_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_nextn_predict_layers"):
        validate(Config(model=replace(MODEL, num_nextn_predict_layers=number)), 1)
