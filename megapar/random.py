"""Random numbers, the same in every layout. Each is a function of its purpose, not of the rank or the time of drawing.

Initial weights come from numpy's Philox generator, with one stream for each row of each logical tensor, keyed by (seed,
name, row). Dropout hashes (seed, use, sample, position, element) with 32-bit integer arithmetic. A GPU kernel repeats
it exactly.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from megapar_kernels.dropout import keep_mask, mix
from torch import Tensor, nn

from megapar.params import Init, Piece, spec_of

__all__ = ["Tokens", "fill", "initial_values", "initialize", "keep_mask", "row_keys"]

_MASK = 0xFFFFFFFF


def initial_values(piece: Piece, init: Init, seed: int) -> Tensor:
    """This rank's part of the logical tensor `piece`, fp32, as `init` says.

    Whole rows are drawn and then cut, so the numbers do not depend on the cut.
    """
    if init.kind == "constant":
        return torch.full(piece.local_shape, init.value)
    key = int.from_bytes(hashlib.blake2b(piece.name.encode(), digest_size=8).digest(), "little")
    rows, *others = piece.held.slices
    row_shape = piece.shape[1:]
    width = math.prod(row_shape)
    # One row at a time: a rank needs no memory for the whole tensor. A row has a stream that begins at its counter.
    # One generator is set to it, because a new one for each row would take longer than short rows do.
    bits = np.random.Philox(key=[seed, key])
    generator = np.random.Generator(bits)
    draw = generator.standard_normal if init.kind == "normal" else generator.random
    begin = bits.state
    local = np.empty(piece.local_shape, np.float32)
    for i, row in enumerate(range(rows.start, rows.stop)):
        begin["state"]["counter"][2] = row
        bits.state = begin
        local[i] = draw(width, np.float32).reshape(row_shape)[tuple(others)]
    values = torch.from_numpy(local)
    if init.kind == "uniform":
        values.mul_(2).sub_(1)  # drawn from 0 to 1
    return values.mul_(init.value)


def initialize(modules: Iterable[nn.Module], seed: int) -> None:
    """Fill every parameter as its spec says. Padding rows become zero."""
    # By id: a tied parameter is reached through several modules, and filled once.
    for param in {id(p): p for module in modules for p in module.parameters()}.values():
        fill(param, seed)


@torch.no_grad()
def fill(param: nn.Parameter, seed: int) -> None:
    """Fill one parameter as its spec says. Padding rows become zero."""
    spec = spec_of(param)
    param.zero_()  # the pieces below leave the padding rows out
    for piece, first, last in spec.segments():
        param.view(-1)[first:last].copy_(initial_values(piece, spec.init, seed).view(-1))


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
