"""What an optimizer declares before it is made. Plans and the layout of buffers read no more of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import ALIGNMENT, Range
from megapar.declare.optimizer_state import StateTensor
from megapar.declare.params import REMAINDER
from megapar.optimizer.host_updates import HostUpdates


@dataclass(frozen=True)
class NoOptions:
    """The options of an optimizer without options of its own."""


class OptimizerDeclaration:
    """The declarations of an `Optimizer`: its state, its options, and what its update needs of a layout."""

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

    FUSES: ClassVar[bool] = False
    """Whether `update` multiplies the gradient by `UpdateArgs.clip`, and rounds main weights into `params`, by itself.

    A fused kernel does so. Around any other update both are done for it, and it gets neither.
    """

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

    @classmethod
    def host_share(cls, config: OptimizerConfig) -> float:
        """Return the share of this optimizer's state in host memory."""
        return config.offload if cls.OFFLOADS else 0.0

    @classmethod
    def states_of(cls, config: OptimizerConfig) -> Sequence[StateTensor]:
        """Return `STATE`, as these options want it."""
        return cls.STATE

    @classmethod
    def states_for(cls, config: OptimizerConfig, dtype: torch.dtype) -> Sequence[StateTensor]:
        """Return `states_of` for parameters of this dtype. fp32 ones lack nothing, so they have no REMAINDER."""
        wide = dtype == torch.float32
        return [tensor for tensor in cls.states_of(config) if not (wide and tensor.name == REMAINDER)]

    @classmethod
    def planned_nbytes(cls, shards: Iterable[Range], dtype: torch.dtype, config: OptimizerConfig) -> dict[bool, int]:
        """Return the `Optimizer.nbytes` of an optimizer of `shards`, by whether they are in host memory."""
        states = cls.states_for(config, dtype)
        state = sum(tensor.dtype.itemsize for tensor in states) + (torch.float32.itemsize if config.ema else 0)
        parts = [part for bounds in shards for part in split_by_place(bounds, cls.host_share(config))]
        found = {False: 0, True: 0}
        for start, stop, on_host in parts:
            main = 0 if keeps_no_main_weights(dtype, on_host, states) else torch.float32.itemsize
            found[on_host] += (stop - start) * (main + state)
        sizes = [size for start, stop, on_host in parts if on_host for size in cls.host_sizes(stop - start)]
        found[True] += HostUpdates.planned_nbytes(sizes, dtype)
        return found

    @classmethod
    def matrix_products(cls, rows: int, columns: int) -> Sequence[tuple[int, int, int]]:
        """Return the matrix products [m, k] x [k, n] of the update of one whole matrix, as (m, k, n). For plans."""
        return ()

    @classmethod
    def host_sizes(cls, elements: int) -> list[int]:
        """Return the numbers of elements updated on the host at one time, of a shard of `elements`."""
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
