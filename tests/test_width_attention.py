"""A family outside megapar with keys of 12 columns a head and values of 8, as in multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434)."""

from dataclasses import replace

import pytest
from megapar_kernels.rope import rotate_qk
from megapar_models.counts import WholeModel
from megapar_models.factory import Factory
from megapar_models.families.llama import LlamaStage
from megapar_models.family import Family
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.tensor_parallel.layers import Columns
from tests.support.grid import LENGTH, LLAMA
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process

WIDTHS = {"q": 12, "k": 12, "v": 8}


class UnlikeAttention(nn.Module):
    OVER_CP = True
    READS = frozenset({"rotary"})

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name = f"layers.{number}.attention"
        tp = factory.sharding.tp
        heads = model.num_attention_heads
        columns = [Columns.even(f"{name}.{x}", heads * width, tp) for x, width in WIDTHS.items()]
        self.qkv = factory.column_parallel(model.hidden_size, columns)
        self.out = factory.row_parallel(f"{name}.o", heads * WIDTHS["v"], model.hidden_size)
        self.heads = heads // tp.size
        self.attend = factory.core_attention(range(self.heads), WIDTHS["k"], WIDTHS["v"])
        self.rotary = kind.rotary

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        parts = self.qkv(x_sbh).split([self.heads * width for width in WIDTHS.values()], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        q, k = rotate_qk(q, k, *context.rotary[self.rotary])  # type: ignore[index]
        return self.out(self.attend(q, k, v, context.batch, None))


class UnlikeStage(LlamaStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mixer=f"{__name__}:UnlikeAttention")


FAMILY = Family(name="unlike", stage=UnlikeStage, activations=("silu",))
EQUAL = replace(LLAMA, num_key_value_heads=4, head_dim=12, attention_bias=False, qk_norm=False)
MODEL = replace(EQUAL, family="tests.test_width_attention:FAMILY")


@in_each_layout
def test_it_trains_as_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)


@pytest.mark.parametrize("form", slow_but([0], ["ring", "ulysses"]))
def test_it_trains_in_each_form_of_context_parallelism(form: str) -> None:
    trains_as_one_process(MODEL, {"cp": 2, "cp_attention": form})


def test_its_flops_are_those_of_its_widths() -> None:
    """The weights of v and of the output have 4 columns less a head, and so has one of the two products of scores."""
    columns = 4 * MODEL.num_attention_heads * MODEL.num_hidden_layers
    less = WholeModel(EQUAL).flops_per_token(LENGTH) - WholeModel(MODEL).flops_per_token(LENGTH)
    assert less == 3 * columns * (2 * 2 * MODEL.hidden_size + LENGTH)
    short, long = (WholeModel(MODEL).layer_costs(length)[0] for length in (LENGTH, 2 * LENGTH))
    assert long - short == LENGTH * MODEL.num_attention_heads * (12 + 8) / 2
