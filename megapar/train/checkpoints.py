"""A training state to and from the checkpoints of its run folder."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megapar import device
from megapar.agreement import from_first, on_all_ranks
from megapar.checkpoint.compatible import changes, weight_options
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.folder import Keep, Ownership, check, exclusive
from megapar.checkpoint.format import Manifest
from megapar.checkpoint.lineage import Lineage, lineage_of, new_id, set_aside
from megapar.checkpoint.load import choose, load, load_fitting, load_weights
from megapar.checkpoint.save import Save, needed_bytes, share, snapshot, snapshot_bytes
from megapar.config import flatten
from megapar.context import ParallelContext
from megapar.errors import CheckpointError, CommunicationError, StorageError
from megapar.params import StateSlice
from megapar.precision import LossScale
from megapar.train.data import ORDER, compare
from megapar.train.step import TrainState

FOLDER = "checkpoints"
_UNDER_WAY = 2  # saves at a time: one that writes and one that waits with its copy of the state
_PATIENCE_SECONDS = 10.0  # for the parts of ranks that may be gone


def lock_run_dir(run_dir: Path, ctx: ParallelContext) -> AbstractContextManager[None]:
    """Keep the run folder from other jobs, and remove what killed ones left. A collective."""
    return exclusive(run_dir, run_dir / FOLDER, ctx)


class Saver:
    """A run's saves. A context: leaving it waits for what is being written.

    Made before the first step: raises StorageError on every rank if the run will save and could not. All methods are
    collectives.
    """

    def __init__(self, state: TrainState, run_dir: Path):
        self._root = run_dir / FOLDER
        self._options = state.config.checkpoint
        self._timeout_seconds = state.config.launch.timeout_seconds
        self._keep = Keep(self._options.keep_last, self._options.keep_every)
        self._saves: list[tuple[Save, Tensor | None]] = []  # the oldest first, each with its copy of the state
        self._last: Save | None = None  # the newest, which may still remove old checkpoints
        self._owned = Ownership(run_dir)
        self._idle: list[Tensor] = []
        if self._options.every or self._options.save_last:
            check(self._root, needed_bytes(self._mine(state), state.ctx), state.ctx)

    def due(self, step: int, last: bool) -> bool:
        """Whether the options ask for a checkpoint after `step` steps."""
        every = self._options.every
        return (every > 0 and step % every == 0) or (last and self._options.save_last)

    def save(self, state: TrainState, ready: Callable[[], None] = lambda: None) -> list[Path]:
        """Save weights, moments and position, complete or not at all; returns what has become complete meanwhile.

        An asynchronous save returns when the state is copied, and waits if two are under way already. Rank 0 calls
        `ready` in another thread before the checkpoint gets its name. Raises StorageError on every rank if this save
        or an earlier one failed, NumericError if a value is not finite.
        """
        paths = []
        if len(self._saves) == _UNDER_WAY:
            if state.ctx.world.first:
                text = "step %d: waiting for the checkpoint of step %d, which is still being written"
                logging.getLogger(__name__).warning(text, state.step, self._saves[0][0].step)
            paths.append(self._finish())
        mine = self._mine(state)
        buffer = None
        if self._options.async_save:
            doing = f"checkpoint of step {state.step} not saved"
            mine, buffer = on_all_ranks(lambda: self._copied(mine, state.ctx.device), state.ctx, StorageError, doing)
        self._last = Save(
            self._root,
            mine,
            state.ctx,
            facts(state),
            keep=self._keep,
            after=self._last,
            require=self._owned.require,
            ready=ready,
        )
        self._saves.append((self._last, buffer))
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
        if error is None and self._last is not None:
            self._last.settle()  # every rank is here, so they can wait for the removal of old checkpoints together

    def _copied(self, mine: list[Any], where: torch.device) -> tuple[list[Any], Tensor]:
        """Host copies of the slices, and the memory that they lie in."""
        buffer = self._idle.pop() if self._idle else device.host_buffer(snapshot_bytes(mine), where)
        copies = snapshot(mine, buffer)
        device.synchronize(where)
        return copies, buffer

    def _finish(self) -> Path:
        save, buffer = self._saves.pop(0)
        if buffer is not None:
            self._idle.append(buffer)
        return save.finish()

    def _mine(self, state: TrainState) -> list[Any]:
        trained = state.optimizer.slices()
        mine = list(trained) if state.grads.layout.sharded else share(trained)
        return mine + share(fixed_slices(state.stages.values(), to_save=True))


def facts(state: TrainState) -> dict[str, Any]:
    """What a manifest says besides its tensors, as JSON types."""
    config = state.config
    parallel = state.config.parallel
    return {
        "step": state.step,
        "consumed_samples": state.consumed_samples,
        "layout": {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "vpp": parallel.vpp},
        "model_config": _weight_options(state),
        "trainer": {
            "updates": state.optimizer.step_count,
            "loss_scale": asdict(state.loss_scale) if state.loss_scale.dynamic else None,
            "config": flatten(config),
            "lineage": [list(start) for start in state.lineage],
        },
        "data": {"train": list(config.data.train), "tokenizer": config.data.tokenizer, **ORDER, **state.data},
    }


def _weight_options(state: TrainState) -> dict[str, Any]:
    # All stages are of one family.
    stage = next(iter(state.stages.values()))
    return weight_options(state.config, stage.sizes_of_weights)


@dataclass(frozen=True)
class Position:
    """Where a trainer stood, besides what every checkpoint says."""

    updates: int
    loss_scale: LossScale | None
    config: dict[str, Any]
    lineage: Lineage


def position(manifest: Manifest) -> Position:
    """The trainer's section of a manifest. Raises CheckpointError if it lacks a field or one has another type."""
    trainer = manifest.trainer
    updates, scale, config = (trainer.get(name) for name in ("updates", "loss_scale", "config"))
    where = f"checkpoint of step {manifest.step}: trainer"
    if type(updates) is not int or updates < 0:
        raise CheckpointError(f"{where}.updates is {updates!r}, not a number of updates")
    if type(config) is not dict:
        raise CheckpointError(f"{where}.config is {config!r}, not the run's options")
    return Position(updates, _loss_scale(scale, where), config, lineage_of(trainer))


def _loss_scale(saved: object, where: str) -> LossScale | None:
    if saved is None:
        return None
    kinds = {name: type(value) for name, value in asdict(LossScale.of("fp16")).items()}
    if type(saved) is not dict or {name: type(value) for name, value in saved.items()} != kinds:
        raise CheckpointError(f"{where}.loss_scale is {saved!r}, not a loss scale")
    scale = LossScale(**saved)
    if not 1.0 <= scale.scale <= LossScale.LARGEST:
        raise CheckpointError(f"{where}.loss_scale.scale is {scale.scale}, not from 1 to {LossScale.LARGEST:.0f}")
    return scale


def resume(state: TrainState, run_dir: Path) -> list[str]:
    """Go on from the checkpoint that `checkpoint.resume` names, if there is one, else start from the weights of
    `checkpoint.init_from`; returns what to tell the user.

    Weights and moments are restored bit for bit, whatever layout wrote them. Checkpoints that do not lead to this start
    are set aside. Raises CheckpointError on every rank if the checkpoint is damaged or of another model, DataError if
    its training read other data.
    """
    root = run_dir / FOLDER
    ctx = state.ctx
    path = choose(state.config.checkpoint.resume, root, ctx, check=position)
    past: Lineage = []
    if path is None:
        notes = _start_from_weights(state)
    else:
        manifest = load(path, slices=_all_slices(state), ctx=ctx, model_config=_weight_options(state))
        found = position(manifest)
        notes = compare(manifest.data, state.data, path, accept=state.config.data.accept_changed)
        notes = [f"resumed step {manifest.step} from {path}", *_go_on(state, manifest, found), *notes]
        past = found.lineage
    # After all that can refuse, so that a start that is refused changes nothing.
    state.lineage = [*past, (from_first(new_id(), ctx), state.step)]
    doing = "checkpoints of an abandoned branch not set aside"
    moved = on_all_ranks(lambda: set_aside(root, state.lineage) if ctx.world.first else [], ctx, StorageError, doing)
    return [*notes, *moved]


def _all_slices(state: TrainState) -> list[StateSlice]:
    return [*state.optimizer.slices(), *fixed_slices(state.stages.values())]


def _go_on(state: TrainState, manifest: Manifest, found: Position) -> list[str]:
    """Put the state where the checkpoint was, once its tensors are loaded; a line for each option that changed."""
    state.optimizer.step_count = found.updates
    state.optimizer.refresh_params_from_main()
    if state.loss_scale.dynamic and found.loss_scale:
        state.loss_scale = found.loss_scale
    state.step = manifest.step
    state.consumed_samples = manifest.consumed_samples
    return [f"changed since: {line}" for line in changes(found.config, state.config)]


def _start_from_weights(state: TrainState) -> list[str]:
    """At step 0: the optimizer's main weights are filled, and the parameters rounded from them."""
    options = state.config.checkpoint
    if options.init_from == "none":
        return []
    path = Path(options.init_from)
    slices = _all_slices(state)
    model_config = _weight_options(state)
    different: list[str] = []
    if options.strict:
        load_weights(path, slices=slices, ctx=state.ctx, model_config=model_config)
    else:
        different = load_fitting(path, slices=slices, ctx=state.ctx, model_config=model_config)
    state.optimizer.refresh_params_from_main()
    lines = [f"does not fit (checkpoint | run): {line}" for line in different]
    return [f"started from the weights of {path}, step 0", *lines]
