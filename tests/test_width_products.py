"""Products of a number format unknown to megapar, for the linear layers of a model. The head keeps its own.

Inputs and weights are rounded to e4m3 in blocks of eight columns, each with a power of two as its scale, as in
MXFP8 (OCP MX specification 1.0).
"""

import re
import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.comm.collectives import Pending
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig
from megapar.linear.function import LinearFunction, Local
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from tests.support import grid
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process

BLOCK = 8
SCALES = torch.float8_e8m0fnu


def pack(x: Tensor) -> Tensor:
    """uint8 [..., i + i/8]: the values of a row, and behind them the scales of its blocks. Of x [..., i]."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scales = torch.exp2(torch.floor(torch.log2(largest)) - 8)  # 256 is the largest power of two of e4m3
    values = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([values.flatten(-2).view(torch.uint8), scales.squeeze(-1).to(SCALES).view(torch.uint8)], -1)


def unpack(packed: Tensor) -> Tensor:
    """fp32 [..., i], from what `pack` returned."""
    values, scales = packed.split([packed.shape[-1] * BLOCK // (BLOCK + 1), packed.shape[-1] // (BLOCK + 1)], -1)
    blocks = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK))
    return (blocks * scales.contiguous().view(SCALES).float()[..., None]).flatten(-2)


@dataclass(frozen=True)
class Rounded(MatrixProducts):
    def convert_input(self, x: Tensor) -> Tensor:
        return pack(x)

    def convert_weight(self, weight: Tensor) -> Tensor:
        return unpack(pack(weight))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().forward(unpack(x), weight, bias)

    def weight_gradient(self, grad_2d: Tensor, x_2d: Tensor) -> Tensor:
        return super().weight_gradient(grad_2d, unpack(x_2d))


class WithArguments(MatrixProducts):
    def __init__(self, block: int) -> None:
        self.block = block


FORMAT = {"products": f"{__name__}:Rounded"}
# Blocks lie on one rank: tp 2 cuts 32 columns of heads, and 80 of the MLP.
# With this vocabulary no layout rounds an activation to another number of e4m3 than one process does.
MODEL = replace(grid.LLAMA, head_dim=8, intermediate_size=80, vocab_size=129)


# Updated weights differ between layouts in their last bits. One that lies in the middle between two numbers of e4m3 may
# be rounded to either, and they are 6 to 12 % apart: with tp 2 one of 72,576 is, and gradients of the second step then
# differ by 4e-3. So one process goes on with the weights of the ranks, and all else agrees to 1e-5 as in other tests.
FROM_EQUAL_WEIGHTS = {"follows": True}


@in_each_layout
def test_it_trains_as_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes | FORMAT | FROM_EQUAL_WEIGHTS)


SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
FURTHER = {
    "sequence parallel": SEQUENCE_PARALLEL,
    "in chunks": SEQUENCE_PARALLEL | {"tp_overlap_chunks": 2},
    "deferred weight gradients": {"pp": 2, "schedule": "zb-h1"},
}


@pytest.mark.parametrize("sizes", slow_but([0], FURTHER.values()), ids=list(FURTHER))
def test_converted_inputs_are_gathered_and_deferred(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes | FORMAT | FROM_EQUAL_WEIGHTS)


class Doubled(MatrixProducts):
    """Converts inputs and no gradients, without rounding. Factors of adapters get restored inputs."""

    def convert_input(self, x: Tensor) -> Tensor:
        return 2.0 * x.double()  # of another dtype, as a format's codes are

    def restore(self, converted: Tensor) -> Tensor:
        return (0.5 * converted).float()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().forward(self.restore(x), weight, bias)

    def weight_gradient(self, grad_2d: Tensor, x_2d: Tensor) -> Tensor:
        return super().weight_gradient(grad_2d, self.restore(x_2d))

    @property
    def plain(self) -> MatrixProducts:
        return TORCH_PRODUCTS


def test_factors_read_gradients_that_a_format_leaves_as_they_are() -> None:
    """`restore` is for what is converted alone, in chunks too."""
    sizes = {"tp": 2, "tp_overlap_chunks": 2, "products": f"{__name__}:Doubled"}
    trains_as_one_process(MODEL, sizes | {"adapter": AdapterConfig(rank=2)})


# The methods that follow from the five: the slices of chunks, groups of rows, sums with and without a main gradient.
DERIVED = {"products": grid.DERIVED_PRODUCTS}
FEW_EXPERTS = replace(grid.MIXTRAL, moe=replace(grid.MIXTRAL.moe, num_experts=3))
OF_DERIVED = {
    "mixture in chunks": (grid.MIXTRAL, {"tp": 2, "sequence_parallel": True, "tp_overlap_chunks": 2}),
    "experts apart": (grid.MIXTRAL, {"dp": 2, "ep": 2}),
    "a rank without experts": (FEW_EXPERTS, {"dp": 4, "ep": 4}),
    "deferred": (grid.LLAMA, {"pp": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize(("model", "sizes"), slow_but([0, 2], OF_DERIVED.values()), ids=list(OF_DERIVED))
def test_a_format_of_five_methods_has_the_others(model: ModelConfig, sizes: dict[str, object]) -> None:
    trains_as_one_process(model, sizes | DERIVED)


REFUSED = {
    "no_such_module:Format": "kernels.products=no_such_module:Format: cannot be imported",
    "megapar.linear.products:Tensor": "is no subclass of megapar.linear.products.MatrixProducts",
    f"{__name__}:WithArguments": "WithArguments: cannot be made without arguments (TypeError",
    "float8": "kernels.products=float8: unknown; there are torch, and MODULE:NAME names one of your own",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_format_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[name])):
        grid.Layout(grid.LLAMA, products=name).config()


def test_an_adapter_drops_no_converted_input() -> None:
    adapter = AdapterConfig(rank=2, dropout=0.1)
    with pytest.raises(ConfigError, match=r"adapter\.dropout=0\.1, kernels\.products=.*use dropout 0\.0"):
        grid.Layout(MODEL, **FORMAT, adapter=adapter).config()


@dataclass(frozen=True)
class Noted(Local):
    """A region noting the dtype and the bytes of its inputs."""

    seen: list[tuple[torch.dtype, int]] = field(default_factory=list)

    def enter(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, x.nbytes))
        return x

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        return self.enter(x), Pending()


def test_a_layer_sends_and_keeps_its_input_as_its_products_converted_it() -> None:
    """Nine bytes for eight elements, in forward and again in backward."""
    x = torch.randn(4, 3, 16, requires_grad=True)
    weight = torch.randn(8, 16, requires_grad=True)
    region = Noted()
    y = LinearFunction.apply(x, weight, None, region, Rounded())
    kept, _ = y.grad_fn.saved_tensors
    y.sum().backward()
    assert region.seen == [(torch.uint8, 4 * 3 * 18)] * 2
    assert kept.nbytes == 4 * 3 * 18
    torch.testing.assert_close(weight.grad, unpack(pack(x.detach())).sum((0, 1)).expand(8, 16))


@pytest.mark.parametrize(("zero_stage", "kept"), [(1, 16), (3, 0)])
def test_a_weight_is_converted_once_for_each_of_its_versions(
    monkeypatch: pytest.MonkeyPatch, zero_stage: int, kept: int
) -> None:
    """Micro-batches, their backwards and recomputations share it. With ZeRO-3 it goes with the weight's memory."""
    made: list[weakref.ref[Tensor]] = []

    def convert(products: Rounded, weight: Tensor) -> Tensor:
        made.append(weakref.ref(converted := unpack(pack(weight))))
        return converted

    monkeypatch.setattr(Rounded, "convert_weight", convert)
    config = grid.Layout(MODEL, **FORMAT, recompute="full", zero_stage=zero_stage, micro_batch_size=3).config()
    state = grid.make_state(config)
    batches = grid.micro_batches(config, state.ctx, 0)
    counts = []
    for action in (train_step, evaluate, evaluate):
        before = len(made)
        action(state, batches)
        counts.append(len(made) - before)
    if zero_stage == 1:  # four layers of four matrices
        assert counts == [16, 16, 0]
    assert sum(converted() is not None for converted in made) == kept
