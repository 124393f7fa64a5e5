"""A family outside the tree whose layers share the keys that one of them has chosen, as a sparse indexer's.

Layers 1 and 5 choose `CHOSEN` keys for each query, by the products of their inputs, and hand the indices on. The layers
behind each of them attend to those keys alone. Indices are integers: nothing sends a gradient of them. Layer 0 attends
to all keys: in front of it equal tokens have equal products, and roundings would choose among them.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from einops import rearrange
from megapar_models import reference as plain
from megapar_models.factory import Factory
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.forward import ForwardContext
from megapar_models.handed import Handed
from megapar_models.layer_kind import LayerKind
from megapar_models.reference import Tensors
from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.context_parallel.deal import positions
from megapar.declare import context
from megapar.pipeline.schedules import SCHEDULES
from megapar.tensor_parallel.layers import Columns
from megapar.tensor_parallel.regions import gather_sequence
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import LLAMA, SAMPLES, Layout
from tests.support.sweeps import slow_but
from tests.support.width import sent_over_pp, trains_as_one_process

CHOSEN = 5
KEYS = Handed(name="keys", shape=(CHOSEN,), dtype=torch.int32)
WRITERS = (1, 5)


def of_all_ranks(x_s: Tensor, cp: Axis) -> Tensor:
    """All positions of the samples in order, from those of each context-parallel rank."""
    length = len(x_s) * cp.size
    order = torch.tensor([place for rank in range(cp.size) for place in positions(length, cp.size, rank)])
    return gather_sequence(x_s, cp)[order.argsort()]


class ChosenAttention(nn.Module):
    """Attention of each query to chosen keys. A layer that writes `keys` chooses them, the others read them."""

    OVER_CP = True

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name, self.head_dim = f"layers.{number}.attention", model.head_dim
        self.sharding, self.chooses = factory.sharding, bool(kind.writes)
        width = model.num_attention_heads * model.head_dim
        columns = [Columns.even(f"{name}.{letter}", width, factory.sharding.tp) for letter in "qkv"]
        self.qkv = factory.column_parallel(model.hidden_size, columns)
        self.out = factory.row_parallel(f"{name}.o", width, model.hidden_size)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        if self.chooses:
            context.handed["keys"] = self.choose(x_sbh.detach(), context)
        keys_bsk = context.handed["keys"].transpose(0, 1).long()
        q, k, v = self.qkv(x_sbh).chunk(3, dim=-1)
        q, k, v = (
            rearrange(y, "s b (n d) -> b n s d", d=self.head_dim) for y in (q, *map(self.from_all_ranks, (k, v)))
        )
        masked_bst = torch.ones(len(keys_bsk), *q.shape[2:3], *k.shape[2:3], dtype=torch.bool)
        masked_bst.scatter_(2, keys_bsk, False)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).masked_fill(masked_bst[:, None], -math.inf)
        return self.out(rearrange(scores.softmax(-1) @ v, "b n s d -> s b (n d)"))

    def from_all_ranks(self, x_sbc: Tensor) -> Tensor:
        return of_all_ranks(x_sbc, self.sharding.cp)

    def choose(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Return for each query of this context-parallel rank the positions of its keys, int32 [s, b, k]."""
        if self.sharding.splits_sequence:
            x_sbh = gather_sequence(x_sbh, self.sharding.tp)
        all_tbh, places_s = self.from_all_ranks(x_sbh), context.batch.positions_s
        scores_bst = torch.einsum("sbh,tbh->bst", x_sbh, all_tbh)
        later_st = torch.arange(len(all_tbh)) > places_s[:, None]
        best = scores_bst.masked_fill(later_st, -math.inf).topk(CHOSEN, dim=-1)
        # Where fewer keys are there, a query has itself several times.
        found_bsk = torch.where(best.values.isfinite(), best.indices, places_s[:, None])
        return found_bsk.transpose(0, 1).contiguous().int()


class ChosenStage(LlamaStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), rotary=None)
        if number == 0:
            return kind
        kind = replace(kind, mixer=f"{__name__}:ChosenAttention")
        return replace(kind, writes=(KEYS,)) if number in WRITERS else replace(kind, reads=("keys",))


FAMILY = replace(LLAMA_FAMILY, name="chosen", stage=ChosenStage)
MODEL = replace(
    LLAMA, family=f"{__name__}:FAMILY", num_key_value_heads=4, num_hidden_layers=7, attention_bias=False, qk_norm=False
)


def plain_logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """Logits in plain PyTorch, one query at a time."""
    x = tensors["embedding.weight"][tokens_bs]
    chosen = [[list(range(t + 1)) for t in range(len(row))] for row in x]
    for number in range(7):
        name = f"layers.{number}"
        normed = plain.rms_norm(model, tensors, f"{name}.attention_norm", x)
        if number in WRITERS:
            chosen = [
                [(row[: t + 1] @ row[t]).sort(descending=True).indices[:CHOSEN].tolist() for t in range(len(row))]
                for row in normed
            ]
        q, k, v = (plain.heads(model, tensors, f"{name}.attention.{letter}", normed) for letter in "qkv")
        rows = []
        for b, queries in enumerate(chosen):
            of_sample = []
            for t, keys in enumerate(queries):
                scores = (k[b, :, keys] * q[b, :, t, None]).sum(-1) / math.sqrt(model.head_dim)
                of_sample.append((scores.softmax(-1)[..., None] * v[b, :, keys]).sum(1).flatten())
            rows.append(torch.stack(of_sample))
        x = x + plain.linear(tensors, f"{name}.attention.o", torch.stack(rows))
        x = x + plain.mlp(model, tensors, f"{name}.mlp", plain.rms_norm(model, tensors, f"{name}.mlp_norm", x))
    return plain.rms_norm(model, tensors, "norm", x) @ tensors["head.weight"].t()


def test_layers_attend_to_the_keys_that_another_layer_has_chosen() -> None:
    config = tiny_models.config(MODEL)
    batch = tiny_models.batch(config.model, length=16)
    stage = tiny_models.build(config, context.single()).double()
    tensors = {name: x.double() for name, x in tiny_models.random_tensors(config.model).items()}
    found = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., : config.model.vocab_size]
    torch.testing.assert_close(found, plain_logits(config.model, tensors, batch.tokens_bs))


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2, cut between readers": {"pp": 2, "partition": (3, 4)},
    "pp 2 with vpp 2": {"pp": 2, "vpp": 2, "schedule": "interleaved", "partition": (2, 1, 3, 1)},
    "zero bubble": {"pp": 2, "vpp": 2, "schedule": "zb-v", "partition": (2, 1, 3, 1), "recompute": "full"},
    "zb-h1 with ZeRO-2": {"pp": 2, "schedule": "zb-h1", "partition": (6, 1), "dp": 2, "zero_stage": 2},
    "tp 2": {"tp": 2},
    "tp 2 with sp, recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "full", "every": 2},
    "cp 2 with ZeRO-3": {"cp": 2, "zero_stage": 3},
    "cp 2 and pp 2, offloaded": {"cp": 2, "pp": 2, "partition": (3, 4), "recompute": "full", "offload": 0.5},
}


@pytest.mark.parametrize("sizes", slow_but([0], LAYOUTS.values()), ids=list(LAYOUTS))
def test_layers_with_shared_indices_train_as_in_one_process(sizes: dict[str, Any]) -> None:
    trains_as_one_process(MODEL, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_with_shared_indices_train_as_in_one_process_in_every_schedule(schedule: str) -> None:
    sizes = {"pp": 2, "vpp": SCHEDULES[schedule].vpp.nearest_to(2), "schedule": schedule}
    trains_as_one_process(MODEL, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "crosses"), [((3, 4), True), ((5, 2), False)], ids=str)
def test_indices_cross_a_cut_in_front_of_a_reader_and_have_no_gradient(partition: Any, crosses: bool) -> None:
    """Layer 5 chooses anew, so in front of it no indices cross. What both cuts send besides is the same."""
    layout = Layout(MODEL, pp=2, partition=partition, micro_batch_size=3)
    forward, backward = run_ranks(2, sent_over_pp, layout.config())
    assert forward - backward == crosses * 4 * CHOSEN * SAMPLES * layout.length
    assert bool(ChosenStage.bundle(MODEL).at(partition[0])) == crosses
