"""The interface of optimizers. `table` chooses those of a run, `optimizers` holds them."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar.base.grid import Grid
from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import Range, intersect
from megapar.data_parallel.layout import FlatLayout, Update
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.declare.context import ParallelContext
from megapar.declare.params import AVERAGE
from megapar.optimizer.declaration import OptimizerDeclaration, keeps_no_main_weights, split_by_place
from megapar.optimizer.host_updates import HostUpdates
from megapar.optimizer.visits import UpdateArgs, UpdateShard, Visit


class Optimizer(OptimizerDeclaration, ABC):
    """Updates this rank's shards of the parameters of one `Update`.

    A subclass declares its state in `STATE` (`OptimizerDeclaration`), and updates a part of a shard in `update`. Main
    weights are fp32. Of fp32 parameters they are the parameters themselves. Of bf16 or fp16 ones they are kept here,
    and rounded into the parameters after each step. Or the parameters are their upper halves, and a state named
    REMAINDER the lower ones.
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
        self.dtype = weights.layout.dtype_of(updates)
        self.states = self.states_for(config, self.dtype)
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
        self.host_updates = HostUpdates(on_host, self._update_on_host, self.dtype, weights.flat.device)

    def join_in_plan(self, grid: Grid, layout_of_rank: Callable[[int], FlatLayout]) -> None:
        """Find what the ranks of a run tell each other in the first update. For plans, where no other rank exists.

        `layout_of_rank` builds the layout of another rank of `grid`. Raises NotImplementedError if an optimizer joins
        matrices and does not override this.
        """
        if self.JOINS_MATRICES:
            raise NotImplementedError(f"{type(self).__name__} joins matrices, so it must override join_in_plan")

    @abstractmethod
    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        """Change `shard.main` and `shard.state` once by the reduced gradient `grad`, 1-D fp32, already clipped.

        The update may change `grad`. `params` is None, and `step.clip` too, unless the class declares `FUSES`: then
        `grad` is not clipped yet, and `params` are the 16-bit weights to round the new main weights into. These are
        None if the main weights are the parameters, and for state on the host, whose main weights are copied
        afterwards.
        """

    def step(self, step: UpdateArgs) -> None:
        """Clip the gradients of all shards, update the shards, and round the main weights into the parameters.

        An optimizer whose update takes several passes over the shards overrides this method. Then it calls `clipped`
        before its first pass, and `round_weights` after its last: nothing else clips and rounds.
        """
        for visit in self.visits:
            if visit.shard.on_host:
                continue
            if self.FUSES:
                self.update(visit.shard, visit.grad, None if self.aliased(visit.shard) else visit.params, step)
                continue
            self.update(visit.shard, clipped(visit.grad, step), None, replace(step, clip=None))
            self.round_weights(visit)
        # A device has the updates above to compute meanwhile.
        if self.on_host:
            clip = None if step.clip is None else step.clip.cpu()
            self.host_updates.run(replace(step, clip=clip))

    def _update_on_host(self, visit: Visit, grad: Tensor, step: UpdateArgs) -> None:
        if not self.FUSES:
            grad, step = clipped(grad, step), replace(step, clip=None)
        self.update(visit.shard, grad, None, step)

    def round_weights(self, visit: Visit) -> None:
        """Round the main weights of a visit into the parameters, unless they are the parameters themselves."""
        if not self.aliased(visit.shard):
            visit.params.copy_(visit.shard.main)

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
        ends = list(itertools.accumulate(self.host_sizes(shard.stop - shard.start), initial=shard.start))
        return list(itertools.pairwise(ends))


def clipped(grad: Tensor, step: UpdateArgs) -> Tensor:
    """Return `grad` times the step's clip coefficient, in place."""
    return grad if step.clip is None else grad.mul_(step.clip)
