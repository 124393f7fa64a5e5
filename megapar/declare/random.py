"""Random numbers, the same in every layout. Each is a function of its purpose, not of the rank or the time of drawing.

Initial weights come from numpy's Philox generator, with one stream for each tile of each logical tensor, keyed by
(seed, name, tile). Dropout hashes (seed, use, sample, position, element) with 32-bit integer arithmetic. A GPU kernel
repeats it exactly.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from megapar_kernels.dropout import mix
from torch import Tensor, nn

from megapar.declare.params import Init, ParamSpec, Piece, spec_of

__all__ = ["Tokens", "fill", "initial_values", "initialize", "row_keys"]

_MASK = 0xFFFFFFFF
# Tiles are drawn whole. Small ones leave a rank little to throw away at the edges of its part. But numpy holds Python's
# lock between tiles, for the time of some 1,000 numbers (10 us): threads gain nothing from smaller ones.
_TILE_ROWS = 16
_TILE_COLUMNS = 1024
_NUMBERS_WHILE_LOCKED = 1024
_NUMBERS_PER_THREAD = 1 << 18  # some milliseconds of drawing; a thread costs 0.1

Draws = Callable[[ParamSpec], bool]
"""Whether a parameter is drawn. A checkpoint fills the others."""


def _always(_: ParamSpec) -> bool:
    return True


def initial_values(piece: Piece, init: Init, seed: int, *, rows: slice | None = None, threads: int = 1) -> Tensor:
    """This rank's part of the logical tensor `piece`, fp32, as `init` says. `rows` are those of the part to draw.

    The tensor is seen as a matrix of its first dimension and all others. The tiles that the part touches are drawn
    whole and then cut, so the numbers do not depend on the cut. `threads` share them.
    """
    first, last, _ = (rows or slice(None)).indices(piece.local_shape[0])
    shape = (last - first, *piece.local_shape[1:])
    if init.kind == "constant":
        return torch.full(shape, init.value)
    # A part that is cut along a third dimension is drawn whole there.
    drawn = (*shape[:2], *piece.shape[2:])
    local = np.empty((drawn[0], math.prod(drawn[1:])), np.float32)
    start = piece.held.offset[0] + first
    tiles = range(start // _TILE_ROWS, -(-(start + len(local)) // _TILE_ROWS))
    tile_size = _TILE_ROWS * min(_TILE_COLUMNS, math.prod(piece.shape[1:]))
    parts = max(1, min(threads, len(tiles), local.size // _NUMBERS_PER_THREAD, tile_size // _NUMBERS_WHILE_LOCKED))

    def draw(begin: int, end: int) -> None:
        _draw_tiles(local[begin:end], start + begin, piece, init, seed)

    if parts == 1:
        draw(0, len(local))
    else:
        # A part begins with a tile, so that no two threads draw the same one.
        begins = [max(0, tiles[len(tiles) * i // parts] * _TILE_ROWS - start) for i in range(parts)]
        bounds = [*begins, len(local)]
        with ThreadPoolExecutor(parts) as pool:
            for _ in pool.map(draw, bounds, bounds[1:]):
                pass  # raises what a thread has raised
    values = torch.from_numpy(local).view(drawn)
    for dim in range(2, values.dim()):
        values = values.narrow(dim, piece.held.offset[dim], piece.held.size[dim])
    values = values.contiguous()
    # Others than normal numbers are drawn from 0 to 1.
    if init.kind == "log_uniform":
        return values.mul_(init.value - 1).add_(1).log_()
    if init.kind == "time_step":
        least = math.log(1e-3)
        step = values.mul_(math.log(init.value) - least).add_(least).exp_()
        return step.expm1_().log_()  # the inverse of softplus
    if init.kind == "uniform":
        values.mul_(2).sub_(1)
    return values.mul_(init.value)


def _draw_tiles(values: np.ndarray, first: int, piece: Piece, init: Init, seed: int) -> None:
    """Fill `values` with this rank's columns of the rows from number `first` on, before `init.value` scales them."""
    key = int.from_bytes(hashlib.blake2b(piece.name.encode(), digest_size=8).digest(), "little")
    height, width = piece.shape[0], math.prod(piece.shape[1:])
    left = piece.held.offset[1] * math.prod(piece.shape[2:]) if len(piece.shape) > 1 else 0
    # A tile has a stream that begins at its counter. One generator is set to it: a new one for each takes longer.
    bits = np.random.Philox(key=[seed, key])
    generator = np.random.Generator(bits)
    draw = generator.standard_normal if init.kind == "normal" else generator.random
    begin = bits.state
    memory = np.empty(_TILE_ROWS * _TILE_COLUMNS, np.float32)
    for row in range(first // _TILE_ROWS * _TILE_ROWS, first + len(values), _TILE_ROWS):
        for column in range(left // _TILE_COLUMNS * _TILE_COLUMNS, left + values.shape[1], _TILE_COLUMNS):
            begin["state"]["counter"][2:] = row, column
            bits.state = begin
            tile_shape = min(_TILE_ROWS, height - row), min(_TILE_COLUMNS, width - column)
            tile = draw(dtype=np.float32, out=memory[: math.prod(tile_shape)]).reshape(tile_shape)
            rows = slice(max(row, first), min(row + _TILE_ROWS, first + len(values)))
            columns = slice(max(column, left), min(column + _TILE_COLUMNS, left + values.shape[1]))
            values[_from(rows, first), _from(columns, left)] = tile[_from(rows, row), _from(columns, column)]


def _from(part: slice, begin: int) -> slice:
    """The indices of `part`, counted from `begin` on."""
    return slice(part.start - begin, part.stop - begin)


def initialize(modules: Iterable[nn.Module], seed: int, *, draws: Draws = _always, threads: int = 1) -> None:
    """Fill every parameter as its spec says. Padding rows become zero, and what `draws` leaves out too."""
    # By id: a tied parameter is reached through several modules, and filled once.
    for param in {id(p): p for module in modules for p in module.parameters()}.values():
        fill(param, seed=seed, draws=draws, threads=threads)


@torch.no_grad()
def fill(
    param: nn.Parameter,
    elements: slice | None = None,
    *,
    seed: int,
    draws: Draws = _always,
    threads: int = 1,
) -> None:
    """Fill one parameter as its spec says. Padding rows become zero.

    `elements` are those in flat memory that this rank keeps: other rows are not drawn, and become zero. So does a
    parameter that `draws` leaves out.
    """
    spec = spec_of(param)
    param.zero_()  # the pieces below leave the padding rows out
    if not draws(spec):
        return
    start, stop, _ = (elements or slice(None)).indices(param.numel())
    for piece, first, last in spec.segments():
        begin = max(start, first) - first
        end = min(stop, last) - first
        if begin >= end:
            continue
        width = math.prod(piece.local_shape[1:])
        rows = slice(begin // width, -(-end // width))
        values = initial_values(piece, spec.init, seed, rows=rows, threads=threads)
        at = first + rows.start * width
        param.view(-1)[at : at + values.numel()].copy_(values.view(-1))


def row_keys(seed: int, use: int, first: Tensor, *others: Tensor) -> Tensor:
    """A 32-bit key, stored as int64, for each row of a dropout mask.

    `use` numbers the places with dropout in a model. `first` and `others` are global coordinates, such as sample
    id, position and head. They broadcast against each other.
    """
    # Seed and use are mixed as Python numbers. As tensors they would have to be copied to the GPU, and the copy waits
    # for all work in the GPU's queue.
    start = mix((seed * 0x9E3779B1 + use) & _MASK)
    # Coordinates have up to 64 bits and `mix` takes 32, so both halves are mixed in.
    key = mix(mix((start + first) & _MASK) ^ (first >> 32))
    for x in others:
        key = mix(mix((key + x) & _MASK) ^ (x >> 32))
    return key


@dataclass(frozen=True)
class Tokens:
    """The tokens [s, b] of a micro-batch, by sample and position, and the seed of dropout: what masks follow from."""

    seed: int
    sample_ids_b: Tensor
    positions_s: Tensor

    def keys(self, use: int) -> Tensor:
        """The keys [s, b] of the mask of a place with dropout, with number `use`."""
        return row_keys(self.seed, use, self.sample_ids_b[None, :], self.positions_s[:, None])
