"""Products of FP8 numbers by torch's scaled_mm: their operands by a slow model of it, and by torch on the meta device.

torch computes them on a GPU alone, where the last test compares values.
"""

import ast
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megapar_kernels import quantize, scaled_products
from megapar_kernels.quantize import GROUP
from megapar_kernels.scaled_products import Route, forward, input_gradient, serves, weight_gradient
from megapar_models.counts import WholeModel
from megapar_models.registry import presets, validate
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from tests.support.kernel_checks import DEVICE, needs_triton, relative_error
from tests.support.options import load
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

ROUTES: tuple[Route, ...] = ("blocks", "mx")
ODD = 5743  # tokens
TORCH = F.scaled_mm


def scales_of(scale: Tensor, recipe: ScalingType, rows: int, columns: int) -> Tensor:
    """The scale of each number of an operand [rows, columns] in fp64, read from memory as cuBLAS documents it."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    if recipe == ScalingType.BlockWise1x32:
        place = (row // 128 * (columns // 128) + column // 128) * 512
        place = place + row % 32 * 16 + row % 128 // 32 * 4 + column % 128 // 32
        return 2.0 ** (scale.view(torch.uint8)[place].double() - 127)
    memory = scale.t()
    assert memory.is_contiguous()
    assert scale.dtype == torch.float32
    if recipe == ScalingType.BlockWise1x128:
        return memory.flatten()[column // 128 * rows + row].double()
    assert recipe == ScalingType.BlockWise128x128
    blocks = -(-columns // 128 // 4) * 4
    return memory.flatten()[row // 128 * blocks + column // 128].double()


def slow_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, swizzle_a: Any,
    swizzle_b: Any, bias: Tensor | None, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """torch's scaled_mm in fp64, of operands that it takes: torch itself says so on the meta device."""
    meta_a, meta_b, meta_scale_a, meta_scale_b = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, scale_a, scale_b)
    )
    TORCH(meta_a, meta_b, meta_scale_a, recipe_a, meta_scale_b, recipe_b, swizzle_a, swizzle_b, None, output_dtype)
    assert (swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4) == (recipe_a == ScalingType.BlockWise1x32)
    if recipe_a == ScalingType.BlockWise1x128:
        assert scale_a.stride(1) * 4 % 16 == 0  # scales of a column of groups begin at multiples of 16 bytes
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == a.stride(0) % 16 == b.stride(1) % 16 == 0
    wide = a.double() * scales_of(scale_a, recipe_a, *a.shape)
    y = wide @ (b.t().double() * scales_of(scale_b, recipe_b, *b.t().shape)).t()
    return (y if bias is None else y + bias.double()).to(output_dtype)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_products.F, "scaled_mm", slow_scaled_mm)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * rows).to(torch.bfloat16)


def along_positions(packed: Tensor) -> Tensor:
    """The numbers of packed rows grouped again along positions, [b, features, p] in fp64."""
    return quantize.restore_groups(quantize.transposed_rows(packed), torch.float32).double()


@pytest.mark.usefixtures("slowly")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a slow model of what a GPU computes")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_operands_are_those_that_the_products_read(route: Route, impl: Any) -> None:
    """Fault fp8-padding-in-scales: K of 640, which is 5 blocks; tokens that 4 does not divide, positions that 128 does
    not. Zeros fill what is missing, and change no scale."""
    x, dy, weight, bias = draw(37, 3, 640), draw(37, 3, 256), draw(256, 640), draw(256)
    x_packed, dy_packed = quantize.quantize_rows(x), quantize.quantize_rows(dy)
    blocks = quantize.quantize_blocks(weight)
    x_wide, dy_wide = (quantize.restore_rows(packed, torch.float32).double() for packed in (x_packed, dy_packed))
    wide = quantize.restore_blocks(blocks, torch.float32).double()
    y = forward(x_packed, blocks, bias, torch.bfloat16, impl, route)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, x_wide @ wide.t() + bias.double()) < 3e-3
    assert relative_error(forward(x_packed, blocks, None, torch.float32, impl, route), x_wide @ wide.t()) < 1e-6
    y = forward(x_packed[0], blocks, bias, torch.float32, impl, route)
    assert relative_error(y, x_wide[0] @ wide.t() + bias.double()) < 1e-6
    assert relative_error(input_gradient(dy_packed, blocks, torch.float32, impl, route), dy_wide @ wide) < 1e-6
    gradient = weight_gradient(dy_packed, x_packed, impl, route)
    assert gradient.dtype == torch.float32
    again = [
        quantize.restore_groups(quantize.transposed_rows(p), torch.float32).double() for p in (dy_packed, x_packed)
    ]
    assert relative_error(gradient, torch.einsum("bop,bip->oi", *again)) < 1e-6
    assert relative_error(gradient, torch.einsum("sbo,sbi->oi", dy_wide, x_wide)) < 0.05
    assert forward(x_packed[:0], blocks, bias, torch.bfloat16, impl, route).shape == (0, 3, 256)


def check_shapes(outputs: int, inputs: int, route: Route) -> None:
    """torch takes the operands of all three products, of odd and of few tokens, and of two samples."""

    def rows(*shape: int) -> Tensor:
        packed = torch.empty(*shape[:-1], quantize.packed_width(shape[-1]), dtype=torch.uint8, device="meta")
        assert packed.stride(-2) % 16 == 0
        return packed

    weight = quantize.Quantized(
        torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(outputs // GROUP, inputs // GROUP, dtype=torch.uint8, device="meta"),
        (GROUP, GROUP),
    )
    for tokens in (1, ODD, 8192):
        y = forward(rows(tokens, inputs), weight, None, torch.bfloat16, route=route)
        assert y.shape == (tokens, outputs)
        dx = input_gradient(rows(tokens, outputs), weight, torch.float32, route=route)
        assert (dx.shape, dx.dtype) == ((tokens, inputs), torch.float32)
    gradient = weight_gradient(rows(ODD, 2, outputs), rows(ODD, 2, inputs), route=route)
    assert (gradient.shape, gradient.dtype) == ((outputs, inputs), torch.float32)


@pytest.mark.parametrize("route", ROUTES)
def test_torch_takes_the_operands(route: Route) -> None:
    """On the meta device. K of 128 has one scale, 768 and 1,408 have numbers of blocks that 4 does not divide."""
    for inputs in (128, 768, 1408, 4096, 14336):
        check_shapes(384, inputs, route)


FEW = ("llama3-8b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", slow_but([list(presets()).index(name) for name in FEW], presets()))
def test_torch_takes_the_matrices_of_presets(name: str) -> None:
    """Those whose sides are multiples of 128: the others stay in bf16."""
    model = validate(load(["--config", str(presets()[name])]).config, 1).model
    shapes = {tuple(piece.shape[-2:]) for piece in WholeModel(model).tensors().values() if len(piece.shape) > 1}
    for outputs, inputs in shapes:
        if outputs % GROUP == inputs % GROUP == 0:
            for route in ROUTES:
                check_shapes(outputs, inputs, route)


def test_which_devices_have_products(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    found = {}
    for version in (None, "12.8", "12.9", "13.0"):
        monkeypatch.setattr(torch.version, "cuda", version)
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
            monkeypatch.setattr(scaled_products, "capability", lambda device, found=capability: found)
            found[version, capability] = serves(cuda)
    assert {key: value for key, value in found.items() if value} == {
        (version, capability): route
        for version in ("12.9", "13.0")
        for capability, route in (((9, 0), "blocks"), ((10, 0), "mx"), ((10, 3), "mx"))
    }
    assert serves(torch.device("cpu")) is None


def test_a_device_without_products_is_told() -> None:
    packed = quantize.quantize_rows(torch.zeros(4, GROUP))
    weight = quantize.quantize_blocks(torch.zeros(GROUP, GROUP))
    with pytest.raises(ValueError, match="has none on cpu, but on sm_90 and sm_100"):
        forward(packed, weight, None, torch.bfloat16)


def test_only_the_new_scaled_mm_is_called() -> None:
    """Fault fp8-scaled-mm-misreads (pytorch#166752): the old one computes wrong values for K of 768."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(scaled_products))) if isinstance(node, ast.Call)]
    assert [name for call in calls if "scaled_mm" in (name := ast.unparse(call.func))] == ["F.scaled_mm"]


@pytest.mark.skipif(serves(DEVICE) is None, reason="needs a GPU with products of FP8")
@pytest.mark.parametrize("inputs", [128, 768, 1408, 4096])
@pytest.mark.parametrize("tokens", [256, ODD])
def test_products_of_a_gpu(tokens: int, inputs: int) -> None:
    """Against fp64. Hopper keeps fewer bits than fp32 in the sums of a group."""
    x, dy, weight = (draw(*shape).to(DEVICE) for shape in ((tokens, 1, inputs), (tokens, 1, 384), (384, inputs)))
    x_packed, dy_packed = (quantize.quantize_rows(part, "triton") for part in (x, dy))
    blocks = quantize.quantize_blocks(weight, "triton")
    x_wide, dy_wide = (quantize.restore_rows(packed, torch.float32).double() for packed in (x_packed, dy_packed))
    wide = quantize.restore_blocks(blocks, torch.float32).double()
    bias = draw(384).to(DEVICE)
    y = forward(x_packed, blocks, bias, torch.bfloat16, "triton")
    assert relative_error(y, x_wide @ wide.t() + bias.double()) < 4e-3
    assert relative_error(forward(x_packed, blocks, None, torch.float32, "triton"), x_wide @ wide.t()) < 1e-3
    assert relative_error(input_gradient(dy_packed, blocks, torch.float32, "triton"), dy_wide @ wide) < 1e-3
    again = [
        quantize.restore_groups(quantize.transposed_rows(p), torch.float32).double() for p in (dy_packed, x_packed)
    ]
    expected = torch.einsum("bop,bip->oi", *again)
    assert relative_error(weight_gradient(dy_packed, x_packed, "triton"), expected) < 1e-3
