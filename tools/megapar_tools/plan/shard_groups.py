"""The groups of ranks that ZeRO shares a shard among, on the axes of a planned network."""

from megapar.config.options import OptimizerConfig
from megapar_tools.plan.network import Network


class ShardGroups:
    """The axes over which ZeRO communicates for each axis of gradients, as optimizer.shard_ranks splits it."""

    def __init__(self, options: OptimizerConfig, network: Network):
        self._shard_ranks = options.shard_ranks
        self._network = network

    def is_split(self, axis: str) -> bool:
        """Whether several groups of ranks on `axis` each hold all shards."""
        return 0 < self._shard_ranks < self._network.span(axis).ranks

    def shards(self, axis: str) -> str:
        """Return the axis of the ranks that have different shards."""
        return f"{axis}_shards" if self.is_split(axis) else axis

    def copies(self, axis: str) -> str:
        """Return the axis of the ranks that have copies of a shard."""
        return f"{axis}_copies"

    def num_shards(self, axis: str) -> int:
        """Return the number of ranks that have different shards."""
        return self._network.span(self.shards(axis)).ranks


def gradient_itemsize(options: OptimizerConfig) -> int:
    """Return the bytes of an element of a gradient on its way to other ranks."""
    return 2 if options.grad_reduce_dtype == "bf16" else 4
