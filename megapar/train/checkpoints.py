"""A training state to and from the checkpoints of its run folder."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megapar import device
from megapar.checkpoint.agreement import together
from megapar.checkpoint.folder import Keep, check, exclusive
from megapar.checkpoint.load import choose, load, load_fitting, load_weights
from megapar.checkpoint.save import Save, needed_bytes, share, snapshot, state_numel
from megapar.config import flatten
from megapar.context import ParallelContext
from megapar.data.order import ORDER_VERSION
from megapar.errors import CommunicationError, StorageError
from megapar.precision import LossScale
from megapar.train.step import TrainState
from megapar.validate import changes, weight_options

FOLDER = "checkpoints"
_UNDER_WAY = 2  # saves at a time: one that writes and one that waits with its copy of the state
_PATIENCE_SECONDS = 10.0  # for the parts of ranks that may be gone


def own(run_dir: Path, ctx: ParallelContext) -> AbstractContextManager[None]:
    """Keep the run folder from other jobs, and remove what killed ones left. A collective."""
    return exclusive(run_dir, run_dir / FOLDER, ctx)


class Saver:
    """A run's saves. A context: leaving it waits for what is being written.

    Made before the first step: raises StorageError on every rank if the run will save and could not. All methods are
    collectives.
    """

    def __init__(self, state: TrainState, run_dir: Path):
        self._root, self._options = run_dir / FOLDER, state.config.checkpoint
        self._timeout_seconds = state.config.launch.timeout_seconds
        self._keep = Keep(self._options.keep_last, self._options.keep_every)
        self._saves: list[tuple[Save, Tensor | None]] = []  # the oldest first, each with its copy of the state
        self._idle: list[Tensor] = []
        if self._options.every or self._options.save_last:
            check(self._root, needed_bytes(self._mine(state), state.ctx), state.ctx)

    def due(self, step: int, last: bool) -> bool:
        """Whether the options ask for a checkpoint after `step` steps."""
        every = self._options.every
        return (every > 0 and step % every == 0) or (last and self._options.save_last)

    def save(self, state: TrainState) -> list[Path]:
        """Save weights, moments and position, complete or not at all; returns what has become complete meanwhile.

        An asynchronous save returns when the state is copied, and waits if two are under way already. Raises
        StorageError on every rank if this save or an earlier one failed.
        """
        paths = []
        if len(self._saves) == _UNDER_WAY:
            if state.ctx.world.first:
                text = "step %d: waiting for the checkpoint of step %d, which is still being written"
                logging.getLogger(__name__).warning(text, state.step, self._saves[0][0].step)
            paths.append(self._finish())
        mine, buffer = self._mine(state), None
        if self._options.async_save:
            doing = f"checkpoint of step {state.step} not saved"
            mine, buffer = together(lambda: self._copied(mine, state.ctx.device), state.ctx, StorageError, doing)
        before = self._saves[-1][0] if self._saves else None
        save = Save(self._root, mine, state.ctx, facts(state), keep=self._keep, after=before)
        self._saves.append((save, buffer))
        return paths if self._options.async_save else [self._finish()]

    def completed(self, wait: bool = False) -> Iterator[Path]:
        """Checkpoints that have become complete, all of them with `wait`. Raises StorageError on every rank if one
        failed."""
        while self._saves and (wait or self._saves[0][0].ended()):
            yield self._finish()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        patience = _PATIENCE_SECONDS if isinstance(error, CommunicationError) else self._timeout_seconds
        for save, _ in self._saves:
            save.join(patience)

    def _copied(self, mine: list[Any], where: torch.device) -> tuple[list[Any], Tensor]:
        """Host copies of the slices, and the memory that they lie in."""
        buffer = self._idle.pop() if self._idle else device.host_buffer(state_numel(mine), where)
        copies = snapshot(mine, buffer)
        device.synchronize(where)
        return copies, buffer

    def _finish(self) -> Path:
        save, buffer = self._saves.pop(0)
        if buffer is not None:
            self._idle.append(buffer)
        return save.finish()

    def _mine(self, state: TrainState) -> list[Any]:
        return share(state.optimizer.slices(), state.ctx.grad, not state.grads.sharded)


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def facts(state: TrainState) -> dict[str, Any]:
    """What a manifest says besides its tensors, as JSON types."""
    config, parallel = state.config, state.config.parallel
    return {
        "step": state.step,
        "consumed_samples": state.consumed_samples,
        "layout": {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "vpp": parallel.vpp},
        "model_config": weight_options(config),
        "trainer": {
            "updates": state.optimizer.step_count,
            "loss_scale": asdict(state.loss_scale) if state.loss_scale.dynamic else None,
            "config": flatten(config),
        },
        "data": {"train": list(config.data.train), "tokenizer": config.data.tokenizer, "order": ORDER_VERSION},
    }


def resume(state: TrainState, run_dir: Path) -> list[str]:
    """Go on from the checkpoint that `checkpoint.resume` names, if there is one, else start from the weights of
    `checkpoint.init_from`; returns what to tell the user.

    Weights and moments are restored bit for bit, whatever layout wrote them. Raises CheckpointError on every rank if
    the checkpoint is damaged or of another model.
    """
    path = choose(state.config.checkpoint.resume, run_dir / FOLDER, state.ctx)
    if path is None:
        return _start_from_weights(state)
    manifest = load(path, slices=state.optimizer.slices(), ctx=state.ctx, model_config=weight_options(state.config))
    state.optimizer.step_count = manifest.trainer["updates"]
    state.optimizer.refresh_params_from_main()
    if state.loss_scale.dynamic and manifest.trainer["loss_scale"]:
        state.loss_scale = LossScale(**manifest.trainer["loss_scale"])
    state.step, state.consumed_samples = manifest.step, manifest.consumed_samples
    different = changes(manifest.trainer["config"], state.config)
    return [f"resumed step {state.step} from {path}", *(f"changed since: {line}" for line in different)]


def _start_from_weights(state: TrainState) -> list[str]:
    """At step 0: the optimizer's main weights are filled, and the parameters rounded from them."""
    options = state.config.checkpoint
    if options.init_from == "none":
        return []
    path, slices, model_config = Path(options.init_from), state.optimizer.slices(), weight_options(state.config)
    different: list[str] = []
    if options.strict:
        load_weights(path, slices=slices, ctx=state.ctx, model_config=model_config)
    else:
        different = load_fitting(path, slices=slices, ctx=state.ctx, model_config=model_config)
    state.optimizer.refresh_params_from_main()
    lines = [f"does not fit (checkpoint | run): {line}" for line in different]
    return [f"started from the weights of {path}, step 0", *lines]
