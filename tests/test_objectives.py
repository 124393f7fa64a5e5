"""Objectives beside the cross entropy: a user's own, and those of preferences, in every layout as in one process."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megapar_models.objectives import Losses, Objective, Scored
from megapar_models.registry import validate
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config, DataConfig, TrainConfig
from megapar.declare.batch import MicroBatch
from megapar.step.evaluation import evaluate
from megapar.step.state import TrainState
from megapar.step.step import train_step
from tests.support import reference_models
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    SIGMOID,
    Layout,
    check_on_ranks,
    make_state,
    micro_batches,
    name,
)
from tests.support.sweeps import slow_but


def _unlikelihood(scored: Scored, train: TrainConfig) -> Losses:
    """-log(1 - p) of every target, with the mean of p beside it."""
    p_sb = scored.values_sb.exp() * 0.9
    return Losses(-torch.log1p(-p_sb) * scored.weights_sb, {"probability": p_sb * scored.weights_sb})


OWN = Objective(_unlikelihood, metrics=("probability",))


def _smallest(scored: Scored, train: TrainConfig) -> Losses:
    """The smaller one of each pair's sums of log-probabilities, squared."""
    return Losses(scored.sums(scored.values_sb * scored.weights_sb).amin(dim=1).square())


OWN_OF_PAIRS = Objective(_smallest, "pairs")
# Vocabularies with mean margins that are not near 0: rounding would be large beside them.
OF_PAIRS = replace(LLAMA, vocab_size=159)
REWARD = replace(LLAMA, head="score", vocab_size=127)
GPT_REWARD = replace(GPT, head="score", vocab_size=127, tie_word_embeddings=False)


def _product(scored: Scored, train: TrainConfig) -> Losses:
    """Of log-probabilities and references: DPO's differences of both would have the rounding of the sums."""
    assert scored.batch.references_bd is not None
    return Losses((scored.of_answers() * scored.batch.references_bd).sum(dim=1) / 500)


OWN_REFERENCED = Objective(_product, "pairs", needs_references=True, options=("train.references",))


# Layouts, and the formulas of TRL


LAYOUTS = [
    Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=3, objective=f"{__name__}:OWN"),
    Layout(LLAMA, cp=2, objective=f"{__name__}:OWN_OF_PAIRS"),
    Layout(LLAMA, pp=2, loss_chunk=5, objective=f"{__name__}:OWN"),
    Layout(LLAMA, cp=2, dp=2, objective=f"{__name__}:OWN"),
    Layout(LLAMA, tp=2, pp=2, objective=f"{__name__}:OWN_OF_PAIRS"),
    Layout(OF_PAIRS, pp=2, schedule="zb-h1", micro_batch_size=3, objective="dpo_norm"),
    Layout(DENSE_BETWEEN, cp=2, cp_attention="ring", micro_batch_size=3, objective="dpo"),
    Layout(OF_PAIRS, tp=2, sequence_parallel=True, recompute="full", loss_chunk=7, objective="ipo"),
    Layout(OF_PAIRS, cp=2, cp_attention="gather", dp=2, objective="dpo"),
    Layout(OF_PAIRS, cp=2, cp_attention="ulysses", zero_stage=3, objective="dpo"),
    Layout(OF_PAIRS, dp=2, zero_stage=1, objective="dpo"),
    Layout(OF_PAIRS, dp=2, zero_stage=3, objective="dpo"),
    Layout(OF_PAIRS, tp=2, pp=2, sequence_parallel=True, recompute="selective", objective="dpo"),
    Layout(OF_PAIRS, pp=2, vpp=2, schedule="zb-v", loss_chunk=7, objective="dpo"),
    Layout(DENSE_BETWEEN, dp=2, ep=2, objective="dpo"),
    Layout(REWARD, tp=2, sequence_parallel=True, objective="reward"),
    Layout(REWARD, cp=2, dp=2, micro_batch_size=3, objective="reward"),
    Layout(REWARD, pp=2, micro_batch_size=3, objective="reward"),
    Layout(REWARD, dp=2, zero_stage=1, objective="reward"),
    Layout(REWARD, dp=2, zero_stage=2, objective="reward"),
    Layout(REWARD, dp=2, zero_stage=3, objective="reward"),
    Layout(REWARD, tp=2, pp=2, schedule="zb-h1", objective="reward"),
    Layout(REWARD, cp=2, tp=2, cp_attention="ring", sequence_parallel=True, objective="reward"),
    Layout(GPT_REWARD, tp=2, pp=2, sequence_parallel=True, recompute="full", objective="reward"),
]


@pytest.mark.parametrize("layout", slow_but([0, 6, 16], LAYOUTS), ids=name)
def test_objectives_train_in_every_layout_as_in_one_process(layout: Layout) -> None:
    check_on_ranks(layout)


# References by adapters turned off


ADAPTED = AdapterConfig(rank=3, alpha=7.0)
DROPPED = replace(ADAPTED, dropout=0.25)
OFF: dict[str, Any] = {"objective": "dpo", "references": "adapters_off"}
PRODUCT: dict[str, Any] = {**OFF, "objective": f"{__name__}:OWN_REFERENCED"}
REFERENCED = [
    Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=3, adapter=DROPPED, **PRODUCT),
    Layout(LLAMA, pp=2, vpp=2, schedule="zb-v", micro_batch_size=3, adapter=ADAPTED, **PRODUCT),
    Layout(LLAMA, cp=2, dp=2, adapter=replace(ADAPTED, dora=True), zero_stage=3, **PRODUCT),
    Layout(LLAMA, pp=2, adapter=ADAPTED, **PRODUCT),
    Layout(DENSE_BETWEEN, dp=2, ep=2, adapter=ADAPTED, **PRODUCT),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved", recompute="full", adapter=DROPPED, **PRODUCT),
    Layout(LLAMA, tp=2, dp=2, sequence_parallel=True, zero_stage=2, loss_chunk=7, adapter=ADAPTED, **PRODUCT),
    Layout(LLAMA, cp=2, cp_attention="ring", pp=2, schedule="zb-h1", adapter=ADAPTED, **PRODUCT),
]


@pytest.mark.parametrize("layout", slow_but([1], REFERENCED), ids=name)
def test_references_of_adapters_turned_off_are_the_same_in_every_layout(layout: Layout) -> None:
    check_on_ranks(layout)


@pytest.mark.parametrize(
    ("model", "adapter"),
    [(LLAMA, DROPPED), (LLAMA, replace(ADAPTED, dora=True)), (DENSE_BETWEEN, ADAPTED)],
    ids=["dropout", "dora", "experts"],
)
def test_three_sources_of_references_agree(model: ModelConfig, adapter: AdapterConfig) -> None:
    """A column given beforehand, a second model with the weights of the base, and adapters turned off: the loss, every
    gradient and every tally."""
    off = Layout(model, micro_batch_size=6, zero_stage=0, adapter=adapter, **OFF)
    stored = replace(off, references="stored")
    second = make_state(replace(stored, adapter=AdapterConfig()).config())
    shown = {}
    for layout in (off, stored):
        state = make_state(layout.config())
        base = {key: x for key, x in logical.assemble([logical.held_weights(state)]).items() if ".lora_" not in key}
        logical.fill(second.stages.values(), base)
        batches = micro_batches(layout.config(), state.ctx, 0)
        if layout is stored:
            batches = [replace(batch, references_bd=_by(second, batch)) for batch in batches]
        result = train_step(state, batches)
        evaluated = evaluate(state, batches)
        shown[layout] = result, logical.assemble([logical.held_gradients(state)]), evaluated
        assert all(stage.training for stage in state.stages.values())
    (result, gradients, evaluated), (expected, expected_gradients, expected_evaluation) = shown.values()
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert {key: x.tolist() for key, x in result.tallies.items()} == {
        key: x.tolist() for key, x in expected.tallies.items()
    }
    assert evaluated == pytest.approx(expected_evaluation, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-4, atol=1e-6 * gradient.abs().max())


@torch.no_grad()
def _by(model: TrainState, batch: MicroBatch) -> Tensor:
    """The log-probabilities of both answers by a model without adapters, from its logits, [b, 2]."""
    (stage,) = model.stages.values()
    stage.eval()
    logits_sbv = stage.logits(stage.hidden_states(None, batch))[..., : model.config.model.vocab_size]
    values_bs = logits_sbv.log_softmax(-1).gather(-1, batch.targets_bs.t()[..., None])[..., 0].t() * batch.weights_bs
    numbers_bs = batch.documents_in_samples_bs()
    return torch.stack([(values_bs * (numbers_bs == n)).sum(1) for n in (0, 1)], dim=1)


def _trl(kind: str, log_ratios_b2: Tensor, lengths_b2: Tensor, beta: float, smoothing: float) -> Tensor:
    """The losses [b] of TRL 1.16, trl/trainer/dpo_trainer.py, for its loss_type `kind`."""
    chosen, rejected = log_ratios_b2.unbind(1)
    if kind in ("ipo", "sigmoid_norm"):
        chosen = chosen / lengths_b2[:, 0].clamp(min=1.0)
        rejected = rejected / lengths_b2[:, 1].clamp(min=1.0)
    delta = chosen - rejected
    if kind == "ipo":
        return (delta - 1 / (2 * beta)) ** 2
    if kind == "robust":
        clean = -(1 - smoothing) * F.logsigmoid(beta * delta)
        flipped = -smoothing * F.logsigmoid(-beta * delta)
        return (clean - flipped) / (1 - 2 * smoothing)
    return -F.logsigmoid(beta * delta)


@pytest.mark.parametrize(
    ("objective", "kind", "smoothing"),
    [("dpo", "sigmoid", 0.0), ("dpo", "robust", 0.1), ("dpo_norm", "sigmoid_norm", 0.0), ("ipo", "ipo", 0.0)],
)
def test_losses_and_gradients_of_preferences_are_those_of_trl(objective: str, kind: str, smoothing: float) -> None:
    """In fp64 over the logits of the plain model, documents by themselves; metrics as TRL logs them (fault
    preferences-unlike-trl)."""
    config = Layout(LLAMA, micro_batch_size=12, zero_stage=0, objective=objective).config()
    config = replace(config, train=replace(config.train, beta=0.7, label_smoothing=smoothing))
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=0.0))
    state = make_state(config)
    (batch,) = micro_batches(config, state.ctx, 0)
    tensors = logical.assemble([logical.held_weights(state)])
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    references = batch.references_bd.double()
    rows = range(batch.size)
    sums = torch.stack([_sum(config.model, leaves, batch, row, n) for row in rows for n in (0, 1)]).view(-1, 2)
    answer_weights = [[_answer(batch, row, n)[1].sum() for n in (0, 1)] for row in rows]
    losses = _trl(kind, sums - references, torch.tensor(answer_weights), 0.7, smoothing)
    losses.mean().backward()

    result = train_step(state, [batch])

    assert result.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    rewards = 0.7 * (sums - references).detach()
    margins = rewards[:, 0] - rewards[:, 1]
    expected = {"reward_chosen": rewards[:, 0].mean(), "reward_margin": margins.mean()}
    expected["accuracy"] = (margins > 0).double().mean()
    assert result.losses == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4)
    assert 0 < result.losses["accuracy"] < 1
    gradients = logical.assemble([logical.held_gradients(state)])
    assert gradients.keys() == leaves.keys()
    for key, leaf in leaves.items():
        torch.testing.assert_close(gradients[key].double(), leaf.grad, rtol=1e-4, atol=1e-5 * leaf.grad.abs().max())


def _answer(batch: MicroBatch, row: int, number: int) -> tuple[slice, Tensor]:
    """The positions of a document in its sample, and the weights of its targets."""
    firsts = batch.starts[3 * row : 3 * row + 3] - row * batch.sample_length
    inside = slice(int(firsts[number]), int(firsts[number + 1]))
    return inside, batch.weights_bs[row, inside].double()


def _sum(model: ModelConfig, leaves: dict[str, Tensor], batch: MicroBatch, row: int, number: int) -> Tensor:
    """The log-probability of an answer by the plain model, which sees its document alone."""
    inside, weights = _answer(batch, row, number)
    logits = reference_models.logits(model, leaves, batch.tokens_bs[row : row + 1, inside])[0]
    log_probs = logits.log_softmax(-1).gather(-1, batch.targets_bs[row, inside][:, None])[:, 0]
    return (log_probs * weights).sum()


def test_losses_that_stages_add_are_divided_by_tokens_beside_any_objective() -> None:
    """The router's part of the gradients, and its reported value: those beside the cross entropy."""
    model = replace(DENSE_BETWEEN, moe=replace(DENSE_BETWEEN.moe, router_aux_loss_coef=5.0, balance="sequence"))
    plain = replace(model, moe=replace(model.moe, router_aux_loss_coef=0.001, router_z_loss_coef=0.0, balance="none"))
    parts, values = {}, {}
    for objective in ("cross_entropy", "dpo"):
        gradients = []
        for each in (model, plain):
            state = make_state(Layout(each, micro_batch_size=12, zero_stage=0, objective=objective).config())
            optimizer = replace(state.config.optimizer, clip_grad=0.0)
            state = replace(state, config=replace(state.config, optimizer=optimizer))
            pairs = Layout(each, micro_batch_size=12, objective="dpo").config()
            result = train_step(state, micro_batches(pairs, state.ctx, 0))
            gradients.append(logical.assemble([logical.held_gradients(state)]))
            values.setdefault(objective, result.losses.get("router"))
        parts[objective] = gradients[0]["layers.0.mlp.router.weight"] - gradients[1]["layers.0.mlp.router.weight"]
    assert values["dpo"] == pytest.approx(values["cross_entropy"], rel=1e-6)
    assert parts["dpo"].norm() > 1e-4
    torch.testing.assert_close(parts["dpo"], parts["cross_entropy"], rtol=1e-3, atol=1e-3 * parts["dpo"].abs().max())


# Refusals


@pytest.mark.parametrize(
    ("train", "apart", "words"),
    [
        ({"objective": "dpo"}, False, "documents apart"),
        (
            {"objective": "dpo", "z_loss": 1e-4},
            True,
            "train.z_loss=0.0001, train.objective=dpo: the objective does not",
        ),
        ({"beta": 0.2}, True, "objective dpo or dpo_norm or ipo"),
        ({"objective": "ipo", "label_smoothing": 0.1}, True, "objective dpo"),
        ({"objective": "dpo", "label_smoothing": 0.5}, True, "less than 0.5"),
        ({"objective": "dpo", "beta": 0.0}, True, "must be above 0"),
        (
            {"objective": "reward"},
            True,
            "the objective is of a head score; use that, or objective cross_entropy or dpo",
        ),
        ({"references": "adapters_off"}, True, "objective dpo or dpo_norm or ipo"),
        ({"objective": "dpo", "references": "adapters_off"}, True, "no adapters to turn off; use stored, or set"),
        ({"objective": "dop"}, True, "unknown; there are cross_entropy, dpo"),
        ({"objective": "tests.support.grid:LLAMA"}, True, "not a megapar_models.objectives.Objective"),
    ],
)
def test_what_does_not_fit_an_objective_is_refused(train: dict[str, Any], apart: bool, words: str) -> None:
    config = Config(model=LLAMA, train=TrainConfig(**train, global_batch_size=12, seq_length=24))
    config = replace(config, data=DataConfig(documents="apart" if apart else "joined"))
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        validate(config, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "trainable", "words"),
    [
        (LLAMA, ("*.lora_*", "*norm*"), "the base is trained too, and is no reference; use stored"),
        (SIGMOID, (), "the selection bias of the base moves, and is no reference"),
    ],
)
def test_a_base_that_changes_is_refused_as_a_reference(
    model: ModelConfig, trainable: tuple[str, ...], words: str
) -> None:
    layout = Layout(model, adapter=ADAPTED, trainable=trainable, **OFF)
    with pytest.raises(ConfigError, match=re.escape(words)):
        layout.config()
