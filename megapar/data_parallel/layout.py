"""The layout of parameters in a rank's flat buffers. Weights, gradients and optimizer state share these offsets.

Parameters are grouped, in each group in reverse registration order. Their gradients become final in about this order.
They are grouped into buckets. All parameters of a bucket have one update (`Update`). One collective reduces their
gradients over their data-parallel axis (`ParamSpec.grad_axis`). Under ZeRO each rank of that axis updates an equal
slice of the bucket, its shard (Rajbhandari et al., arXiv 1910.02054).

With ZeRO-2 and 3 a bucket is a unit: parameters of one fine stage (`megapar.pipeline.refine`), as far as they may share
a bucket. Then a buffer may hold this rank's shards alone (`megapar.data_parallel.placement`). Parameters that products
read in FP8 blocks (`ParamSpec.quantized`) have units of their own.
In a 16-bit model fp32 parameters (`ParamSpec.precise`) have the last buckets.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from megapar_kernels.quantize import GROUP
from torch import nn

from megapar.base.grid import TIED_AXIS
from megapar.comm.axis import Axis
from megapar.data_parallel.buckets import ALIGNMENT, Bucket, BucketGroup, Range, intersect, lay_out, merge
from megapar.data_parallel.dtypes import common_dtype, gathered_itemsize
from megapar.declare.params import ParamSpec, spec_of


class Update(NamedTuple):
    """Who updates a parameter, and with which factors of the learning rate and of the weight decay of the run."""

    optimizer: str = "adamw"
    lr: float = 1.0
    decay: float = 1.0
    precise: bool = False  # the parameter is fp32 among 16-bit ones, as the layout finds

    @classmethod
    def by_spec(cls, spec: ParamSpec) -> "Update":
        """The update of a run without options: by the optimizer of the spec, or by AdamW."""
        return cls(spec.optimizer or "adamw")


@dataclass(frozen=True)
class Slot:
    """A parameter's elements [start, stop) of the buffers.

    [stop, end) is padding: zero in weights, and zeroed in gradients before each reduction.
    """

    param: nn.Parameter
    spec: ParamSpec
    start: int
    stop: int
    end: int
    bucket_index: int
    update: Update

    @property
    def name(self) -> str:
        return self.spec.name


DeclaredParam = tuple[nn.Parameter, ParamSpec]


class HasParameters(Protocol):
    """A module, or what a plan has in its place: the parameters alone."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters in the order of their registration."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of `parameters` with its name in the module."""


class FlatLayout:
    """Slots and buckets of all trained parameters of a rank's stages.

    `modules` are this rank's stages in order. A bucket has about `bucket_elements` elements. `sharded` selects ZeRO:
    each rank of a bucket's axis updates a slice of it. Otherwise each rank updates all of it. With `units`, a bucket
    holds parameters of one module alone. A parameter used by several modules is in a bucket used by all of them.
    `whole` names the optimizers needing each parameter in one shard: ZeRO then never cuts it. `update_of` says who
    updates a parameter (`megapar.optimizer.table.update_of`). `dtype` is that of all parameters but precise ones.

    Raises TypeError if a parameter has no ParamSpec or another dtype (`common_dtype`). Raises ValueError if 128 does
    not divide a matrix that products read in FP8 blocks, with `units`.
    """

    def __init__(
        self,
        modules: Sequence[HasParameters],
        bucket_elements: int,
        *,
        sharded: bool,
        units: bool = False,
        whole: Collection[str] = (),
        update_of: Callable[[ParamSpec], Update] = Update.by_spec,
    ):
        declared = _collect(modules)
        self.sharded = sharded
        self._units = units
        self.dtype = common_dtype(declared)
        update_of = _by_dtype(update_of, self.dtype)
        groups = _in_groups(declared, update_of, units=units)
        if units:
            groups = [unit for group in groups for unit in _by_users(group, modules)]
        bucket_groups = []
        for group in groups:
            sizes = [param.numel() for param, _ in group]
            _, spec = group[0]  # `grad_axis` and the update are the same for all parameters of a group
            never_cut = update_of(spec).optimizer in whole
            # A piece of a row, of which a block of codes has 128 below each other, lies on one rank.
            alignment = GROUP if units and spec.quantized else ALIGNMENT
            bucket_groups.append(BucketGroup(sizes, spec.grad_axis.shards.size, never_cut, alignment))
        starts, self.buckets = lay_out(bucket_groups, bucket_elements)
        self.slots = _slots([pair for group in groups for pair in group], update_of, starts, self.buckets)
        self._bucket_of = {id(slot.param): slot.bucket_index for slot in self.slots}
        self.numel = self.buckets[-1].stop if self.buckets else 0
        self.precise_start = min((slot.start for slot in self.slots if slot.update.precise), default=self.numel)

    @classmethod
    def of_units(
        cls,
        modules: Sequence[HasParameters],
        *,
        whole: Collection[str] = (),
        update_of: Callable[[ParamSpec], Update] = Update.by_spec,
    ) -> "FlatLayout":
        """The layout of ZeRO-2 and 3. Its buckets are units."""
        return cls(modules, sys.maxsize, sharded=True, units=True, whole=whole, update_of=update_of)

    def buckets_of(self, module: HasParameters) -> list[int]:
        """The indices of the buckets with parameters of `module`. A frozen parameter is in none."""
        found = {self._bucket_of.get(id(param)) for param in module.parameters()}
        return sorted(index for index in found if index is not None)

    def axis(self, bucket: Bucket) -> Axis:
        """The axis over which ZeRO shards a bucket. Without ZeRO, the axis of its gradient sum."""
        return self.slots[bucket.first_param].spec.grad_axis.shards

    def copies(self, bucket: Bucket) -> Axis:
        """The ranks with copies of this rank's shard of a bucket. Its sum goes on over them."""
        return self.slots[bucket.first_param].spec.grad_axis.copies

    def is_quantized(self, bucket: Bucket) -> bool:
        """Whether a bucket is a unit of parameters that products read in FP8 blocks. ZeRO-3 gathers their codes."""
        return self._units and self.slots[bucket.first_param].spec.quantized

    def gathered_nbytes(self, bucket: Bucket) -> int:
        """The bytes of a unit while ZeRO-3 has gathered it for a step, padding included."""
        dtype = self.dtype_of(self.update_of(bucket))
        return bucket.numel * gathered_itemsize(self.slots[bucket.first_param].spec, dtype)

    def shard(self, bucket: Bucket) -> Range:
        """The part of a bucket updated by this rank's optimizer."""
        if not self.sharded:
            return bucket.start, bucket.stop
        axis = self.axis(bucket)
        return bucket.shard(axis.rank, axis.size)

    @property
    def everything(self) -> list[Range]:
        """All elements."""
        return [(0, self.numel)]

    def update_of(self, bucket: Bucket) -> Update:
        """Who updates the parameters of a bucket."""
        return self.slots[bucket.first_param].update

    def dtype_of(self, update: Update) -> torch.dtype:
        """The dtype of the parameters with this update."""
        return torch.float32 if update.precise else self.dtype

    def updates(self) -> list[Update]:
        """Return the distinct updates of all parameters, sorted."""
        return sorted({slot.update for slot in self.slots})

    def shards(self) -> list[Range]:
        """The elements updated by this rank's optimizers, in as few ranges as possible."""
        return merge(self.shard(bucket) for bucket in self.buckets)

    def shards_of(self, update: Update) -> list[Range]:
        """Return the elements of `shards` that this update changes, in as few ranges as possible."""
        return merge(self.shard(bucket) for bucket in self.buckets if self.update_of(bucket) == update)

    def norm_ranges(self) -> list[Range]:
        """The elements this rank counts in the gradient norm, and the padding between them. Padding is zero.

        Over all ranks each element of the model is counted once. Several ranks of a replica may hold copies of it: the
        rank with the element in its `Piece.owned` counts it. Of the replicas, the one with the element in its ZeRO
        shard counts it, and the first one if several have copies of the shard. Without ZeRO the first replica counts
        it.
        """
        owned = []
        for slot in self.slots:
            grad_axis = slot.spec.grad_axis
            if not grad_axis.copies.first or not (self.sharded or grad_axis.first):
                continue
            for start, stop in slot.spec.owned_ranges():
                # Include the padding after a parameter, so that neighboring ranges join: fewer ranges are faster.
                end = slot.end if slot.start + stop == slot.stop else slot.start + stop
                owned.append((slot.start + start, end))
        return intersect(merge(owned), self.shards())

    def uncounted_ranges(self) -> list[Range]:
        """The elements of this rank's shards outside of `norm_ranges`.

        They are padding, or another rank counts its own copy of them.
        """
        counted = self.norm_ranges()
        # What lies between the counted ranges, before the first and after the last.
        starts = [0, *(stop for _, stop in counted)]
        stops = [*(start for start, _ in counted), self.numel]
        between = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
        return intersect(between, self.shards())


def _collect(modules: Sequence[HasParameters]) -> list[DeclaredParam]:
    """Each distinct parameter needing a gradient, once, in reverse registration order.

    A parameter without elements has no place in buffers: a rank may hold none of a layer's experts.
    """
    names = {param: name for module in modules for name, param in module.named_parameters() if param.requires_grad}
    return [(param, spec_of(param, name)) for param, name in reversed(names.items()) if param.numel()]


def _by_dtype(update_of: Callable[[ParamSpec], Update], dtype: torch.dtype) -> Callable[[ParamSpec], Update]:
    """`update_of`, with `Update.precise` for parameters that are fp32 in a model of `dtype`."""
    if dtype == torch.float32:
        return update_of
    return lambda spec: update_of(spec)._replace(precise=spec.precise)


def _in_groups(
    params: Sequence[DeclaredParam], update_of: Callable[[ParamSpec], Update], *, units: bool
) -> list[list[DeclaredParam]]:
    """Group parameters by whether they may share buckets.

    The parameters of a group have the same update. They are summed over the same axis, and replicated over the same
    other axes.

    The rounding of a sum over three or more ranks depends on an element's position in its bucket. Copies of a parameter
    must not drift apart. So the buckets of the copies must be laid out alike on all ranks with a copy, however other
    parameters are cut. On an axis of one rank there are no copies. With `units` such axes do not count, and a layer has
    fewer units. But parameters read in FP8 blocks are then apart from others, because ranks gather another dtype.
    """
    groups: dict[tuple[tuple[str, ...], str, Update, bool], list[DeclaredParam]] = {}
    for param, spec in params:
        sizes = {axis.name: axis.size for piece in spec.pieces for axis in piece.same_on}
        replicated = tuple(name for name in spec.same_over() if not units or sizes[name] > 1)
        is_quantized = units and spec.quantized
        if is_quantized and (param.dim() != 2 or any(size % GROUP for size in param.shape)):
            raise ValueError(
                f"{spec.name} is {' x '.join(map(str, param.shape))}: {GROUP} must divide rows and columns of a matrix "
                "that products read in FP8 blocks; declare it without `quantized`"
            )
        key = (replicated, spec.grad_axis.name, update_of(spec), is_quantized)
        groups.setdefault(key, []).append((param, spec))
    # Sorted by name, because the stage at the other end may have registered its copies in another order.
    for (replicated, _, _, _), group in groups.items():
        if TIED_AXIS in replicated:
            group.sort(key=lambda pair: pair[1].name)
    # Tied parameters come last: the gradient of an embedding becomes final at the very end of the backward pass. Behind
    # them are fp32 parameters of a 16-bit model, because they are in another buffer (`Weights.precise`).
    return [groups[key] for key in sorted(groups, key=lambda key: (key[2].precise, TIED_AXIS in key[0], key))]


def _by_users(group: Sequence[DeclaredParam], modules: Sequence[HasParameters]) -> list[list[DeclaredParam]]:
    """Split a group of parameters by the modules using them, in the order of the group."""
    users: dict[int, list[int]] = {}  # by id of the parameter
    for number, module in enumerate(modules):
        for param in module.parameters():
            users.setdefault(id(param), []).append(number)
    units: dict[tuple[int, ...], list[DeclaredParam]] = {}
    for param, spec in group:
        units.setdefault(tuple(users[id(param)]), []).append((param, spec))
    return list(units.values())


def _slots(
    params: Sequence[DeclaredParam],
    update_of: Callable[[ParamSpec], Update],
    starts: Sequence[int],
    buckets: Sequence[Bucket],
) -> list[Slot]:
    """`params` and `starts` are in the same order."""
    slots = []
    for bucket_index, bucket in enumerate(buckets):
        for i in range(bucket.first_param, bucket.end_param):
            param, spec = params[i]
            end = starts[i + 1] if i + 1 < bucket.end_param else bucket.stop
            stop = starts[i] + param.numel()
            slots.append(Slot(param, spec, starts[i], stop, end, bucket_index, update_of(spec)))
    return slots
