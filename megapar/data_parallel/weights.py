"""A rank's weights in one flat buffer, of which its parameters are views."""

import torch

from megapar import comm
from megapar.data_parallel.layout import FlatLayout


class FlatWeights:
    """`flat`: 1-D, in the model's dtype, with the offsets of `layout`. Making one moves the parameters into it."""

    def __init__(self, layout: FlatLayout, device: torch.device):
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        for slot in layout.slots:
            view = self.flat[slot.start : slot.stop].view(slot.param.shape)
            view.copy_(slot.param.data)
            slot.param.data = view

    def gather(self) -> None:
        """Fill `flat` with every rank's updated shards. Without ZeRO there is nothing to do: each rank updates all."""
        if not self.layout.sharded:
            return
        pending = [
            comm.all_gather_shard_async(self.flat[bucket.start : bucket.stop], self.layout.axis(bucket))
            for bucket in self.layout.buckets
        ]
        for one in pending:
            one.wait()
