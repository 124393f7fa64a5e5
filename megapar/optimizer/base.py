"""The interface of optimizers. `table` chooses those of a run, `optimizers` holds them."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar.base.grid import Grid
from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import ALIGNMENT, Range, intersect
from megapar.data_parallel.layout import FlatLayout, Update
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateTensor
from megapar.declare.params import AVERAGE, REMAINDER
from megapar.optimizer.host_updates import HostUpdates
from megapar.optimizer.visits import UpdateArgs, UpdateShard, Visit


@dataclass(frozen=True)
class NoOptions:
    """The options of an optimizer without options of its own."""


class Optimizer(ABC):
    """Updates this rank's shards of the parameters of one `Update`.

    A subclass declares its state in `STATE`, and updates a part of a shard in `update`. Main weights are fp32. For an
    fp32 model they are the parameters themselves. For a bf16 or fp16 model they are kept here, and rounded into the
    parameters after each step. Or the parameters are their upper halves, and a state named REMAINDER the lower ones.
    """

    STATE: ClassVar[Sequence[StateTensor]] = ()
    """Tensors kept for each element besides the main weight. Their names are unique among a run's optimizers."""

    OPTIONS: ClassVar[type] = NoOptions
    """A dataclass. Its fields have the names of the options of OptimizerConfig read by this optimizer alone."""

    WHOLE: ClassVar[bool] = False
    """Whether it needs whole parameters. ZeRO then never cuts one, and `update` is called for one at a time.

    A parameter cut by tensor ranks counts as whole if this rank's part is whole. If sizes differ, its parts may then
    belong to different replicas on different tensor ranks. A collective over tensor ranks in `update` would
    hang there: use one only if all tensor ranks have parts of one size.
    """

    OFFLOADS: ClassVar[bool] = False
    """Whether optimizer.offload may put a share of main weights and state into host memory.

    The update of a part of a shard must then be that of the whole, element by element, and run on a CPU.
    """

    HOST_ELEMENTS: ClassVar[int] = 16 << 20
    """How many elements are updated on the host at one time: it takes four times 64 MiB or less for them to travel."""

    takes_found_inf = False
    """Whether `update` takes `UpdateArgs.found_inf`. Otherwise the host reads it before the updates, and waits for
    it."""

    MATRICES_ONLY: ClassVar[bool] = False
    """Whether it updates matrices alone (`ParamSpec.update`). If it is the run's, AdamW updates the elements."""

    JOINS_MATRICES: ClassVar[bool] = False
    """Whether the ranks with parts of a matrix send each other these parts in an update (`ParallelContext.plane_of`).

    A run then connects all ranks with parts of a matrix. If a layer names such an optimizer for its own parameters, the
    options of the model name the optimizer too (`ModelConfig.optimizers_of_layers`).
    """

    def __init__(
        self,
        updates: Update,
        weights: Weights,
        gradients: ReducedGradients,
        ctx: ParallelContext,
        config: OptimizerConfig,
        impl: Implementation = "torch",
        seed: int = 0,
    ):
        """`updates` are its parameters. `impl` is the implementation of the update, if there are several.

        `seed` is train.seed, for updates that round randomly.
        """
        self.updates = updates
        self.ctx = ctx
        self.seed = seed
        self.states = self.states_of(config)
        self.dtype = weights.flat.dtype
        self._averages = config.ema > 0
        self.options: Any = self.OPTIONS(**{field.name: getattr(config, field.name) for field in fields(self.OPTIONS)})
        self.impl: Implementation = impl
        self.slots = [slot for slot in weights.layout.slots if slot.update == updates]
        share = self.host_share(config)
        parts = [part for bounds in weights.layout.shards_of(updates) for part in split_by_place(bounds, share)]
        self.shards = [self._new_shard(weights, *part) for part in parts]
        # Made once: a step would look up the views again.
        self.visits = [
            Visit(shard.part(start, stop), gradients.part(start, stop), weights.part(start, stop))
            for shard in self.shards
            for start, stop in self._cut(shard)
        ]
        on_host = [visit for visit in self.visits if visit.shard.on_host]
        self.host_updates = HostUpdates(on_host, self._update_on_host, weights.flat.dtype, weights.flat.device)

    @classmethod
    def host_share(cls, config: OptimizerConfig) -> float:
        """The share of this optimizer's state in host memory."""
        return config.offload if cls.OFFLOADS else 0.0

    @classmethod
    def states_of(cls, config: OptimizerConfig) -> Sequence[StateTensor]:
        """`STATE`, as these options want it."""
        return cls.STATE

    @classmethod
    def planned_nbytes(cls, shards: Iterable[Range], dtype: torch.dtype, config: OptimizerConfig) -> dict[bool, int]:
        """The `nbytes` of an optimizer of `shards`, by whether they are in host memory."""
        states = cls.states_of(config)
        state = sum(tensor.dtype.itemsize for tensor in states) + (torch.float32.itemsize if config.ema else 0)
        parts = [part for bounds in shards for part in split_by_place(bounds, cls.host_share(config))]
        found = {False: 0, True: 0}
        for start, stop, on_host in parts:
            main = 0 if keeps_no_main_weights(dtype, on_host, states) else torch.float32.itemsize
            found[on_host] += (stop - start) * (main + state)
        sizes = [size for start, stop, on_host in parts if on_host for size in cls._sizes(stop - start)]
        found[True] += HostUpdates.planned_nbytes(sizes, dtype)
        return found

    @classmethod
    def matrix_products(cls, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        """Return the matrix products [m, k] x [k, n] of the update of one whole matrix, as (m, k, n). For plans."""
        return ()

    def join_in_plan(self, grid: Grid, layout_of_rank: Callable[[int], FlatLayout]) -> None:
        """Find what the ranks of a run tell each other in the first update. For plans, where no other rank exists.

        `layout_of_rank` builds the layout of another rank of `grid`. Raises NotImplementedError if an optimizer joins
        matrices and does not override this.
        """
        if self.JOINS_MATRICES:
            raise NotImplementedError(f"{type(self).__name__} joins matrices, so it must override join_in_plan")

    @abstractmethod
    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        """Update `shard` once with its reduced gradient `grad`, 1-D fp32. The update may change `grad`.

        `params` are the 16-bit weights. The new main weights are rounded into them. `params` is None if the main
        weights are the parameters, and for state on the host: its main weights are copied into the parameters
        afterwards.
        """

    def step(self, step: UpdateArgs) -> None:
        """Update all shards. An optimizer overrides this if its update takes several passes over them."""
        for visit in self.visits:
            if not visit.shard.on_host:
                self.update(visit.shard, visit.grad, None if self.aliased(visit.shard) else visit.params, step)
        # A device has the updates above to compute meanwhile.
        if self.on_host:
            clip = None if step.clip is None else step.clip.cpu()
            self.host_updates.run(replace(step, clip=clip))

    def _update_on_host(self, visit: Visit, grad: Tensor, step: UpdateArgs) -> None:
        self.update(visit.shard, grad, None, step)

    def aliased(self, shard: UpdateShard) -> bool:
        """Whether the main weights of a shard are the parameters themselves."""
        return keeps_no_main_weights(self.dtype, shard.on_host, self.states)

    @property
    def on_host(self) -> bool:
        """Whether any of its state is in host memory."""
        return any(shard.on_host for shard in self.shards)

    def decay(self, shard: UpdateShard, step: UpdateArgs) -> None:
        """Decoupled weight decay: W = (1 - lr wd) W. It needs an option weight_decay in `OPTIONS`."""
        for start, stop in self.ranges_where_decayed(shard):
            shard.main[start:stop].mul_(1 - step.lr * self.options.weight_decay)

    def ranges_where_decayed(self, shard: UpdateShard) -> list[Range]:
        """The ranges of `shard` with weight decay, counted from its start. Padding is in them."""
        slots = [(slot.start, slot.end) for slot in self.slots if slot.spec.decay]
        inside = intersect(slots, [(shard.start, shard.stop)])
        return [(start - shard.start, stop - shard.start) for start, stop in inside]

    def nbytes(self, *, on_host: bool) -> int:
        """Bytes of state on this rank, in host memory or in the device's.

        This includes main weights unless they are the parameters themselves. On the host it includes the memory through
        which gradients and weights travel.
        """
        shards = [shard for shard in self.shards if shard.on_host == on_host]
        total = sum(tensor.nbytes for shard in shards for tensor in shard.state.values())
        total += sum(shard.main.nbytes for shard in shards if not self.aliased(shard))
        return total + (self.host_updates.nbytes if on_host else 0)

    def _new_shard(self, weights: Weights, start: int, stop: int, on_host: bool) -> UpdateShard:
        params = weights.part(start, stop)
        device = params.device
        if on_host and device.type != "meta":  # a plan has no memory to put it into
            device = torch.device("cpu")
        # A view for an fp32 model, so that an update of the main weights is one of the parameters.
        main = params
        if not keeps_no_main_weights(params.dtype, on_host, self.states):
            main = params.to(device, torch.float32, copy=True)
        state = {
            tensor.name: torch.full_like(main, tensor.initial, dtype=tensor.dtype, device=device)
            for tensor in self.states
        }
        if self._averages:
            state[AVERAGE] = main.clone()
        return UpdateShard(start, stop, main, state, self.slots, on_host)

    def _cut(self, shard: UpdateShard) -> list[Range]:
        """The ranges of the layout updated at one time."""
        if self.WHOLE:
            return [(slot.start, slot.stop) for slot in self.slots if shard.start <= slot.start < shard.stop]
        if not shard.on_host:
            return [(shard.start, shard.stop)]
        ends = list(itertools.accumulate(self._sizes(shard.stop - shard.start), initial=shard.start))
        return list(itertools.pairwise(ends))

    @classmethod
    def _sizes(cls, elements: int) -> list[int]:
        """The numbers of elements updated on the host at one time."""
        # Whole vectors: the elements behind the last one would be rounded in another way (`ALIGNMENT`).
        most = max(cls.HOST_ELEMENTS // ALIGNMENT, 1) * ALIGNMENT
        return [min(most, elements - start) for start in range(0, elements, most)]


def keeps_no_main_weights(dtype: torch.dtype, on_host: bool, states: Sequence[StateTensor]) -> bool:
    """Whether the main weights of parameters of this dtype, or their upper halves, are the parameters themselves."""
    in_halves = any(tensor.name == REMAINDER for tensor in states)
    return (dtype == torch.float32 or in_halves) and not on_host  # on the host they are in other memory


def split_by_place(bounds: Range, host_share: float) -> list[tuple[int, int, bool]]:
    """Cut a shard into (start, stop, whether in host memory). The share on the host comes last, in whole vectors."""
    start, stop = bounds
    border = start + int((1 - host_share) * (stop - start) / ALIGNMENT) * ALIGNMENT
    parts = [(start, border, False), (border, stop, True)]
    if not host_share:
        parts = [(start, stop, False)]
    return [part for part in parts if part[0] < part[1]]
