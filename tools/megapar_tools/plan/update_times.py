"""The time of an update: what a rank does after its last backward pass.

These are the exposed reductions of gradients, the optimizer, and the gathers of new weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from megapar.base.grid import TIED_AXIS
from megapar.config.options import Config
from megapar.optimizer import table
from megapar.optimizer.base import Optimizer
from megapar.train.levers import planned_device
from megapar_tools.plan.buffers import update_traffic
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.network import Network
from megapar_tools.plan.part_times import PartTimes
from megapar_tools.plan.shard_groups import ShardGroups, gradient_itemsize


@dataclass
class UpdateTimes:
    """What follows the pipeline on a rank, in seconds by axis, and the optimizer's.

    `converted` are those of new weights on their way to the format of their products, such as FP8.
    """

    exposed: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0
    converted: float = 0.0

    def expose(self, axis: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[axis] = self.exposed.get(axis, 0.0) + seconds

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values()) + self.optimizer + self.converted


class UpdateTimer:
    """Times the update of pipeline ranks on one machine, for one layout."""

    def __init__(self, config: Config, hardware: Hardware, network: Network, groups: ShardGroups):
        self._config = config
        self._hardware = hardware
        self._network = network
        self._groups = groups
        self._matrices = _MatrixUpdates(config, hardware, network)

    def time(self, rank: int, stages: Sequence[Sequence[PartTimes]]) -> UpdateTimes:
        """Return the times of the update on the pipeline rank `rank` with these stages."""
        times = UpdateTimes()
        parts = [part for stage in stages for part in stage]
        options = self._config.optimizer
        for axis, number in self._elements(parts).items():
            itemsize = _itemsize(parts, axis)
            shard = float(number)
            if options.zero_stage:
                shard /= self._groups.num_shards(axis)
            if options.zero_stage < 2:
                times.expose(axis, self._reduction_wait(axis, number, stages))
            if options.zero_stage and self._groups.is_split(axis):
                times.expose(axis, self._wait_for_copies(axis, shard, number, stages))
            if options.zero_stage in (1, 2):
                gather = self._network.seconds("all_gather", self._groups.shards(axis), number * itemsize)
                if options.overlap_param_gather and stages:
                    # All but the first part's travel under the forward passes that do not need them yet.
                    under = sum(part.forward.seconds * part.number for part in stages[0])
                    gather = max(gather - under, gather / max(sum(part.number for part in parts), 1))
                times.expose(axis, gather)
            on_host = shard * options.offload
            # Both at once; but the norm is that of all gradients, on the device.
            updated = self._hardware.memory_seconds(update_traffic(options) * (shard - on_host) + 4 * on_host)
            times.optimizer += max(updated, self._hardware.host_update_seconds(on_host, itemsize))
            self._matrices.add(axis, parts, times)
        times.converted = sum(part.convert * part.number for part in parts)
        times.expose("world", self._network.seconds("all_reduce", "world", 8.0))
        if self._shares_embedding and rank in self._network.grid.with_embedding:
            tied = max((part.part.embedding_elements for part in parts), default=0)
            times.expose(TIED_AXIS, self._network.seconds("all_reduce", TIED_AXIS, 4 * tied))
        return times

    @property
    def _shares_embedding(self) -> bool:
        """Whether the last stage uses the matrix of the embedding, as a tied head or to embed tokens."""
        model = self._config.model
        return model.tie_word_embeddings or model.embeds_on_last_stage

    def _elements(self, parts: Sequence[PartTimes]) -> dict[str, int]:
        """The elements of a rank's parameters by axis. An embedding that both ends use counts once."""
        elements: dict[str, int] = {}
        tied = []
        if self._shares_embedding:
            tied = [part.part.embedding_elements for part in parts if part.part.embedding_elements]
        for part in parts:
            for axis, number in part.part.elements.items():
                elements[axis] = elements.get(axis, 0) + number * part.number
        if len(tied) > 1:
            elements["grad"] -= sum(tied[1:])
        return elements

    def _reduction_wait(self, axis: str, elements: int, stages: Sequence[Sequence[PartTimes]]) -> float:
        """Seconds of the reduction of gradients after the last backward (ZeRO stages 0 and 1)."""
        options = self._config.optimizer
        operation = "all_reduce" if options.zero_stage == 0 else "reduce_scatter"
        nbytes = elements * gradient_itemsize(options)
        buckets = self._buckets(elements)
        # The last bucket is complete when the backward ends. The others follow each other under it.
        each = self._network.seconds(operation, self._groups.shards(axis), nbytes / buckets)
        if not options.overlap_grad_reduce or not stages:
            return each * buckets
        # The last backward of a rank is that of its first stage; the buckets of its other stages are complete then.
        window = sum(part.backward_seconds * part.number for part in stages[0])
        return max(each, each * buckets - window * (buckets - 1) / buckets)

    def _wait_for_copies(self, axis: str, shard: float, elements: int, stages: Sequence[Sequence[PartTimes]]) -> float:
        """Seconds of the sum of shards over their copies, after the last backward."""
        seconds = self._network.seconds("all_reduce", self._groups.copies(axis), 4 * shard)
        options = self._config.optimizer
        if not stages or (options.zero_stage < 2 and not options.overlap_grad_reduce):
            return seconds
        # A unit's starts with its last addition, and a bucket's when the next bucket is complete: under the backward of
        # what is left.
        units = sum(part.number for part in stages[0])
        if options.zero_stage < 2:
            units = self._buckets(elements)
        window = sum(part.backward_seconds * part.number for part in stages[0])
        return max(seconds / units, seconds - window * (units - 1) / units)

    def _buckets(self, elements: int) -> int:
        return max(round(elements * 4 / (self._config.optimizer.bucket_mb * 2**20)), 1)


def _itemsize(parts: Sequence[PartTimes], axis: str) -> float:
    """The mean bytes of a weight among the trained ones of an axis."""
    elements = sum(part.part.elements.get(axis, 0) * part.number for part in parts)
    nbytes = sum(part.part.weight_bytes.get(axis, 0) * part.number for part in parts)
    return nbytes / max(elements, 1)


class _MatrixUpdates:
    """The time of optimizers that join the parts of matrices (`Optimizer.JOINS_MATRICES`)."""

    def __init__(self, config: Config, hardware: Hardware, network: Network):
        self._options = config.optimizer
        self._hardware = hardware
        self._network = network
        # Whether whole matrices travel and are multiplied in bf16 (`Muon.sent_dtype`).
        self._sends_16_bits = config.kernels.backend in ("triton", "apex") or planned_device(config) == "cuda"

    def add(self, axis: str, parts: Sequence[PartTimes], times: UpdateTimes) -> None:
        """Add the exchange of whole matrices, and their products on the rank with the largest share (`owners`)."""
        plane = self._plane(axis)
        shapes: Counter[tuple[type[Optimizer], int, int]] = Counter()
        elements = 0
        for part in parts:
            for (axis_of_gradients, name), pieces in part.part.matrices.items():
                optimizer = table.find(name or self._options.name)
                if axis_of_gradients != axis or not optimizer.JOINS_MATRICES:
                    continue
                for piece in pieces:
                    blocks = piece.blocks if self._options.muon_per_head and piece.blocks else piece.shape[:1]
                    # Blocks repeat down to the last row (`Piece.blocks`).
                    count = math.ceil(piece.shape[0] * len(blocks) / sum(blocks))
                    for number in islice(cycle(blocks), count):
                        shapes[optimizer, number, piece.shape[1]] += part.number
                    elements += math.prod(piece.shape) * part.number
        if not shapes:
            return
        ranks = self._network.span(plane).ranks
        seconds = {shape: self._seconds_of(*shape) for shape in shapes}
        all_of_them = sum(seconds[shape] * number for shape, number in shapes.items())
        times.optimizer += max(all_of_them / ranks, max(seconds.values()))
        itemsize = 2 if self._sends_16_bits else 4
        times.expose(plane, 2 * self._network.seconds("all_to_all", plane, elements * itemsize / ranks))

    def _plane(self, axis: str) -> str:
        """The name of the axis of all ranks with parts of a matrix, as `ParallelContext.plane_of` has it."""
        cut, plane = ("etp", "expert_plane") if axis == "expert_grad" else ("tp", "plane")
        if self._network.span(cut).ranks == 1:
            return axis
        return cut if self._network.span(axis).ranks == 1 else plane

    def _seconds_of(self, optimizer: type[Optimizer], rows: int, columns: int) -> float:
        """Return the seconds of the products that update one whole matrix."""
        precision = "bf16" if self._sends_16_bits else "fp32"
        products = optimizer.matrix_products(rows, columns)
        return sum(self._hardware.product_seconds(*product, precision) for product in products)
