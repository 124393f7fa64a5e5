"""The weights of a rank in flat memory. Its parameters are views of it."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.shards import Weights
from megapar.linear.converted_weight import forget_converted


class FlatWeights(Weights):
    """The flat weights of a rank. The constructor moves the parameters into them.

    `flat` has the offsets of `layout`, and `precise` goes on behind it.
    """

    SHARDS_ONLY = False

    def __init__(self, layout: FlatLayout, device: torch.device):
        super().__init__(layout, device)
        for slot in layout.slots:
            view = self.part(slot.start, slot.stop).view(slot.param.shape)
            view.copy_(slot.param.data)
            # `.data`, so that modules and optimizer keep the same Parameter object.
            slot.param.data = view
        self._arriving: dict[int, collectives.Pending] = {}  # gathers in flight, by the index of their bucket
        self._order = list(range(len(layout.buckets)))  # in which gathers start

    def start_gather(self) -> None:
        forget_converted(slot.param for slot in self.layout.slots)
        if not self.layout.sharded:
            return  # each rank updates all weights
        # All gathers start before the first wait, so that their latencies overlap.
        for index in self._order:
            bucket = self.layout.buckets[index]
            part = self.part(bucket.start, bucket.stop)
            self._arriving[index] = collectives.all_gather_shard_async(part, self.layout.axis(bucket))

    def wait(self) -> None:
        self._wait_for(list(self._arriving))

    def wait_under_forward(self, stages: Iterable[nn.Module]) -> None:
        """Make each layer of `stages` wait for its own weights when its forward begins, and each stage for the others.

        The layers of a stage are the modules in its attribute `layers`, a ModuleDict. A stage without it waits for all
        its weights. Gathers then start in the order of their use in forward passes.
        """
        first_uses: list[int] = []
        for stage in stages:
            layers: Mapping[str, nn.Module] = getattr(stage, "layers", {})
            in_layers = {id(param) for layer in layers.values() for param in layer.parameters()}
            others = self._buckets_of(param for param in stage.parameters() if id(param) not in in_layers)
            stage.register_forward_pre_hook(partial(self._before_forward, others))
            first_uses += others
            for layer in layers.values():
                buckets = self._buckets_of(layer.parameters())
                layer.register_forward_pre_hook(partial(self._before_forward, buckets))
                first_uses += buckets
            stage.register_forward_hook(partial(self._after_stage, self._buckets_of(stage.parameters())))
        self._order = list(dict.fromkeys(first_uses))  # each bucket once

    def _buckets_of(self, params: Iterable[nn.Parameter]) -> list[int]:
        """The indices of the buckets with `params`. A frozen parameter is in none."""
        wanted = {id(param) for param in params}
        return sorted({slot.bucket_index for slot in self.layout.slots if id(slot.param) in wanted})

    def _before_forward(self, buckets: list[int], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._wait_for(buckets)

    def _after_stage(self, buckets: list[int], module: nn.Module, inputs: object, output: object) -> None:
        """Raise RuntimeError if the stage has run while weights of it were in flight."""
        late = [index for index in buckets if index in self._arriving]
        if late:
            slot = next(slot for slot in self.layout.slots if slot.bucket_index == late[0])
            raise RuntimeError(
                f"{type(module).__name__} has used the layer of {slot.name} without calling it, so its weights may be "
                "those before the update: call layers as modules, or leave out optimizer.overlap_param_gather"
            )

    def _wait_for(self, buckets: list[int]) -> None:
        for index in buckets:
            pending = self._arriving.pop(index, None)
            if pending is not None:
                pending.wait()
