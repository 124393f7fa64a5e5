"""Saves a training state to the checkpoints of one folder."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CommunicationError, StorageError
from megapar.checkpoint import by_host, tiers
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.folder import Ownership, check
from megapar.checkpoint.save import Save, first_copies, needed_bytes, share, snapshot, snapshot_bytes
from megapar.checkpoint.tiers import Tier
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.step.state import TrainState
from megapar.system import device
from megapar.train.position import trainer_state

# One save writes while another waits with its copy of the state. Each further one would cost another copy in memory.
_UNDER_WAY = 2
_PATIENCE_SECONDS = 10.0  # how long a failed run waits for the parts of ranks that may be gone


class Saver:
    """Saves the checkpoints of one folder. It is a context manager: leaving it waits for the saves in progress.

    It is made before the first step. `tier` is the folder; None is that of the run folder. If the options ask for
    checkpoints and the folder cannot take them, making it raises StorageError on every rank, unless the tier may fail.
    All methods are collectives.
    """

    def __init__(self, state: TrainState, run_dir: Path, tier: Tier | None = None):
        self._options = state.config.checkpoint
        self.tier = tier or tiers.shared(self._options, run_dir)
        self._root = self.tier.root
        self._timeout_seconds = state.config.launch.timeout_seconds
        self._saves: list[tuple[Save, Tensor | None]] = []  # oldest first, each with its copy of the state
        self._last: Save | None = None  # the newest save; it may still have to remove old checkpoints
        self._owned = Ownership(run_dir)
        # Buffers of finished saves. The next save takes one of them: pinned memory is slow to allocate.
        self._idle: list[Tensor] = []
        if self.tier.may_fail:
            return
        if self.tier.disks:
            by_host.require_room(self._root, self._slices_to_save(state), state.ctx, self.tier.disks)
        elif self.tier.every or self.tier.at_end:
            check(self._root, needed_bytes(self._slices_to_save(state), state.ctx), state.ctx)

    def due(self, step: int, last: bool) -> bool:
        """Whether the options ask for a checkpoint after `step` steps; `last`: these are all steps of the run."""
        return self.tier.due(step, last)

    def save(self, state: TrainState, ready: Callable[[], None] = lambda: None) -> list[Path]:
        """Save the weights, moments and position, completely or not at all.

        Returns the checkpoints completed since the last call. An asynchronous save returns when the state is copied. If
        two saves are under way already, it first waits for the older one. Rank 0 calls `ready` in another thread before
        the checkpoint gets its name. Raises StorageError on every rank if this save or the older one failed, and
        NumericError if a value is not finite.
        """
        paths = [self.finish()] if self.must_wait(state) else []
        slices = self._slices_to_save(state)
        header = trainer_state(state)
        root, keep = self._root, self.tier.keep
        if self.tier.disks:
            return [by_host.save(root, slices, state.ctx, header, self.tier.disks, keep_last=keep.last, ready=ready)]
        buffer = None
        if self._options.async_save:
            doing = f"checkpoint of step {state.step} not saved"
            # Training changes the weights while the thread writes, so it writes from a copy.
            slices, buffer = on_all_ranks(
                lambda: self._copied(slices, state.ctx.device), state.ctx, StorageError, doing
            )
        try:
            self._last = Save(
                root, slices, state.ctx, header, keep=keep, after=self._last, require=self._require, ready=ready
            )
        except StorageError:
            if buffer is not None:
                self._idle.append(buffer)
            raise
        self._saves.append((self._last, buffer))
        if self._options.async_save:
            return paths
        return [self.finish()]

    def must_wait(self, state: TrainState) -> bool:
        """Whether a save of `state` must first `finish` the oldest one under way. Then a warning says so."""
        if len(self._saves) < _UNDER_WAY:
            return False
        if state.ctx.world.first:
            text = "step %d: waiting for the checkpoint of step %d, which is still being written"
            logging.getLogger(__name__).warning(text, state.step, self._saves[0][0].step)
        return True

    def under_way(self) -> list[int]:
        """The steps of the saves that were begun and not finished, oldest first."""
        return [save.step for save, _ in self._saves]

    def has_ended(self, wait: bool = False) -> bool:
        """Whether `finish` would return or raise at once; with `wait`, whether a save is under way."""
        return bool(self._saves) and (wait or self._saves[0][0].ended())

    def finish(self) -> Path:
        """Wait for the oldest save and free its buffer for the next; returns the checkpoint's folder.

        Raises StorageError on every rank if the save failed.
        """
        save, buffer = self._saves.pop(0)
        if buffer is not None:
            self._idle.append(buffer)
        return save.finish()

    def completed(self, wait: bool = False) -> Iterator[Path]:
        """Yield the newly completed checkpoints; with `wait`, wait for all of them.

        Raises StorageError on every rank if a save failed.
        """
        while self.has_ended(wait):
            yield self.finish()

    def is_replaced(self, ctx: ParallelContext) -> bool:
        """Whether another folder has the name of the run folder now: no later save may write there either."""
        doing = f"{self._root} not found"
        found = on_all_ranks(lambda: ctx.world.first and self._owned.is_replaced(), ctx, StorageError, doing)
        return bool(from_first(found, ctx))

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        patience = self._timeout_seconds
        if isinstance(error, CommunicationError):
            patience = _PATIENCE_SECONDS
        for save, _ in self._saves:
            save.join(patience)
        if error is None and self._last is not None:
            self._last.settle()  # every rank is here, so they can wait for the removal of old checkpoints together

    def _require(self) -> None:
        """Raise StorageError if the run folder, or the launcher's folder in memory, was deleted or replaced."""
        self._owned.require()
        if self.tier.name == "memory":
            tiers.require_own(self._root)

    def _copied(self, slices: list[Any], source: torch.device) -> tuple[list[Any], Tensor]:
        """Copies of the slices in host memory, and the buffer holding them. `source` is the device of the slices."""
        buffer = self._idle.pop() if self._idle else device.host_buffer(snapshot_bytes(slices), source)
        copies = snapshot(slices, buffer)
        # Copies to pinned memory are asynchronous: the thread that writes must not read them before they are done.
        device.synchronize(source)
        return copies, buffer

    def _slices_to_save(self, state: TrainState) -> list[Any]:
        """What this rank writes of the optimizer's state and of the fixed tensors."""
        slices = state.optimizer.slices()
        # Without ZeRO all replicas hold the whole optimizer state, so they share the work of writing it.
        trained = first_copies(slices) if state.grads.layout.sharded else share(slices)
        fixed = fixed_slices(state.stages.values(), to_save=True, parameters=not state.base)
        return trained + share(fixed)
