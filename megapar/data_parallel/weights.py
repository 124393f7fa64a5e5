"""The weights of a rank in one flat buffer. Its parameters are views of the buffer."""

import torch

from megapar import comm
from megapar.data_parallel.layout import FlatLayout


class FlatWeights:
    """The flat weights of a rank. The constructor moves the parameters into them.

    `flat` is 1-D, in the model's dtype, with the offsets of `layout`.
    """

    def __init__(self, layout: FlatLayout, device: torch.device):
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        for slot in layout.slots:
            view = self.flat[slot.start : slot.stop].view(slot.param.shape)
            view.copy_(slot.param.data)
            # `.data`, so that modules and optimizer keep the same Parameter object.
            slot.param.data = view

    def gather(self) -> None:
        """Gather every rank's updated shards into `flat`. Without ZeRO this does nothing, as each rank updates all."""
        if not self.layout.sharded:
            return
        # Start all gathers before the first wait, so that their latencies overlap.
        gathers = [
            comm.all_gather_shard_async(self.flat[bucket.start : bucket.stop], self.layout.axis(bucket))
            for bucket in self.layout.buckets
        ]
        for gather in gathers:
            gather.wait()
