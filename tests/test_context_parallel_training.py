"""Context parallelism from the options to the gradients: what is refused, read, masked, kept and summed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_kernels.dropout import keep_mask
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.forward import ForwardContext, hidden_keys
from megapar_models.layer_kind import LayerKind
from megapar_models.registry import validate
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_gradients, held_weights
from torch import Tensor, nn

from megapar.base.errors import ConfigError, DataError
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.context_parallel import deal
from megapar.context_parallel.dropout import AttentionDropout
from megapar.data.loader import Loader, Mixture
from megapar.data.samples import Treatment
from megapar.data.sources import SyntheticDataset
from megapar.declare import context
from megapar.declare.batch import MicroBatch, add_loss
from megapar.declare.sharding import Sharding
from megapar.declare.stage_set import AddedLoss, Declared
from megapar.observe.metrics import attention_load
from megapar.step.step import train_step
from tests.support import close
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LENGTH, LLAMA, ONE_KV_HEAD, Layout, bitwise, make_state, micro_batches
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

FOUR_KV_HEADS = replace(LLAMA, num_key_value_heads=4)
GPT_WITHOUT_DROPOUT = replace(GPT, hidden_dropout=0.0, attention_dropout=0.0)
FORMS = ("gather", "ring", "ulysses")


# Options


@pytest.mark.parametrize(
    ("layout", "messages"),
    [
        (
            Layout(LLAMA, cp=5),
            (
                "train.seq_length=24, parallel.cp=5: each cp rank holds two chunks of equal length",
                "must divide by 10; use 20 or 30",
            ),
        ),
        (
            Layout(LLAMA, cp=4, tp=4, sequence_parallel=True),
            (
                "train.seq_length=24, parallel.cp=4, parallel.tp=4, parallel.sequence_parallel=true: each cp rank",
                "must divide by 16; use 16 or 32",
            ),
        ),
        (
            Layout(LLAMA, cp=2, tp=4, cp_attention="ulysses"),
            (
                "parallel.cp_attention=ulysses, parallel.cp=2, parallel.tp=4, model.num_attention_heads=4: ulysses",
                "the 1 query head of a tp rank to cp ranks, and cp 2 does not divide them; use gather or ring",
            ),
        ),
        (
            Layout(LLAMA, cp_attention="ring"),
            ("parallel.cp_attention=ring, parallel.cp=1: with one cp rank", "set parallel.cp, or leave it at gather"),
        ),
    ],
    ids=["length", "sequence parallel", "ulysses", "no cp"],
)
def test_what_does_not_fit_is_refused_with_what_would(layout: Layout, messages: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        layout.config()
    (line,) = str(refused.value).splitlines()
    assert line.startswith(messages[0])
    assert line.endswith(messages[1])


def test_a_world_that_does_not_fit_is_refused() -> None:
    config = Layout(LLAMA, tp=2, cp=2).config()
    with pytest.raises(ConfigError, match=r"tp\(2\)\*cp\(2\)\*pp\(1\)=4 does not divide world size 6"):
        validate(replace(config, parallel=replace(config.parallel, dp=0)), 6)
    with pytest.raises(ConfigError, match=r"tp\(2\)\*cp\(2\)\*pp\(1\)\*dp\(3\)=12 is not world size 8; use 2"):
        validate(replace(config, parallel=replace(config.parallel, dp=3)), 8)


# Data


def test_ranks_read_samples_whole_and_keep_their_columns() -> None:
    """Fault cp-targets-cut-like-tokens: micro-batches of cp ranks, put together, are those of one rank."""
    source = SyntheticDataset(LENGTH, 100, seed=3)

    def loader(columns: list[int] | None, needs_tokens: bool = True) -> Loader:
        return Loader(
            Mixture([source], seed=3),
            batch_size=lambda _: 4,
            micro_batch_size=2,
            seq_length=LENGTH,
            columns=columns,
            needs_tokens=needs_tokens,
            treatment=Treatment(),
        )

    expected = loader(None).step_after(8)
    for rank in range(3):
        held = deal.positions(LENGTH, 3, rank)
        for needs_tokens in (True, False):
            for part, whole in zip(loader(held, needs_tokens).step_after(8), expected, strict=True):
                assert part.positions_s.tolist() == held
                assert part.sample_length == LENGTH
                assert torch.equal(part.sample_ids_b, whole.sample_ids_b)
                assert torch.equal(part.weights_bs, whole.weights_bs[:, held])
                if needs_tokens:
                    assert torch.equal(part.tokens_bs, whole.tokens_bs[:, held])
                    assert torch.equal(part.targets_bs, whole.targets_bs[:, held])


def test_the_load_of_attention_is_that_of_the_fullest_rank_of_each_micro_batch() -> None:
    """On cp 2 rank 0 has the positions 0 to 5 and 18 to 23. One document is even, and so are two of 12 tokens."""
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    whole = MicroBatch.of_samples(tokens, tokens, torch.ones(1, LENGTH), torch.tensor([0]))
    everywhere = torch.arange(LENGTH)
    assert attention_load([whole.columns(everywhere)], 2) is None
    halves = replace(whole, starts=torch.tensor([0, 12, 24])).columns(everywhere)
    assert attention_load([halves], 1) is None
    pairs = [6 * 7 // 2 + (7 + 12) * 3, (7 + 12) * 3 + 6 * 7 // 2]
    assert attention_load([halves], 2) == 2 * max(pairs) / sum(pairs) == 1.0
    # Six documents of one token, and one of 18: rank 0 has 6 pairs and the last 6 rows of a triangle.
    uneven = replace(whole, starts=torch.tensor([0, 1, 2, 3, 4, 5, 6, 24])).columns(everywhere)
    pairs = [6 + (13 + 18) * 3, 12 * 13 // 2]
    assert attention_load([uneven], 2) == pytest.approx(2 * max(pairs) / sum(pairs))
    assert attention_load([uneven, halves], 2) == pytest.approx(2 * (99 + 78) / (99 + 78 + 2 * 78))


# Dropout


def test_masks_are_those_of_whole_samples() -> None:
    """Fault dropout-masks-of-whole-model: of hidden states, also under sequence parallelism, and of attention."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    whole = MicroBatch.of_samples(tokens, tokens, torch.ones(2, LENGTH), torch.tensor([4, 9]))
    ctx = context.single()
    alone = Sharding(ctx.tp, ctx.grad, False, torch.float32, torch.device("cpu"))

    def hidden(batch: MicroBatch, sharding: Sharding) -> Tensor:
        keys = hidden_keys(ForwardContext(batch, seed=11), 7, sharding)
        return keep_mask(keys, 13, 0.5)

    def attention(batch: MicroBatch, keys: Tensor, rows: slice) -> Tensor:
        dropout = AttentionDropout(0.5, 11, 5, range(2, 4), batch.sample_ids_b, batch.positions_s)
        return dropout.of(keys, slice(1, 2), rows).keep()

    everywhere = torch.arange(LENGTH)
    for cp, rank in ((2, 0), (2, 1), (4, 2)):
        held = torch.tensor(deal.positions(LENGTH, cp, rank))
        part = whole.columns(held)
        assert torch.equal(hidden(part, alone), hidden(whole, alone)[held])
        tp = Axis("tp", 2, 1, (0, 1))
        of_second_tp_rank = replace(alone, tp=tp, sequence_parallel=True)
        assert torch.equal(hidden(part, of_second_tp_rank), hidden(whole, alone)[held[LENGTH // cp // 2 :]])
        expected = attention(whole, everywhere, slice(0, LENGTH))
        found = attention(part, held, slice(2, 5))
        assert torch.equal(found, expected[:, :, held[2:5]][:, :, :, held])


# Memory


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [FOUR_KV_HEADS, GPT_WITHOUT_DROPOUT], ids=["llama", "gpt"])
def test_activations_are_divided_by_cp(model: Any, form: Any) -> None:
    """Fault cp-option-ignored: by the plan, and its bytes equal those of real ranks (tests/test_dry_run.py)."""
    from megapar_tools.plan.memory import reports

    kept = {}
    for cp in (1, 2, 4):
        layout = Layout(model, cp=cp, cp_attention=form if cp > 1 else "gather", micro_batch_size=2)
        (one,) = reports(layout.config(), PARTS)
        kept[cp] = one.activations
    for cp in (2, 4):
        # One result of attention less is kept than without cp. Indices of heads and samples are not divided.
        assert 0.85 * kept[1] / cp < kept[cp] < kept[1] / cp + 1024


# Gradients

Change = Callable[[MicroBatch], MicroBatch]


def without_clipping(config: Config) -> Config:
    """Clipped gradients have the same norm whatever their scale."""
    return replace(config, optimizer=replace(config.optimizer, clip_grad=0.0))


def gradients_of_a_step(config: Config, change: Change) -> tuple[float, list[logical.Held]]:
    state = make_state(without_clipping(config))
    result = train_step(state, [change(batch) for batch in micro_batches(config, state.ctx, 0)])
    return result.loss, held_gradients(state)


def same_as_one_process(layout: Layout, change: Change) -> dict[str, Tensor]:
    """Compare loss and gradients of the layout with those of one process; returns the latter."""
    alone = replace(layout, cp=1, tp=1, cp_attention="gather", micro_batch_size=12)
    loss, gradients = gradients_of_a_step(alone.config(), change)
    expected = logical.assemble([gradients])
    ranks = run_ranks(layout.world, gradients_of_a_step, layout.config(), change)
    for found, _ in ranks:
        assert found == pytest.approx(loss, rel=1e-5)
    close.assert_close(logical.assemble([gradients for _, gradients in ranks]), expected)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    return expected


def only_first_rank_has_targets(batch: MicroBatch) -> MicroBatch:
    """Weights at the positions of rank 0 of cp 2 alone."""
    held = torch.tensor(deal.positions(LENGTH, 2, 0))
    return replace(batch, weights_bs=batch.weights_bs * torch.isin(batch.positions_s, held))


def targets_of_samples_on_one_rank_each(batch: MicroBatch) -> MicroBatch:
    """Even samples have targets at the positions of rank 0 of cp 2, odd ones at those of rank 1."""
    of_first = torch.isin(batch.positions_s, torch.tensor(deal.positions(LENGTH, 2, 0)))
    even = batch.sample_ids_b[:, None] % 2 == 0
    return replace(batch, weights_bs=batch.weights_bs * (of_first[None, :] == even))


@pytest.mark.parametrize("form", slow_but([1], FORMS))
def test_targets_on_one_rank_alone(form: Any) -> None:
    """Faults cp-loss-divided-twice, cp-rank-without-targets."""
    layout = Layout(ONE_KV_HEAD, cp=2, cp_attention=form, micro_batch_size=6)
    for change in (only_first_rank_has_targets, targets_of_samples_on_one_rank_each):
        same_as_one_process(layout, change)


def one_target(batch: MicroBatch) -> MicroBatch:
    """A weight at the first position of the first sample alone."""
    first = (batch.sample_ids_b[:, None] == 0) & (batch.positions_s == 0)
    return replace(batch, weights_bs=first.float())


def nothing(batch: MicroBatch) -> MicroBatch:
    return replace(batch, weights_bs=torch.zeros_like(batch.weights_bs))


def refused_step(config: Config) -> tuple[str, bool]:
    """The words that refuse a step without targets, and whether its weights are those of before."""
    state = make_state(config)
    before = logical.assemble([held_weights(state)])
    batches = [nothing(batch) for batch in micro_batches(config, state.ctx, 0)]
    with pytest.raises(DataError) as caught:
        train_step(state, batches)
    return str(caught.value), bitwise(logical.assemble([held_weights(state)]), before)


def test_a_step_without_targets_is_refused_and_changes_nothing() -> None:
    """Fault part-without-trained-tokens: on every rank, with the same words, and not as a NaN."""
    layout = Layout(ONE_KV_HEAD, cp=2, micro_batch_size=6)
    found = [refused_step(replace(layout, cp=1).config()), *run_ranks(2, refused_step, layout.config())]
    assert found == [found[0]] * 3
    assert found[0][0].startswith("step 1: no token of its samples is trained")
    assert found[0][1]


class _WithOwnLoss(nn.Module):
    """A layer with a loss beside the cross entropy: for each token, its position times the square of its sum."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x_sbh: Tensor, info: ForwardContext) -> Tensor:
        x_sbh = self.layer(x_sbh, info)
        loss = (x_sbh.sum(-1).square() * info.batch.positions_s[:, None]).sum()
        return add_loss(x_sbh, loss, info.batch, "own")


class OwnLossStage(LlamaStage):
    """Llama with a loss of the third layer."""

    @classmethod
    def declared(cls, model: ModelConfig) -> Declared:
        return Declared(losses=(AddedLoss("own"),))

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        layer = super().make_layer(number, kind)
        return _WithOwnLoss(layer) if number == 2 else layer


OWN_LOSS = replace(LLAMA_FAMILY, name="own loss", stage=OwnLossStage)


def gradients_of_own_loss(config: Config) -> list[logical.Held]:
    """Gradients of a loss of the third layer, beside the cross entropy of one token."""
    state = make_state(without_clipping(config))
    train_step(state, [one_target(batch) for batch in micro_batches(config, state.ctx, 0)])
    return held_gradients(state)


@pytest.mark.parametrize("cp", slow_but([1], [2, 4]))
def test_a_loss_beside_the_cross_entropy_has_the_same_weight(cp: int) -> None:
    """Fault cp-auxiliary-losses: its gradient with all but one token of the cross entropy masked."""
    model = replace(LLAMA, family=f"{__name__}:OWN_LOSS")
    layout = Layout(model, cp=cp, micro_batch_size=6)
    alone = gradients_of_own_loss(Layout(model, micro_batch_size=12).config())
    ranks = run_ranks(cp, gradients_of_own_loss, layout.config())
    expected = logical.assemble([alone])
    close.assert_close(logical.assemble(ranks), expected)
    assert expected["layers.0.attention.q.weight"].any()


def test_z_loss_has_the_same_weight() -> None:
    """Fault cp-auxiliary-losses: the gradient with it and without it differ by as much as in one process."""
    layout = Layout(LLAMA, cp=2, cp_attention="ring", micro_batch_size=6)
    found = {}
    for z_loss in (0.0, 0.1):
        configs = [one.config() for one in (Layout(LLAMA, micro_batch_size=12), layout)]
        alone, split = (replace(config, train=replace(config.train, z_loss=z_loss)) for config in configs)
        expected = logical.assemble([gradients_of_a_step(alone, lambda batch: batch)[1]])
        ranks = run_ranks(2, gradients_of_a_step, split, lambda batch: batch)
        found[z_loss] = expected, logical.assemble([gradients for _, gradients in ranks])
    alone_difference, split_difference = (
        {name: found[0.1][number][name] - found[0.0][number][name] for name in found[0.0][0]} for number in (0, 1)
    )
    close.assert_close(split_difference, alone_difference, rtol=1e-4)


def recompute_in_every_way(form: Any) -> list[tuple[float, Tensor]]:
    """Loss and flat gradient of this rank: nothing recomputed, attention alone, and whole layers."""
    model = replace(GPT, num_hidden_layers=2)
    found = []
    for mode in ("none", "selective", "full"):
        layout = Layout(model, cp=2, cp_attention=form, micro_batch_size=6, recompute=mode, zero_stage=0)
        state = make_state(without_clipping(layout.config()))
        result = train_step(state, micro_batches(state.config, state.ctx, 0, packed=True))
        found.append((result.loss, state.grads.flat.clone()))
    return found


@pytest.mark.parametrize("form", slow_but([1, 2], FORMS))
def test_recomputation_changes_no_bit(form: Any) -> None:
    """Fault recomputation-same-masks: what attention exchanges is exchanged again, and masks are drawn again."""
    for (loss, gradient), *others in run_ranks(2, recompute_in_every_way, form):
        assert gradient.any()
        for other_loss, other_gradient in others:
            assert other_loss == loss
            assert torch.equal(other_gradient, gradient)


# A long run


LONG = 50


def train_long(layout: Layout) -> tuple[list[float], list[logical.Held]]:
    """The loss of each of 50 steps over three batches in turns, and the weights after them."""
    config = layout.config()
    optimizer = replace(config.optimizer, lr=2e-3, eps=1e-8)
    config = replace(config, optimizer=optimizer, train=replace(config.train, steps=LONG))
    state = make_state(config)
    losses = []
    for step in range(LONG):
        losses.append(train_step(state, micro_batches(config, state.ctx, step % 3, layout.packed)).loss)
    return losses, logical.held(state.stages.values(), state.ctx)


@pytest.mark.slow
def test_fifty_steps_of_four_ranks_are_those_of_one() -> None:
    """Rounding adds up: 4e-7 in losses and 1.1e-5 in weights were measured. The loss falls from 5.1 to 1.7."""
    base = Layout(LLAMA, micro_batch_size=6, packed=True)
    losses, weights = train_long(base)
    assert losses[-1] < 0.4 * losses[0]
    for form in FORMS:
        ranks = run_ranks(4, train_long, replace(base, cp=4, cp_attention=form))
        for found, _ in ranks:
            assert found == pytest.approx(losses, rel=1e-5)
        close.assert_close(logical.assemble([held for _, held in ranks]), logical.assemble([weights]), 5e-5)
