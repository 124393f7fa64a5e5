"""FP8 numbers in groups: codes and exponents against a slow oracle, and Triton's kernels bit for bit against torch."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from megapar_kernels import quantize, quantize_kernels
from megapar_kernels.quantize import GROUP, NAN_CODE, Quantized
from torch import Tensor

from tests.support.kernel_checks import DEVICE, needs_triton, poisoned, strided
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS = (1, GROUP)
BLOCKS = (GROUP, GROUP)
Result = TypeVar("Result", Tensor, Quantized)


def value_of(code: int) -> float:
    """Of e4m3: a sign, 4 bits of exponent with a bias of 7, 3 of mantissa, no infinity, NaN where all bits are set."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def code_of(value: float) -> int:
    """The code nearest to a number of at most 448, the even one of two."""
    code = min(range(0x7F), key=lambda code: (abs(value_of(code) - abs(value)), code & 1))
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def exponent_of(largest: float) -> int:
    """The least e with largest <= 448 * 2^e, in fp64: -117 or more, and 0 where there is none."""
    if largest == 0 or not math.isfinite(largest):
        return 0
    exponent = math.frexp(largest)[1] - 9  # 2^e is at most largest / 256
    while largest > 448 * 2.0**exponent:
        exponent += 1
    return max(exponent, -117)


def same_bits(found: Tensor | Quantized, expected: Tensor | Quantized) -> bool:
    """Whether all bits are the same, and the memory order. Of numbers, one NaN is as good as another."""
    if isinstance(found, Quantized):
        assert isinstance(expected, Quantized)
        assert (found.group, found.layout) == (expected.group, expected.layout)
        return same_bits(found.codes, expected.codes) and same_bits(found.exponents, expected.exponents)
    assert isinstance(expected, Tensor)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    if found.element_size() == 1:
        return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    return torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def check(op: Callable[..., Result], *inputs: object) -> Result:
    """Return what `op` finds by Triton on poisoned memory, which must have the bits that torch finds."""
    with poisoned():
        found = op(*inputs, impl="triton")
    assert same_bits(found, op(*inputs, impl="torch"))
    return found


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 4.0) -> Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(*shape[:-1], 1, generator=generator).mul(spread).exp()
    return (torch.randn(shape, generator=generator) * rows).to(dtype).to(DEVICE)


def test_every_code_and_the_ties_between_them() -> None:
    """Each number of e4m3 has its code, and numbers between two are rounded to the nearest, to even in the middle."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    magnitudes = sorted(value_of(code) for code in codes if code < 0x80)
    between = [low + (high - low) * part for low, high in pairwise(magnitudes) for part in (0.49, 0.5, 0.51)]
    values = [value_of(code) for code in codes] + between + [-value for value in between]
    values += [0.0] * (-len(values) % 127)
    groups = torch.tensor(values, dtype=torch.float64).view(-1, 127)
    for exponent in (0, 5, -100, 100):
        x = torch.cat([torch.full((len(groups), 1), 448.0), groups], 1) * 2.0**exponent
        packed = check(quantize.quantize_rows, x.float().to(DEVICE))
        rows = quantize.view_packed(packed)
        expected = [[code_of(448.0), *(code_of(value) for value in group)] for group in groups.tolist()]
        assert rows.codes.view(torch.uint8).tolist() == expected
        assert (rows.exponents == exponent + 127).all()
        assert not packed[:, GROUP + 1 :].any()


def test_restored_codes_are_exact_in_bf16() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.tensor([value_of(code) for code in range(256)], dtype=torch.float64)
    exponents = torch.tensor([-117, -1, 0, 119])
    packed = torch.cat([codes.expand(4, -1), (exponents + 127).to(torch.uint8)[:, None].expand(-1, 2)], 1)
    packed = torch.nn.functional.pad(packed, (0, quantize.packed_width(256) - packed.shape[1])).to(DEVICE)
    expected = values * 2.0 ** exponents.double()[:, None]
    for dtype in (torch.bfloat16, torch.float32):
        found = check(quantize.restore_rows, packed, dtype).double().cpu()
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_the_exponent_is_the_least_that_fits() -> None:
    """The bits of fp32 against fp64, over all magnitudes of fp32, with the neighbours of each power of two and 448s."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(1, 0x7F800000, (20_000,), generator=generator, dtype=torch.int32)
    edges = torch.cat([torch.tensor([1.0, 1.75]) * 2.0**e for e in range(-126, 128)]).view(torch.int32)
    bits = torch.cat([bits, edges - 1, edges, edges + 1, torch.tensor([0, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000])])
    largest = bits.view(torch.float32)
    expected = [exponent_of(value) for value in largest.double().tolist()]
    assert quantize.exponents_of(largest).tolist() == expected
    few = torch.cat([largest[20_000::13], largest[-5:]])
    few = torch.cat([few, largest[: -len(few) % 16]])
    groups = torch.zeros(len(few), GROUP).index_copy_(1, torch.tensor([5]), few[:, None]).to(DEVICE)
    exponents = quantize.view_packed(check(quantize.quantize_rows, groups.view(-1, 16 * GROUP))).exponents
    assert (exponents.int().flatten() - 127).tolist() == [exponent_of(value) for value in few.double().tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_that_are_zero_tiny_huge_or_not_finite(dtype: torch.dtype) -> None:
    """Fault fp8-zero-group: zeros stay zeros. A group with inf or NaN has codes of NaN alone; others do not see it."""
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, limits.smallest_normal, limits.tiny / 4, limits.max, math.inf, -math.inf, math.nan, -math.nan]
    x = draw(len(special), 3 * GROUP, dtype=dtype, spread=0.5)
    x[:, GROUP : 2 * GROUP] = 0
    x[:, GROUP + 7] = torch.tensor(special, dtype=dtype, device=DEVICE)
    packed = check(quantize.quantize_rows, x)
    codes = quantize.view_packed(packed).codes.view(torch.uint8)
    assert not codes[:2, GROUP : GROUP + 7].any()
    assert (codes[5:, GROUP : 2 * GROUP] == NAN_CODE).all()
    assert not (codes[:, :GROUP] & 0x7F == NAN_CODE).any()
    assert not (codes[:, 2 * GROUP :] & 0x7F == NAN_CODE).any()
    restored = check(quantize.restore_rows, packed, torch.float32)
    assert restored[5:, GROUP : 2 * GROUP].isnan().all()
    assert not restored[:2, GROUP : 2 * GROUP].any()
    assert check(quantize.transposed_rows, packed[:, None]).codes.float().isnan().any(-1).sum() == GROUP
    weight = torch.zeros(BLOCKS, dtype=dtype, device=DEVICE).repeat(len(special), 1)
    weight[3::GROUP, 5] = torch.tensor(special, dtype=dtype, device=DEVICE)
    blocks = check(quantize.quantize_blocks, weight)
    assert blocks.codes.float().view(-1, GROUP * GROUP).isnan().all(1).tolist() == [False] * 5 + [True] * 4


def test_a_number_too_large_for_a_code_does_not_become_nan() -> None:
    """Fault fp8-cast-overflows: the scale follows the largest number, so 1e30 has a code in every version of torch."""
    x = torch.full((1, GROUP), 1e30, device=DEVICE)
    restored = quantize.restore_rows(check(quantize.quantize_rows, x), torch.float32)
    assert torch.allclose(restored, x, rtol=1 / 16)


# One group; tiles with rows that do not exist; 11 and 6 groups, of which 1 and 2 are in a tile; two tiles a row.
SHAPES = [(1, 128), (3, 2, 256), (17, 1408), (5, 768), (2, 4096)]


@pytest.mark.parametrize(("shape", "dtype"), slow_but([0, 3, 7], [(s, d) for s in SHAPES for d in DTYPES]), ids=str)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    packed = check(quantize.quantize_rows, x)
    check(quantize.restore_rows, packed, torch.bfloat16)
    restored = check(quantize.restore_rows, packed, torch.float32)
    groups = (x.double() - restored.double()).unflatten(-1, (-1, GROUP)).abs().amax(-1)
    assert (groups <= x.double().unflatten(-1, (-1, GROUP)).abs().amax(-1) / 16).all()
    if dtype == torch.bfloat16:
        again = quantize.quantize_rows(restored.bfloat16(), "triton")  # a group may get a smaller scale
        assert torch.equal(quantize.restore_rows(again, torch.float32), restored)


def test_rows_apart_in_memory_and_no_rows() -> None:
    wide = draw(6, 3, 1000)
    for x in (
        wide[..., 8:264],
        wide[::2, :, 8:264],
        strided(draw(5, 256)),
        draw(256, 5).t()[:, :128],
        wide[:0, :, :256],
    ):
        check(quantize.quantize_rows, x)
    packed = quantize.quantize_rows(draw(9, 2, 256))
    for rows in (packed[::3], packed[:, 1], packed[:0]):
        check(quantize.restore_rows, rows, torch.bfloat16)
    check(quantize.transposed_rows, packed[1:8])


def test_kernels_write_to_their_tensors_alone() -> None:
    x = draw(5, 384)
    memory = torch.full((9, quantize.packed_width(384)), 0xAB, dtype=torch.uint8, device=DEVICE)
    quantize_kernels.quantize_rows(x, memory[2:7])
    assert same_bits(memory[2:7], quantize.quantize_rows(x))
    assert (memory[:2] == 0xAB).all()
    assert (memory[7:] == 0xAB).all()


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (3, 128, 256), (2, 2, 128, 128)], ids=str)
def test_blocks(shape: tuple[int, ...]) -> None:
    """Of a matrix, and of several, such as experts'."""
    weight = draw(*shape)
    weight[..., :GROUP, :GROUP] *= 1e-5
    blocks = check(quantize.quantize_blocks, weight)
    assert blocks.exponents.shape == (*shape[:-2], shape[-2] // GROUP, shape[-1] // GROUP)
    check(quantize.restore_blocks, blocks, torch.float32)
    restored = check(quantize.restore_blocks, blocks, torch.bfloat16)
    again = quantize.quantize_blocks(restored, "triton")
    assert torch.equal(quantize.restore_blocks(again, torch.bfloat16), restored)
    transposed = check(quantize.transposed_blocks, blocks)
    assert transposed.codes.is_contiguous()
    assert torch.equal(quantize.restore_blocks(transposed, torch.bfloat16, "triton"), restored.mT)
    check(quantize.quantize_blocks, strided(weight))
    if len(shape) == 3:
        assert same_bits(blocks[1], quantize.quantize_blocks(weight[1]))


POSITIONS = [(1, 1, 128), (130, 2, 256), (256, 1, 128), (128, 3, 384), (1000, 2, 768)]


@pytest.mark.parametrize(("positions", "samples", "features"), slow_but([0, 1, 2], POSITIONS), ids=str)
def test_groups_along_positions(positions: int, samples: int, features: int) -> None:
    """Odd numbers of positions, and samples that share no group. Zeros behind the last position change no scale."""
    packed = quantize.quantize_rows(draw(positions, samples, features))
    found = check(quantize.transposed_rows, packed)
    full = -(-positions // GROUP) * GROUP
    assert found.codes.shape == (samples, features, full)
    values = quantize.restore_rows(packed, torch.float32)
    expected = torch.zeros(full, samples, features, device=DEVICE)
    expected[:positions] = values
    again = quantize.view_packed(quantize.quantize_rows(expected.permute(1, 2, 0).contiguous()))
    assert torch.equal(found.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(found.exponents, again.exponents)
    one = quantize.transposed_rows(packed[:, -1:])
    assert torch.equal(found.codes[-1:].view(torch.uint8), one.codes.view(torch.uint8))
    assert torch.equal(found.exponents[-1:], one.exponents)


def test_a_cut_at_a_multiple_of_128_changes_no_code() -> None:
    """Each rank of tensor parallelism finds the codes of one process."""
    x, weight = draw(7, 1024), draw(512, 1024)
    whole, blocks = quantize.view_packed(quantize.quantize_rows(x)), quantize.quantize_blocks(weight)
    for tp in (2, 4, 8):
        parts = [quantize.view_packed(quantize.quantize_rows(part, "triton")) for part in x.chunk(tp, -1)]
        assert same_bits(torch.cat([part.codes for part in parts], -1), whole.codes.contiguous())
        assert torch.equal(torch.cat([part.exponents for part in parts], -1), whole.exponents)
        cut = [quantize.quantize_blocks(part, "triton") for part in weight.chunk(tp, 1)]
        assert torch.equal(torch.cat([part.exponents for part in cut], 1), blocks.exponents)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (131, 17), (257, 6)])
@pytest.mark.parametrize("group", [ROWS, BLOCKS], ids=["rows", "blocks"])
def test_expanded_scales(rows: int, columns: int, group: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randint(10, 248, (rows, columns + 5), generator=generator, dtype=torch.uint8).to(DEVICE)
    for exponents in (wide[:, 2 : 2 + columns], wide[:, :columns].t().contiguous().t()):
        scales = check(quantize.expanded_scales, exponents, group)
        expected = 2.0 ** (exponents.double() - 127)
        if group == ROWS:
            assert scales.stride() == (1, rows)
            assert torch.equal(scales.double(), expected)
        else:
            assert scales.shape == (-(-columns // 4) * 4, rows)
            assert scales.stride() == (1, scales.shape[0])
            assert torch.equal(scales[:columns].double(), expected.t())
            assert not scales[columns:].any()


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 1, ROWS), (300, 5, ROWS), (129, 19, ROWS), (3, 5, BLOCKS)])
def test_swizzled_scales(rows: int, columns: int, group: tuple[int, int]) -> None:
    """Against the places that the documentation of cuBLAS gives, one by one."""
    exponents = torch.randint(10, 248, (rows, columns + 3), dtype=torch.uint8, device=DEVICE)[:, 1 : 1 + columns]
    found = check(quantize.swizzled_scales, exponents, group).view(torch.uint8).tolist()
    rows *= group[0]
    assert len(found) == -(-rows // 128) * 128 * columns * 4
    expected = [0] * len(found)
    for row in range(rows):
        for number in range(4 * columns):  # groups of 32
            tile = row // 128 * columns + number // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + number % 4
            expected[place] = int(exponents[row // group[0], number // 4])
    assert found == expected


def test_torch_serves_what_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64, and GPUs before Ada, which have no e4m3."""
    assert quantize.has_kernels("triton", draw(1, GROUP))
    assert not quantize.has_kernels("torch", draw(1, GROUP))
    monkeypatch.setattr(quantize_kernels, "launches", None)
    x = draw(3, GROUP).double()
    assert same_bits(quantize.quantize_rows(x, "triton"), quantize.quantize_rows(x.float()))
    monkeypatch.setattr(quantize, "capability", lambda device: (8, 6))
    check(quantize.quantize_rows, x.bfloat16())
    check(quantize.quantize_blocks, draw(*BLOCKS))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_shapes_that_do_not_fit_are_refused(impl: quantize.Implementation) -> None:
    with pytest.raises(ValueError, match="rows have 100 numbers; it takes multiples of 128"):
        quantize.quantize_rows(torch.zeros(3, 100, device=DEVICE), impl)
    with pytest.raises(ValueError, match="the matrix is 128 x 64; it takes multiples of 128"):
        quantize.quantize_blocks(torch.zeros(128, 64, device=DEVICE), impl)


def test_on_the_meta_device_shapes_follow() -> None:
    """As a plan computes them: the bytes of both implementations are the same."""
    for impl in ("torch", "triton"):
        packed = quantize.quantize_rows(torch.empty(130, 2, 256, device="meta", dtype=torch.bfloat16), impl)
        assert packed.shape == (130, 2, 272)
        assert quantize.transposed_rows(packed, impl).codes.shape == (2, 256, 256)
        assert quantize.restore_rows(packed, torch.bfloat16, impl).shape == (130, 2, 256)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 20 GB")
def test_offsets_beyond_2_31() -> None:
    """Fault tensors-beyond-32-bits: more than 2^31 numbers."""
    x = torch.zeros(2**17 + 5, 2**14, dtype=torch.bfloat16, device=DEVICE)
    x[-3:].normal_()
    packed = quantize.quantize_rows(x, "triton")
    assert x.numel() > 2**31
    assert same_bits(packed[-3:], quantize.quantize_rows(x[-3:]))
    assert not quantize.view_packed(packed[:-3]).codes.view(torch.uint8).any()
    del x
    assert torch.equal(
        quantize.restore_rows(packed, torch.bfloat16, "triton")[-3:], quantize.restore_rows(packed[-3:], torch.bfloat16)
    )
    found = quantize.transposed_rows(packed[:, None], "triton")
    last = quantize.transposed_rows(packed[-5:, None])
    assert torch.equal(found.codes[..., -GROUP:].view(torch.uint8), last.codes.view(torch.uint8))
