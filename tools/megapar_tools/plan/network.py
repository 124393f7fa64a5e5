"""The time of communication over each axis of a rank grid, on a machine with two kinds of links.

Ring algorithms: each of n ranks sends (n - 1) / n of the tensor to its neighbor, once for an all-gather or a
reduce-scatter and twice for an all-reduce (Thakur et al., doi 10.1177/1094342005051521). In a ring over nodes
each rank of a node has a link of its own to the network, and each link carries a part of the data.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from megapar.base.grid import Grid
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.rank_groups import RankGroups


@dataclass(frozen=True)
class AxisReach:
    """The ranks of an axis on the nodes of a machine, for its most scattered group."""

    ranks: int
    nodes: int
    in_node: int
    """The fewest of its ranks on one node."""


class Network:
    """Times of communication over the axes of `grid` on `hardware`. Ranks fill the nodes in their order.

    Copy engines communicate over the axes `copied`. Kernels do over all others, and slow down what runs beside them.
    """

    def __init__(self, grid: Grid, hardware: Hardware, copied: Collection[str] = ()):
        self.grid = grid
        self.hardware = hardware
        self.copied = copied
        self._spans: dict[str, AxisReach] = {}
        self._groups = RankGroups(grid)

    def with_shards_of(self, shard_ranks: int) -> "Network":
        """The same grid with another number of ranks that share a shard. All other groups are found once for both."""
        groups = self._groups.with_shards_of(shard_ranks)
        other = Network(groups.grid, self.hardware, self.copied)
        other._groups = groups
        return other

    def span(self, axis: str) -> AxisReach:
        """Where the ranks of an axis are. `axis` is a name of `Grid.groups`."""
        if axis == "world":
            return self._whole_world
        if axis not in self._spans:
            spans = [self._span(self._groups.members(axis, rank)) for rank in self._samples]
            self._spans[axis] = max(spans, key=lambda span: (span.nodes, -span.in_node))
        return self._spans[axis]

    def level(self, axis: str) -> str:
        """The slowest link of an axis: node or network."""
        return "node" if self.span(axis).nodes == 1 else "network"

    def seconds(self, operation: str, axis: str, nbytes: float) -> float:
        """Seconds of an operation of `megapar_tools.plan.work.Started` alone on its links."""
        span = self.span(axis)
        if span.ranks == 1 or nbytes == 0:
            return 0.0
        match operation:
            case "all_gather" | "reduce_scatter":
                return self._ring_latency(span) + nbytes * (span.ranks - 1) / span.ranks / self._bandwidth(span)
            case "all_reduce":
                moved = 2 * nbytes * (span.ranks - 1) / span.ranks
                return 2 * self._tree_latency(span) + moved / self._bandwidth(span)
            case "all_to_all":
                return self._all_to_all(span, nbytes)
            case "exchange" | "send":
                return self.message(span.nodes > 1, nbytes)
        raise ValueError(f"{operation} over {axis}: no such operation of megapar.comm")

    def message(self, leaves_node: bool, nbytes: float) -> float:
        """Seconds of a message from one rank to another."""
        link = self.hardware.network if leaves_node else self.hardware.node
        return link.latency_us * 1e-6 + nbytes / (link.gb_per_second * 1e9)

    def _bandwidth(self, span: AxisReach) -> float:
        """Bytes a second from each rank of a ring to its neighbor."""
        node = self.hardware.node.gb_per_second * 1e9
        if span.nodes == 1:
            return node
        return min(node, self.hardware.network.gb_per_second * 1e9 * span.in_node)

    def _ring_latency(self, span: AxisReach) -> float:
        if span.nodes == 1:
            return self._latency(span.ranks - 1, 0)
        return self._latency(max(span.ranks - 1 - span.nodes, 0), span.nodes)

    def _tree_latency(self, span: AxisReach) -> float:
        """Return the latency in seconds of half an all-reduce of few bytes, where NCCL has trees beside rings."""
        tree = self._latency(math.log2(max(span.in_node, 1)), math.log2(span.nodes))
        return min(tree, self._ring_latency(span))

    def _latency(self, inside: float, between: float) -> float:
        return (inside * self.hardware.node.latency_us + between * self.hardware.network.latency_us) * 1e-6

    def _all_to_all(self, span: AxisReach, nbytes: float) -> float:
        """Return the seconds of an all-to-all of `nbytes` bytes of rows a rank, spread evenly over the ranks.

        The links within nodes and between nodes work at once.
        """
        hardware = self.hardware
        inside = nbytes * (span.in_node - 1) / span.ranks / (hardware.node.gb_per_second * 1e9)
        outside = nbytes * (span.ranks - span.in_node) / span.ranks / (hardware.network.gb_per_second * 1e9)
        latency = self._latency(1, int(span.nodes > 1))
        return latency + max(inside, outside) / hardware.all_to_all_share

    def _span(self, ranks: list[int]) -> AxisReach:
        nodes: dict[int, int] = {}
        for rank in ranks:
            node = rank // self.hardware.gpus_per_node
            nodes[node] = nodes.get(node, 0) + 1
        return AxisReach(len(ranks), len(nodes), min(nodes.values()))

    @property
    def _whole_world(self) -> AxisReach:
        size = self.hardware.gpus_per_node
        nodes = -(-self.grid.world_size // size)
        return AxisReach(self.grid.world_size, nodes, self.grid.world_size - (nodes - 1) * size)

    @cached_property
    def _samples(self) -> list[int]:
        """Return ranks whose groups stand for all: first and last of the first four nodes, and the world's last."""
        world = self.grid.world_size
        size = self.hardware.gpus_per_node
        ends = [rank for node in range(4) for rank in (node * size, (node + 1) * size - 1)]
        return sorted({rank for rank in (*ends, world - 1) if rank < world})
