"""The declaration of a parameter (`ParamSpec`), made once by the layer creating it.

Initialization, gradient sums, gradient norm, weight decay, the optimizer, ZeRO ownership and the boxes of a checkpoint
all follow from `ParamSpec`. A parameter without one is an error. How a parameter is treated follows from its spec
alone, never from its class, its number of dimensions or its name. Two exceptions: the user's options train.trainable
(`selected`) and optimizer.groups select by name.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megapar.comm.axis import Axis

Sizes = tuple[int, ...]

ADAPTER = "adapter"
"""`ParamSpec.added_by` of the factors of an adapter."""

# Sizes that 16 does not divide cost vector loads, so the vocabulary is padded.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: the constant `value`, or random numbers.

    `normal` draws from a normal distribution of mean 0 and standard deviation `value`, and `uniform` evenly from -value
    to value. `log_uniform` is the logarithm of a number between 1 and `value`, and `time_step` the inverse softplus of
    one drawn evenly by its logarithm from 0.001 to `value`: A_log and dt_bias of Mamba-2 (arXiv 2405.21060). The same
    seed, name of the tensor and place in it give the same number, under every parallel layout.
    """

    kind: Literal["normal", "uniform", "log_uniform", "time_step", "constant"]
    value: float


ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)


class Box(NamedTuple):
    """A rectangular part of a tensor: indices from `offset` to `offset + size`, with one number for each dimension."""

    offset: Sizes
    size: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True)
class Piece:
    """This rank's part of one logical tensor.

    A logical tensor is the whole tensor, as a checkpoint stores it. It is the same under every parallel layout. `name`
    and `shape` are those of the logical tensor.
    """

    name: str
    shape: Sizes
    held: Box
    """The box of the logical tensor held by this rank."""
    owned: Box | None
    """The box inside `held` that this rank counts in norms and writes to checkpoints.

    It is None if other ranks own all of `held`. Over the ranks of one data-parallel replica (see ParamSpec.grad_axis),
    owned boxes are disjoint and cover the tensor.
    """
    same_on: tuple[Axis, ...] = ()
    """The axes within a data-parallel replica with the same box on all their ranks."""
    partial: tuple[Axis, ...] = ()
    """The axes with a partial gradient on each rank. The parts of all ranks must be added.

    Gradients are partial for norm weights under sequence parallelism, for rows held by several tensor-parallel ranks,
    and for the copies of a tied embedding.
    """
    blocks: tuple[int, ...] = ()
    """Rows of the blocks of a matrix, in turn down to its last row: (128,) for heads of 128 rows each.

    With optimizer.muon_per_head each block is a matrix of its own. Empty: the whole is one block.
    """
    grows: bool = False
    """Whether there is a row for each id of the vocabulary. A run may start from weights of fewer ids."""

    @property
    def local_shape(self) -> Sizes:
        return self.held.size

    def is_partial_over(self, axis_name: str) -> bool:
        return any(axis.name == axis_name for axis in self.partial)


@dataclass(frozen=True)
class ParamSpec:
    """The declaration attached to a parameter, or to a buffer."""

    pieces: tuple[Piece, ...]
    """The pieces of the parameter, one after the other in flat memory.

    Unused padding rows may follow the last piece.
    """
    init: Init
    decay: bool
    """Whether weight decay applies."""
    grad_axis: Axis
    """The axis of the gradient sum: `ParallelContext.grad`, or `expert_grad` for experts.

    Its ranks have different samples, or different positions of them. The ranks with the same position on it form one
    data-parallel replica. Under ZeRO the optimizer state is sharded over its `shards`.
    """
    update: Literal["element", "matrix"] = "element"
    """What an optimizer may see in the parameter. "matrix": each piece is the matrix of a hidden linear layer.

    Embeddings, heads, routers, adapters, norms and biases are elements to every optimizer.
    """
    optimizer: str = ""
    """"" for the optimizer of the run (optimizer.name), or MODULE:NAME for one of your own, whatever the run's is."""
    token_share: Fraction = Fraction(1)
    """The share of tokens using the parameter: num_experts_per_tok / num_experts for those of experts.

    Counts of active parameters and of FLOPs read it.
    """
    selected_with: tuple[str, ...] = ()
    """Further logical tensors that train.trainable must treat like this parameter, such as the experts of other ranks.

    If ranks disagreed on what needs a gradient, some would wait for the others in backward.
    """
    training_state: bool = False
    """Of a buffer: whether training alone needs it. A checkpoint of weights alone does not have it."""
    added_by: str = ""
    """What adds the tensor to a model: an option without `model.`, or ADAPTER.

    A run may start from weights of a model made without it. The tensor then keeps its initial value.
    """
    quantized: bool = False
    """Whether matrix products read the parameter in FP8 blocks of 128 x 128 alone (`megapar_kernels.quantize`).

    128 then divides the rows and the columns of the parameter [rows, in], and the rows of each piece. ZeRO-3 gathers
    the codes of such a parameter instead of its values.
    """
    precise: bool = False
    """Whether it is fp32 in a 16-bit model too, and so its own main weight: for few numbers, such as decay rates."""

    def names_to_select(self) -> list[str]:
        """The logical tensors that train.trainable must select together or not at all, sorted, each once."""
        return sorted({*self.selected_with, *(piece.name for piece in self.pieces)})

    @property
    def name(self) -> str:
        """The logical name. The names of the pieces of a fused parameter are joined with '+'."""
        return "+".join(piece.name for piece in self.pieces)

    def same_over(self) -> tuple[str, ...]:
        """Sorted names of the axes with the same part of every piece on all their ranks."""
        # The pieces of a fused parameter may be cut in different ways.
        common = {axis.name for axis in self.pieces[0].same_on}
        for piece in self.pieces[1:]:
            common &= {axis.name for axis in piece.same_on}
        return tuple(sorted(common))

    def partial_axes(self) -> list[Axis]:
        """The axes over which the gradient of some piece must be summed (see `Piece.partial`), each once.

        Axes of one rank are left out, because there is nothing to sum.
        """
        # The key is the name, so that an axis over which several pieces are partial occurs once.
        axes = {axis.name: axis for piece in self.pieces for axis in piece.partial if axis.size > 1}
        return list(axes.values())

    def segments(self) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, start, stop) for each piece: its flat elements [start, stop) in the contiguous parameter."""
        start = 0
        for piece in self.pieces:
            stop = start + piece.held.numel
            yield piece, start, stop
            start = stop

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Flat ranges [start, stop) of the local parameter owned by this rank (see `Piece.owned`)."""
        ranges = []
        for piece, piece_start, _ in self.segments():
            if piece.owned is None:
                continue
            offsets = zip(piece.owned.offset, piece.held.offset, strict=True)
            inside = tuple(owned - held for owned, held in offsets)
            for start, stop in flat_ranges(piece.held.size, Box(inside, piece.owned.size)):
                ranges.append((piece_start + start, piece_start + stop))
        return ranges


def selected(spec: ParamSpec, patterns: Sequence[str]) -> bool:
    """Whether train.trainable with `patterns` trains this parameter. Without patterns it does.

    A fused parameter has one gradient, so the patterns must match all of `spec.names_to_select`.
    """
    matched = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in spec.names_to_select()]
    return not patterns or all(matched)


def flat_ranges(shape: Sizes, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the elements of `box` in a row-major tensor of `shape` as flat ranges [start, stop), in ascending order."""
    if box.numel == 0:  # an empty box has no ranges
        return
    covered_from = len(shape)  # the box covers this dimension and those after it completely
    while covered_from > 0 and box.size[covered_from - 1] == shape[covered_from - 1]:
        covered_from -= 1
    # A run of contiguous elements covers the trailing dimensions that the box covers completely, and the box's extent
    # in the dimension before them.
    run_dim = max(covered_from - 1, 0)
    run_length = math.prod(box.size[run_dim:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first_run = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    # There is one run for each index into the dimensions before run_dim.
    outer_strides = strides[:run_dim]
    for index in itertools.product(*(range(size) for size in box.size[:run_dim])):
        start = first_run + sum(i * stride for i, stride in zip(index, outer_strides, strict=True))
        yield start, start + run_length


def cut(size: int, axis: Axis) -> tuple[int, int]:
    """Split range(size) into contiguous parts, one for each rank of `axis`. Returns this rank's [start, stop).

    The parts' lengths differ by at most one.
    """
    # Neighbors compute the same number for the border between them, so nothing is lost or held twice.
    return axis.rank * size // axis.size, (axis.rank + 1) * size // axis.size


def cut_unit(size: int, parts: int) -> int:
    """The largest number that divides every border of `cut` over `parts` ranks, and `size`."""
    return math.gcd(*(rank * size // parts for rank in range(parts + 1)))


def make_piece(name: str, shape: Sequence[int], cuts: Mapping[int, tuple[int, int]], *, grows: bool = False) -> Piece:
    """The piece [start, stop) along each dimension in `cuts`, else whole. Its owner alone holds it in a replica."""
    offset = [0] * len(shape)
    size = list(shape)
    for dim, (start, stop) in cuts.items():
        offset[dim] = start
        size[dim] = stop - start
    held = Box(tuple(offset), tuple(size))
    return Piece(name, tuple(shape), held, held, grows=grows)


def shared_piece(name: str, shape: Sequence[int], axis: Axis, *, partial: bool = False) -> Piece:
    """The piece of a tensor held whole by every rank of `axis`. The first rank owns it.

    With `partial`, each rank computes a part of the gradient, and the parts are added over `axis`. Otherwise every rank
    computes the same gradient.
    """
    return held_by_all(make_piece(name, shape, {}), axis, partial=partial)


def held_by_all(piece: Piece, axis: Axis, *, partial: bool) -> Piece:
    """Mark `piece` as held by every rank of `axis`. The first rank owns it. `partial` is as in `shared_piece`."""
    # One owner only, so that norms count each element once and checkpoints hold it once.
    owned = piece.owned if axis.first else None
    partial_axes = (*piece.partial, axis) if partial else piece.partial
    return replace(piece, owned=owned, same_on=(*piece.same_on, axis), partial=partial_axes)


def parameter(spec: ParamSpec, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Make an uninitialized parameter of the local `shape` and attach `spec` to it.

    `shape` may have more rows than the pieces of `spec`: padding rows. `dtype` is the model's (`ParamSpec.precise`).
    """
    if spec.precise:
        dtype = torch.promote_types(dtype, torch.float32)
    param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))
    param.spec = spec  # type: ignore[attr-defined]
    return param


def spec_of(param: Tensor, name: str = "parameter") -> ParamSpec:
    """The spec of `param`. Raises TypeError, naming the parameter `name`, if it has no spec."""
    spec = getattr(param, "spec", None)
    if not isinstance(spec, ParamSpec):
        raise TypeError(
            f"{name} of shape {tuple(param.shape)} has no ParamSpec: create it with megapar.declare.params.parameter()"
        )
    return spec


MAIN = "main"
"""Key of the main weights in StateSlice.tensors. The optimizer chooses the other keys, but for AVERAGE."""
AVERAGE = "average"
"""Key of the fp32 average of main weights over the steps (optimizer.ema)."""
REMAINDER = "remainder"
"""Name of the lower halves of main weights among an optimizer's state, if the upper halves are the parameters."""
