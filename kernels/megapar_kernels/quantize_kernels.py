"""The Triton kernels of `quantize`: numbers to codes of e4m3 and back, rows grouped along positions, and scales.

Each kernel reads its input once and writes its output once. For a number of bf16 that is 3 bytes to quantize or to
restore, and 2 bytes for a code that moves to a transpose.

The largest magnitude of a group is the largest of the bits of its numbers in fp32, without the sign. As integers these
bits are ordered as the magnitudes are, and infinity and NaN, which a maximum of numbers would drop, come last.
"""

from torch import Tensor

from megapar_kernels.dispatch import launches, tl, triton

_GROUP = tl.constexpr(128)
_BIAS = tl.constexpr(127)
_LEAST = tl.constexpr(10)  # the byte of the least exponent, -117
_INFINITY = tl.constexpr(0x7F800000)  # the bits of infinity in fp32; those of NaN are larger

GROUPS_OF_TILE = 16  # of 128 numbers: 4 warps with 16 numbers a thread
WARPS = 4
BLOCK_WARPS = 8  # for a block of 128 x 128 bytes
QUANTIZE_BLOCK_WARPS = 16  # the numbers of a block are kept in registers until their largest is known
TRANSPOSED_COLUMNS = 64  # features of a tile of 128 positions, with 64 numbers a thread
SCALES_TILE = 128, 16  # rows and columns of exponents


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """The bits of |x|, of fp32 x, as int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _byte_of(largest):  # type: ignore[no-untyped-def]
    # One is carried into the exponent if the mantissa is above 0.75: 448 is 1.75 * 2^8.
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, _LEAST)


@triton.jit
def exponent_of(largest):  # type: ignore[no-untyped-def]
    """The byte of the exponent of a group whose largest `magnitude` is given. That of 0 if it is not finite."""
    return tl.where((largest == 0) | (largest >= _INFINITY), _BIAS, _byte_of(largest)).to(tl.uint8)


@triton.jit
def factor_of(largest):  # type: ignore[no-untyped-def]
    """What makes codes of the numbers of a group: 2^-exponent, or NaN, so that all codes are NaN, if it is not finite.

    A factor of NaN costs nothing for a number, where a choice between two codes would.
    """
    byte = 254 - _byte_of(largest)  # of the negative exponent, with the bias of 127
    return tl.where(largest < _INFINITY, (byte << 23).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def encode(x):  # type: ignore[no-untyped-def]
    """The codes as uint8 of fp32 x, which has been multiplied by `factor_of` its group."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def scale_of(exponents):  # type: ignore[no-untyped-def]
    """The scales in fp32 of the bytes of exponents. That of a byte of 0 is 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode(codes, exponents):  # type: ignore[no-untyped-def]
    """The numbers in fp32 of codes and of the bytes of their exponents, which broadcast."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale_of(exponents)


@triton.jit
def store_packed(packed_ptr, x, row, group, exists, rows, groups, width):  # type: ignore[no-untyped-def]
    """Write fp32 x [R, G, 128] to packed rows: the codes and exponents of the groups `group` [G] of the rows `row` [R].

    `exists` [R, G] says which groups there are. A packed row has `width` bytes, `groups` groups, and zeros behind them,
    which the program with the last of the groups writes.
    """
    largest = tl.max(magnitude(x), 2)
    codes = encode(x * factor_of(largest)[:, :, None])
    start = packed_ptr + row * width
    lane = tl.arange(0, _GROUP)
    place = start[:, None, None] + (group * _GROUP)[None, :, None] + lane[None, None, :]
    tl.store(place, codes, exists[:, :, None])
    place = start[:, None] + (groups * _GROUP + group)[None, :]
    tl.store(place, exponent_of(largest), exists)
    if tl.max(group, 0) >= groups - 1:
        used = groups * (_GROUP + 1)
        filling = tl.arange(0, 16)
        behind = start[:, None] + (used + filling)[None, :]
        inside = (row < rows)[:, None] & (used + filling < width)[None, :]
        tl.store(behind, tl.zeros(behind.shape, tl.uint8), inside)


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    packed_ptr, x, first_row, first_column, rows, columns,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write fp32 x [ROWS, COLUMNS], a tile of whole groups of a matrix [rows, columns], to packed rows of WIDTH bytes.

    Kernels whose results are quantized call this in place of a store, with numbers rounded to the dtype of the results.
    """
    groups = columns // _GROUP
    row = first_row + tl.arange(0, ROWS)
    group = first_column // _GROUP + tl.arange(0, COLUMNS // _GROUP)
    exists = (row < rows)[:, None] & (group < groups)[None, :]
    x = tl.reshape(x, [ROWS, COLUMNS // _GROUP, _GROUP])
    store_packed(packed_ptr, x, row, group, exists, rows, groups, WIDTH)


@triton.jit
def _groups_of_tile(groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's rows [ROWS] and groups [GROUPS]. The groups of a row come before those of the next rows."""
    tile = tl.program_id(0).to(tl.int64)
    blocks = groups // GROUPS
    row = tile // blocks * ROWS + tl.arange(0, ROWS)
    return row, (tile % blocks).to(tl.int32) * GROUPS + tl.arange(0, GROUPS)


@triton.jit
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, packed_ptr, rows, groups, stride, width, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Quantize one tile of groups. Rows of x are `stride` numbers apart."""
    row, group = _groups_of_tile(groups, ROWS, GROUPS)
    lane = tl.arange(0, _GROUP)
    exists = (row < rows)[:, None] & (group < groups)[None, :]
    place = (x_ptr + row * stride)[:, None, None] + (group * _GROUP)[None, :, None] + lane[None, None, :]
    x = tl.load(place, exists[:, :, None], other=0.0).to(tl.float32)
    store_packed(packed_ptr, x, row, group, exists, rows, groups, width)


@triton.jit
def restore_rows_kernel(  # type: ignore[no-untyped-def]
    packed_ptr, y_ptr, rows, groups, width, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Restore the numbers of one tile of groups."""
    row, group = _groups_of_tile(groups, ROWS, GROUPS)
    lane = tl.arange(0, _GROUP)
    exists = (row < rows)[:, None] & (group < groups)[None, :]
    start = packed_ptr + row * width
    exponents = tl.load(start[:, None] + (groups * _GROUP + group)[None, :], exists, other=0)
    place = (group * _GROUP)[None, :, None] + lane[None, None, :]
    codes = tl.load(start[:, None, None] + place, exists[:, :, None], other=0)
    y = decode(codes, exponents[:, :, None]).to(y_ptr.dtype.element_ty)
    tl.store((y_ptr + row * (groups * _GROUP))[:, None, None] + place, y, exists[:, :, None])


@triton.jit
def _block(columns):  # type: ignore[no-untyped-def]
    """This program's block among those of a matrix with `columns` columns, and the places of its numbers."""
    block = tl.program_id(0).to(tl.int64)
    of_row = columns // _GROUP
    lane = tl.arange(0, _GROUP)
    start = block // of_row * _GROUP * columns + block % of_row * _GROUP
    return block, start + lane[:, None] * columns + lane[None, :]


@triton.jit
def quantize_blocks_kernel(weight_ptr, codes_ptr, exponents_ptr, columns):  # type: ignore[no-untyped-def]
    """Quantize one block of 128 x 128."""
    block, place = _block(columns)
    x = tl.load(weight_ptr + place).to(tl.float32)
    largest = tl.max(tl.max(magnitude(x), 1), 0)
    tl.store(codes_ptr + place, encode(x * factor_of(largest)))
    tl.store(exponents_ptr + block, exponent_of(largest))


@triton.jit
def restore_blocks_kernel(codes_ptr, exponents_ptr, weight_ptr, columns):  # type: ignore[no-untyped-def]
    """Restore the numbers of one block of 128 x 128."""
    block, place = _block(columns)
    x = decode(tl.load(codes_ptr + place), tl.load(exponents_ptr + block))
    tl.store(weight_ptr + place, x.to(weight_ptr.dtype.element_ty))


@triton.jit
def transposed_rows_kernel(  # type: ignore[no-untyped-def]
    packed_ptr, codes_ptr, exponents_ptr, positions, samples, groups, blocks, width, COLUMNS: tl.constexpr
):  # fmt: skip
    """Group COLUMNS features of 128 positions of one sample along the positions.

    `packed_ptr` has rows [positions, samples, width], `codes_ptr` [features, samples, blocks, 128].
    """
    tile = tl.program_id(0).to(tl.int64)
    column_blocks = groups * (_GROUP // COLUMNS)
    column = (tile % column_blocks).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    group = (tile % column_blocks).to(tl.int32) // (_GROUP // COLUMNS)
    tile = tile // column_blocks
    sample, block = tile % samples, tile // samples
    lane = tl.arange(0, _GROUP)
    position = block * _GROUP + lane
    exists = position < positions
    start = packed_ptr + (position * samples + sample) * width
    exponents = tl.load(start + groups * _GROUP + group, exists, other=0)
    x = decode(tl.load(start[:, None] + column[None, :], exists[:, None], other=0), exponents[:, None])
    largest = tl.max(magnitude(x), 0)
    codes = encode(x * factor_of(largest)[None, :])
    place = (column.to(tl.int64) * samples + sample) * blocks + block
    tl.store(codes_ptr + place[None, :] * _GROUP + lane[:, None], codes)
    tl.store(exponents_ptr + place, exponent_of(largest))


@triton.jit
def transposed_bytes_kernel(x_ptr, y_ptr, rows, columns):  # type: ignore[no-untyped-def]
    """Transpose one block of 128 x 128 bytes of one matrix [rows, columns]."""
    tile = tl.program_id(0).to(tl.int64)
    across, down = columns // _GROUP, rows // _GROUP
    first_column = tile % across * _GROUP
    first_row = tile // across % down * _GROUP
    matrix = tile // across // down * rows * columns
    lane = tl.arange(0, _GROUP)
    x = tl.load(x_ptr + matrix + first_row * columns + first_column + lane[:, None] * columns + lane[None, :])
    tl.store(y_ptr + matrix + first_column * rows + first_row + lane[None, :] * rows + lane[:, None], x)


@triton.jit
def expanded_scales_kernel(  # type: ignore[no-untyped-def]
    exponents_ptr, scales_ptr, rows, columns, columns_out, row_stride, column_stride, out_row_stride, out_column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the scales of one tile of exponents in fp32. Columns from `columns` to `columns_out` are zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    exponents = tl.load(exponents_ptr + row * row_stride + column * column_stride, inside, other=0)
    place = scales_ptr + row * out_row_stride + column * out_column_stride
    tl.store(place, scale_of(exponents), (row < rows) & (column < columns_out))


@triton.jit
def swizzled_scales_kernel(  # type: ignore[no-untyped-def]
    exponents_ptr, scales_ptr, rows, columns, row_stride, column_stride,
    GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the exponents of 128 rows and COLUMNS groups of 128, each four times, in tiles of 512 bytes as int32.

    An exponent serves GROUP_ROWS rows. Those of rows that do not exist are zero.
    """
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)[:, None]
    row = block * ROWS + lane
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = exponents_ptr + row // GROUP_ROWS * row_stride + column * column_stride
    exponents = tl.load(place, (row < rows) & (column < columns), other=0)
    place = (block * columns + column) * ROWS + lane % 32 * 4 + lane // 32
    tl.store(scales_ptr + place, exponents.to(tl.int32) * 0x01010101, column < columns)


def tile_of_groups(groups: int) -> tuple[int, int]:
    """The rows and groups of a tile. The groups divide those of a row, so that no thread is without numbers."""
    of_row = min(groups & -groups, GROUPS_OF_TILE)
    return GROUPS_OF_TILE // of_row, of_row


def quantize_rows(x: Tensor, packed: Tensor) -> None:
    """Quantize x [rows, i], whose rows may lie apart, into `packed` [rows, width]."""
    rows, groups = x.shape[0], x.shape[1] // 128
    if launches(packed, x):
        tile = tile_of_groups(groups)
        grid = (triton.cdiv(rows, tile[0]) * (groups // tile[1]),)
        quantize_rows_kernel[grid](x, packed, rows, groups, x.stride(0), packed.shape[1], *tile, num_warps=WARPS)


def restore_rows(packed: Tensor, y: Tensor) -> None:
    """Restore `packed` [rows, width] into y [rows, i]. Both are contiguous."""
    rows, groups = y.shape[0], y.shape[1] // 128
    if launches(y, packed):
        tile = tile_of_groups(groups)
        grid = (triton.cdiv(rows, tile[0]) * (groups // tile[1]),)
        restore_rows_kernel[grid](packed, y, rows, groups, packed.shape[1], *tile, num_warps=WARPS)


def quantize_blocks(weight: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """Quantize a contiguous weight [..., o, i] into contiguous codes and exponents."""
    if launches(codes, weight, exponents):
        grid = (exponents.numel(),)
        quantize_blocks_kernel[grid](weight, codes, exponents, weight.shape[-1], num_warps=QUANTIZE_BLOCK_WARPS)


def restore_blocks(codes: Tensor, exponents: Tensor, weight: Tensor) -> None:
    """Restore contiguous codes and exponents into a contiguous weight [..., o, i]."""
    if launches(weight, codes, exponents):
        grid = (exponents.numel(),)
        restore_blocks_kernel[grid](codes, exponents, weight, weight.shape[-1], num_warps=BLOCK_WARPS)


def transposed_rows(packed: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """Group `packed` [s, b, width] along positions into codes [i, b, p] and exponents [i, b, p / 128]."""
    positions, samples, width = packed.shape
    features, _, blocks = exponents.shape
    if launches(codes, packed, exponents):
        grid = (features // TRANSPOSED_COLUMNS * samples * blocks,)
        transposed_rows_kernel[grid](
            packed, codes, exponents, positions, samples, features // 128, blocks, width,
            TRANSPOSED_COLUMNS, num_warps=WARPS,
        )  # fmt: skip


def transposed_bytes(x: Tensor, y: Tensor) -> None:
    """Transpose matrices of bytes x [..., o, i] into y [..., i, o]. Both are contiguous."""
    if launches(y, x):
        rows, columns = x.shape[-2:]
        transposed_bytes_kernel[(x.numel() // (128 * 128),)](x, y, rows, columns, num_warps=BLOCK_WARPS)


def expanded_scales(exponents: Tensor, scales: Tensor) -> None:
    """Write the scales of exponents [rows, columns] to `scales` [rows, columns or more], in any memory order."""
    rows, columns = scales.shape
    if launches(scales, exponents):
        row_block, column_block = SCALES_TILE
        grid = triton.cdiv(rows, row_block), triton.cdiv(columns, column_block)
        expanded_scales_kernel[grid](
            exponents, scales, rows, exponents.shape[1], columns, *exponents.stride(), *scales.stride(),
            row_block, column_block, num_warps=WARPS,
        )  # fmt: skip


def swizzled_scales(exponents: Tensor, scales: Tensor, rows: int, group_rows: int) -> None:
    """Write the exponents of groups of `group_rows` x 128 to int32 `scales`, swizzled. `rows` rows of numbers exist."""
    columns = exponents.shape[1]
    if launches(scales, exponents):
        row_block, column_block = SCALES_TILE
        grid = triton.cdiv(rows, row_block), triton.cdiv(columns, column_block)
        swizzled_scales_kernel[grid](
            exponents, scales, rows, columns, *exponents.stride(), group_rows, row_block, column_block, num_warps=WARPS
        )
