"""Products of FP8 numbers by Triton: of groups of rows in one launch, and added to fp32 main gradients."""

from collections.abc import Sequence

import pytest
import torch
from megapar_kernels import quantize
from megapar_kernels.grouped import RowGroups
from megapar_kernels.quantize import GROUP
from megapar_kernels.scaled_products import over_positions
from megapar_kernels.scaled_tiles import add_weight_gradient, grouped_forward, grouped_input_gradient
from torch import Tensor

from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, poisoned, relative_error
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

# Sums in fp32 of products that are exact in fp32. Hopper's tensor cores keep fewer bits within a group.
NEAR = 1e-6 if DEVICE.type == "cpu" else 1e-3


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Rows of different size, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * rows).to(torch.bfloat16).to(DEVICE)


def exact_rows(packed: Tensor) -> Tensor:
    return quantize.restore_rows(packed, torch.float32).double()


SIZES = [[0, 1, 17, 0, 130], [300], [0, 0, 5], [128, 128], [1] * 9, [0] * 4]


@pytest.mark.parametrize(("sizes", "outputs", "inputs"), slow_but([0, 1, 3], [(s, 256, 384) for s in SIZES]), ids=str)
def test_groups_of_rows(sizes: Sequence[int], outputs: int, inputs: int) -> None:
    """Any number of rows, 0 too, behind rows of other groups; scales of experts and of their blocks that differ."""
    number, rows = len(sizes), sum(sizes)
    weights = draw(number, outputs, inputs, seed=1) * torch.logspace(-3, 3, number, device=DEVICE)[:, None, None]
    weights[:, :GROUP, GROUP : 2 * GROUP] *= 100
    blocks = quantize.quantize_blocks(weights.bfloat16())
    wide = quantize.restore_blocks(blocks, torch.float32).double()
    groups = RowGroups.of(sizes, DEVICE)
    x, dy = (quantize.quantize_rows(draw(rows, width, seed=2)) for width in (inputs, outputs))
    parts = zip(exact_rows(x).split(list(sizes)), exact_rows(dy).split(list(sizes)), wide, strict=True)
    expected = [(part_x @ matrix.t(), part_dy @ matrix) for part_x, part_dy, matrix in parts]
    for dtype, limit in ((torch.float32, NEAR), (torch.bfloat16, 4e-3)):
        with poisoned():
            y = grouped_forward(x, blocks, groups, dtype)
            dx = grouped_input_gradient(dy, blocks, groups, dtype)
        assert (y.shape, y.dtype) == ((rows, outputs), dtype)
        assert (dx.shape, dx.dtype) == ((rows, inputs), dtype)
        for found, of_groups in zip((y, dx), zip(*expected, strict=True), strict=True):
            for part, right in zip(found.split(list(sizes)), of_groups, strict=True):
                assert relative_error(part, right) <= limit  # a group alone: others are 1,000 times as large


def test_a_row_is_the_same_beside_any_other_rows() -> None:
    """No scale is shared, so that the results of an expert do not depend on who shares its rank."""
    blocks = quantize.quantize_blocks(draw(3, 128, 256, seed=1))
    x = quantize.quantize_rows(draw(40, 256, seed=2))
    y = grouped_forward(x, blocks, RowGroups.of([3, 20, 17], DEVICE), torch.bfloat16)
    alone = grouped_forward(x[3:23].clone(), blocks, RowGroups.of([0, 20, 0], DEVICE), torch.bfloat16)
    assert torch.equal(y[3:23], alone)


def test_nan_of_one_row_stays_with_it() -> None:
    rows = draw(6, 128)
    rows[4, 7] = float("nan")
    blocks = quantize.quantize_blocks(draw(2, 128, 128, seed=1))
    y = grouped_forward(quantize.quantize_rows(rows), blocks, RowGroups.of([3, 3], DEVICE), torch.bfloat16)
    assert y.isnan().any(1).tolist() == [False] * 4 + [True, False]


def test_rows_of_another_width_are_refused() -> None:
    blocks = quantize.quantize_blocks(draw(2, 128, 128))
    with pytest.raises(ValueError, match="rows have 256 numbers, and the matrices 128 inputs"):
        grouped_forward(quantize.quantize_rows(draw(4, 256)), blocks, RowGroups.of([2, 2], DEVICE), torch.bfloat16)


GRADIENTS = [(70, 2, 128, 256), (256, 1, 256, 128), (1, 1, 128, 128), (300, 3, 384, 256), (128, 1, 1152, 256)]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("positions", "samples", "outputs", "inputs"), slow_but([0, 1], GRADIENTS), ids=lambda value: str(value)
)
def test_weight_gradients(positions: int, samples: int, outputs: int, inputs: int, overwrite: bool) -> None:
    """Added to fp32 in place, or in its place. More than 8 rows of tiles go in turns."""
    dy, x = (quantize.quantize_rows(draw(positions, samples, width, seed=width)) for width in (outputs, inputs))
    dy_rows, x_rows = (over_positions(quantize.transposed_rows(packed)) for packed in (dy, x))
    product = quantize.restore_groups(dy_rows, torch.float32).double() @ (
        quantize.restore_groups(x_rows, torch.float32).double().t()
    )
    before = draw(outputs, inputs, seed=3).float()
    total = Guarded(before)
    if overwrite:
        total.tensor.fill_(float("nan"))
    version = total.tensor._version
    add_weight_gradient(total.tensor, dy_rows, x_rows, overwrite=overwrite)
    total.check()
    assert total.tensor._version > version
    assert relative_error(total.tensor, product if overwrite else before.double() + product) < NEAR
    whole = torch.einsum("sbo,sbi->oi", exact_rows(dy), exact_rows(x))
    assert relative_error(product, whole) < 0.06


def test_on_the_meta_device_nothing_is_computed() -> None:
    rows = torch.empty(10, quantize.packed_width(256), dtype=torch.uint8, device="meta")
    blocks = quantize.quantize_blocks(torch.empty(4, 128, 256, device="meta"))
    groups = RowGroups.of([4, 3, 2, 1], torch.device("meta"))
    assert grouped_forward(rows, blocks, groups, torch.bfloat16).shape == (10, 128)
    total = torch.empty(256, 256, device="meta")
    part = over_positions(quantize.transposed_rows(rows[:, None]))
    add_weight_gradient(total, part, part)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 40 GB")
def test_offsets_beyond_2_31() -> None:
    """Fault tensors-beyond-32-bits: more than 2^31 bytes of rows, and numbers of results."""
    rows = torch.zeros(2**17 + 5, quantize.packed_width(2**14), dtype=torch.uint8, device=DEVICE)
    rows[-3:] = quantize.quantize_rows(draw(3, 2**14))
    blocks = quantize.quantize_blocks(draw(2, 2**14, 2**14, seed=1), "triton")
    y = grouped_forward(rows, blocks, RowGroups.of([2**17 + 2, 3], DEVICE), torch.bfloat16)
    wide = quantize.restore_blocks(blocks[1], torch.float32).double()
    assert relative_error(y[-3:], exact_rows(rows[-3:]) @ wide.t()) < 4e-3
    assert not y[:-3].any()
