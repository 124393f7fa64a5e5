"""A family outside megapar whose keys have 12 columns a head and whose values have 8, as in multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434)."""

from dataclasses import replace

import pytest
from megapar_kernels.rope import rotate_qk
from megapar_models.counts import WholeModel
from megapar_models.family import Family
from megapar_models.llama.model import LlamaLayer, LlamaStage
from megapar_models.stage import Blueprint, ForwardContext
from torch import Tensor, nn

from megapar.context_parallel.attention import CoreAttention
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear
from tests.support.grid import LENGTH, LLAMA
from tests.support.width import in_each_layout, trains_as_one_process

WIDTHS = {"q": 12, "k": 12, "v": 8}


class UnlikeAttention(nn.Module):
    def __init__(self, name: str, plan: Blueprint):
        super().__init__()
        sharding, heads, hidden = plan.sharding, plan.model.num_attention_heads, plan.model.hidden_size
        columns = [Columns.even(f"{name}.{x}", heads * width, sharding.tp) for x, width in WIDTHS.items()]
        self.qkv = ColumnParallelLinear(hidden, columns, sharding, init=plan.init, bias=False)
        self.out = RowParallelLinear(f"{name}.o", heads * 8, hidden, sharding, init=plan.output_init, bias=False)
        self.heads = heads // sharding.tp.size
        settings = plan.cp_attention, range(self.heads), plan.kernels, sharding.device
        self.attend = CoreAttention(sharding.cp, *settings, qk_width=12, v_width=8)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        parts = self.qkv(x_sbh).split([self.heads * width for width in WIDTHS.values()], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        q, k = rotate_qk(q, k, *context.rope)  # type: ignore[misc]
        return self.out(self.attend(q, k, v, context.batch, None))


class UnlikeStage(LlamaStage):
    def make_layer(self, number: int) -> nn.Module:
        layer = LlamaLayer(number, self.blueprint)
        layer.attention = UnlikeAttention(f"layers.{number}.attention", self.blueprint)  # type: ignore[assignment]
        return layer


FAMILY = Family(name="unlike", stage=UnlikeStage, activations=("silu",))
EQUAL = replace(LLAMA, num_key_value_heads=4, head_dim=12, attention_bias=False, qk_norm=False)
MODEL = replace(EQUAL, family="tests.test_width_attention:FAMILY")


@in_each_layout
def test_it_trains_as_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_it_trains_in_each_form_of_context_parallelism(form: str) -> None:
    trains_as_one_process(MODEL, {"cp": 2, "cp_attention": form})


def test_its_flops_are_those_of_its_widths() -> None:
    """The weights of v and of the output have 4 columns less a head, and so has one of the two products of scores."""
    columns = 4 * MODEL.num_attention_heads * MODEL.num_hidden_layers
    less = WholeModel(EQUAL).flops_per_token(LENGTH) - WholeModel(MODEL).flops_per_token(LENGTH)
    assert less == 3 * columns * (2 * 2 * MODEL.hidden_size + LENGTH)
    short, long = (WholeModel(MODEL).layer_costs(length)[0] for length in (LENGTH, 2 * LENGTH))
    assert long - short == LENGTH * MODEL.num_attention_heads * (12 + 8) / 2
