"""A mixer outside the tree whose memory is a state: it trains in every layout, generates, and has its cost in plans."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megapar_models.counts import WholeModel
from megapar_models.factory import Factory
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.forward import ForwardContext
from megapar_models.generation import Sampling, generate, next_logits, why_no_cache
from megapar_models.heads import deal_heads
from megapar_models.layer_kind import LayerKind, MixerRule
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.context_parallel.states import begins_sb, incoming_states, runs_of
from megapar.declare import context
from megapar.tensor_parallel.layers import Columns
from tests.support import grid, tiny_models
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process


class Fading(nn.Module):
    """S_t = d_t S_{t-1} + v_t, by channel; d_t and v_t are projections of the token. Its output is a projection of S_t.

    The scan is sequential: a toy.
    """

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name, width = f"layers.{number}.attention", model.num_attention_heads * model.head_dim
        self.cp, tp = factory.sharding.cp, factory.sharding.tp
        self.width = len(deal_heads(model.num_attention_heads, model.num_attention_heads, tp).kv_heads) * model.head_dim
        columns = [Columns.even(f"{name}.{matrix}", width, tp) for matrix in ("decay", "v")]
        self.decay_and_v = factory.column_parallel(model.hidden_size, columns)
        self.out = factory.row_parallel(f"{name}.o", width, model.hidden_size)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        decay_sbw, v_sbw = self.decay_and_v(x_sbh).float().chunk(2, dim=-1)
        decay_sbw = decay_sbw.sigmoid().masked_fill(begins_sb(context.batch)[..., None], 0.0)
        runs = [scan(*run) for run in zip(runs_of(decay_sbw, self.cp), runs_of(v_sbw, self.cp), strict=True)]
        maps, states = (torch.stack([run[which][-1] for run in runs]) for which in (0, 1))
        incoming = incoming_states(maps, states, self.cp)
        s_sbw = torch.cat([states + maps * before for (maps, states), before in zip(runs, incoming, strict=True)])
        return self.out(s_sbw.to(x_sbh.dtype))

    def flops_per_token(self, seq_length: int) -> int:
        return 2 * self.width

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        return CachedFading(self, first_b)


def scan(decay_sbw: Tensor, v_sbw: Tensor) -> tuple[Tensor, Tensor]:
    """Return, at each position, the product of the decays so far, and the state of a run that begins with nothing."""
    maps, states = [decay_sbw[0]], [v_sbw[0]]
    for decay_bw, v_bw in zip(decay_sbw[1:], v_sbw[1:], strict=True):
        maps.append(decay_bw * maps[-1])
        states.append(decay_bw * states[-1] + v_bw)
    return torch.stack(maps), torch.stack(states)


class CachedFading(nn.Module):
    """`Fading` over the columns so far. What fills a row in front of its prompt changes no state."""

    def __init__(self, mixer: Fading, first_b: Tensor):
        super().__init__()
        self.mixer, self.first_b = mixer, first_b
        self.state_bw: Tensor | float = 0.0
        self.column = 0

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        decay_sbw, v_sbw = self.mixer.decay_and_v(x_sbh).float().chunk(2, dim=-1)
        found = []
        for decay_bw, v_bw in zip(decay_sbw.sigmoid(), v_sbw, strict=True):
            inside_b1 = (self.column >= self.first_b)[:, None]
            self.state_bw = torch.where(inside_b1, decay_bw * self.state_bw + v_bw, torch.zeros_like(v_bw))
            self.column += 1
            found.append(self.state_bw)
        return self.mixer.out(torch.stack(found).to(x_sbh.dtype))


@dataclass(frozen=True)
class FadingRule(MixerRule):
    OVER_CP = True

    def make(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module:
        return Fading(number, kind, model, factory)


class FadingStage(LlamaStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, mixer=FadingRule(), rotary=None, qk_norm=False) if number % 2 else kind


FAMILY = replace(LLAMA_FAMILY, name="fading", stage=FadingStage)
MODEL = replace(grid.LLAMA, family=f"{__name__}:FAMILY", num_key_value_heads=4, attention_bias=False)
FURTHER: dict[str, dict[str, Any]] = {
    "cp 2, ring": {"cp": 2, "cp_attention": "ring"},
    "cp 2 and tp 2, sequence parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp 3": {"cp": 3},
    "cp 2, full recomputation, zero bubble": {"cp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
}


@in_each_layout
@pytest.mark.parametrize("packed", [False, True], ids=["samples", "documents"])
def test_it_trains_as_one_process(sizes: dict[str, object], packed: bool) -> None:
    trains_as_one_process(MODEL, {**sizes, "packed": packed})


@pytest.mark.parametrize("sizes", slow_but([0], FURTHER.values()), ids=list(FURTHER))
def test_states_pass_over_the_ranks_of_a_sample(sizes: dict[str, object]) -> None:
    """On samples of several documents: ranks' chunks end inside of some of them."""
    trains_as_one_process(MODEL, {**sizes, "packed": True})


class ForgetfulStage(LlamaStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, mixer=f"{__name__}:Fading", rotary=None, qk_norm=False)


FORGETFUL = replace(LLAMA_FAMILY, name="forgetful", stage=ForgetfulStage)


def test_a_mixer_that_forgets_other_ranks_is_refused() -> None:
    """Fault mixer-over-cp: each rank would train on its part of a sample alone."""
    model = replace(MODEL, family=f"{__name__}:FORGETFUL")
    grid.Layout(model, tp=2).config()
    with pytest.raises(ConfigError, match=r"parallel\.cp=2, .*Fading does not declare OVER_CP"):
        grid.Layout(model, cp=2).config()


def test_a_document_begins_with_nothing() -> None:
    """Behind another one in its sample it has the hidden states that it has alone."""
    config = tiny_models.config(MODEL)
    stage = tiny_models.build(config, context.single())
    batch = tiny_models.batch(config.model, samples=1, length=24)
    alone = replace(batch, tokens_bs=batch.tokens_bs[:, 10:], positions_s=batch.positions_s[:14], sample_length=14)
    together = replace(batch, starts=torch.tensor([0, 10, 24]))
    behind = stage.hidden_states(None, together)[10:]
    torch.testing.assert_close(behind, stage.hidden_states(None, alone), rtol=1e-5, atol=1e-5)


def test_maps_may_be_matrices() -> None:
    """On one rank, whose only run has the whole sample behind nothing."""
    maps, states = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 2)
    assert not incoming_states(maps, states, context.single().cp, torch.matmul).any()


def test_it_generates_with_its_state_as_a_cache() -> None:
    """Prompts of unequal lengths; without a cache the whole rows are computed again for each token."""
    config = tiny_models.config(MODEL)
    stage = tiny_models.build(config, context.single())
    prompts = [[5, 3, 8], [7, 2, 2, 9, 4, 1]]
    assert not why_no_cache(stage, prompts, 6)
    rows = generate(stage, prompts, 6, -1, Sampling(temperature=0.0))
    for row, prompt in zip(rows, prompts, strict=True):
        for end in range(len(prompt), len(row)):
            assert row[end] == next_logits(stage, [row[:end]])[0].argmax()


def test_plans_count_its_flops() -> None:
    model = tiny_models.config(MODEL).model
    assert WholeModel(model).products_of_layers(grid.LENGTH)[1] == 2 * model.num_attention_heads * model.head_dim
