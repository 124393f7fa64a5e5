"""Saves a training state to the checkpoints of its run folder, and restores it from them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, CommunicationError, StorageError
from megapar.checkpoint import by_host, tiers
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.folder import Ownership, check, exclusive, remove
from megapar.checkpoint.format import Manifest, open_manifest, step_of
from megapar.checkpoint.lineage import Lineage, new_id, set_aside
from megapar.checkpoint.load import has_average, holds, load, load_fitting, load_weights, verified_manifest, weights_of
from megapar.checkpoint.origin import in_words, origin_of
from megapar.checkpoint.resume import choose
from megapar.checkpoint.save import Save, first_copies, needed_bytes, share, snapshot, snapshot_bytes
from megapar.checkpoint.tiers import FOLDER, Tier
from megapar.checkpoint.values import rounding_problem
from megapar.checkpoint.vocabulary import grown_note
from megapar.config.compatible import adapter_changes, changes, function_changes
from megapar.config.lengths import is_length
from megapar.config.messages import shown
from megapar.config.model_rules import HEAD, SELECTION_BIAS
from megapar.config.options import SCORE, Config, flatten, unflatten
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import ADAPTER, MAIN
from megapar.declare.random import Draws
from megapar.launch.rank_process import RankProcess
from megapar.optimizer.schedule import change_of_rate
from megapar.step import spikes
from megapar.step.state import TrainState
from megapar.system import device
from megapar.train import adapter_base
from megapar.train.data import compare
from megapar.train.position import TrainerRecord, options_of_weights, position, trainer_state
from megapar.train.resumed_samples import resumed_blend

# One save writes while another waits with its copy of the state. Each further one would cost another copy in memory.
_UNDER_WAY = 2
_PATIENCE_SECONDS = 10.0  # how long a failed run waits for the parts of ranks that may be gone


@contextmanager
def lock_run_dir(run_dir: Path, ctx: ParallelContext, process: RankProcess | None = None) -> Iterator[None]:
    """Lock the run folder against other jobs, and remove what killed jobs left in it. A collective.

    `process`, this rank's, then claims the folder for its reports (`RankProcess.claim_run_dir`).
    """
    with exclusive(run_dir, run_dir / FOLDER, ctx):
        if process is not None:
            process.claim_run_dir(run_dir)
        yield


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


def find(
    config: Config,
    run_dir: Path,
    ctx: ParallelContext,
    faster: Sequence[Tier] = (),
    *,
    again: bool = False,
    rewind: spikes.RewindPlan | None = None,
) -> Path | None:
    """The checkpoint named by `checkpoint.resume`, or None. A collective.

    `faster` are the tiers besides the run folder. `again`: the job's launcher has started the ranks again, and they go
    on from the newest whatever the option says. With `rewind` they go on from the newest that serves it.
    """
    resume = "auto" if again or rewind is not None else config.checkpoint.resume

    def check(manifest: Manifest) -> TrainerRecord:
        if rewind is not None and not rewind.is_served_by(manifest.step, manifest.consumed_samples):
            raise CheckpointError(f"step {manifest.step} is too close to a spike")
        return position(manifest)

    try:
        return choose(resume, run_dir / FOLDER, ctx, check, faster)
    except CheckpointError:
        if rewind is None:
            raise
        return find(config, run_dir, ctx, faster, again=True)  # none is old enough: the newest has to do


def draws(config: Config, path: Path | None) -> Draws:
    """Which initial weights a run needs that `resume` starts from `path`: those that it does not read from a file."""
    options = config.checkpoint
    reads_all = path is not None or (options.init_from != "none" and options.strict)
    # New adapters and biases are in no file of a base.
    return lambda spec: not reads_all or spec.added_by != ""


def resume(state: TrainState, run_dir: Path, path: Path | None) -> list[str]:
    """Restore the checkpoint `path` that `find` has found; returns lines for the user.

    If there is none, the run starts from the weights of `checkpoint.init_from`. Weights and moments are restored bit
    for bit, whatever layout wrote them. Checkpoints of a branch left by the run are set aside. Raises CheckpointError
    on every rank if the checkpoint is damaged or of another model, and DataError if its training read other data.
    """
    root = run_dir / FOLDER
    ctx = state.ctx
    state.base = adapter_base.identity(state.config, ctx)
    past: Lineage = []
    averaged = False
    if path is None:
        notes = [*_start_from_weights(state), *_start_from_adapters(state)]
    else:
        if state.base:
            adapter_base.require_same(verified_manifest(path, ctx).base, dict(state.base), path, state.config)
            _start_from_weights(state)
        slices = list(_saved_slices(state))
        disks = next((tier.disks for tier in state.tiers if tier.root == path.parent), None)
        if disks:
            found = by_host.newest(path.parent, ctx, disks, partial(_of_step, step_of(path)))
            assert found, path  # `find` has found it
            by_host.fetch(path, found[1], slices, ctx, disks)
        with _removed_if_damaged(path, state):
            manifest = load(
                path,
                slices=slices,
                ctx=ctx,
                whole=disks is None,
                model_config=options_of_weights(state),
                why=lambda manifest: _other_training_state(manifest, state.config),
            )
        saved = position(manifest)
        state.origin = origin_of(manifest.trainer)
        _require_same_function(saved, path, state)
        _require_fitting_weights(state, path)
        notes = compare(manifest.data, state.data_identity, path, accept=state.config.data.accept_changed)
        hashes = state.data_identity.get("hashes", {})
        state.blend, told = resumed_blend(manifest, saved.config, state.config, hashes, path)
        notes += told
        notes = [f"resumed step {manifest.step} from {path}", *_go_on(state, manifest, saved), *notes]
        past = saved.lineage
        averaged = has_average(manifest)
        notes += _change_of_average(averaged, state)
    if state.optimizer.average is not None and not averaged:
        state.optimizer.average.restart()
    # Last, because everything above can refuse the start: a refused start must change nothing on disk.
    state.lineage = [*past, (from_first(new_id(), ctx), state.step)]
    doing = "checkpoints of an abandoned branch not set aside"

    def leave() -> list[str]:
        tiers.discard(state.tiers, state.lineage, ctx.world.rank)
        return set_aside(root, state.lineage) if ctx.world.first else []

    return [*notes, *on_all_ranks(leave, ctx, StorageError, doing)]


def _of_step(step: int, manifest: Manifest) -> None:
    """Raise CheckpointError if the manifest is of another step."""
    if manifest.step != step:
        raise CheckpointError(f"step {manifest.step} is not {step}")


@contextmanager
def _removed_if_damaged(path: Path, state: TrainState) -> Iterator[None]:
    """Remove a checkpoint of a faster tier if it does not load. Then the next start goes on from another one."""
    try:
        yield
    except CheckpointError as error:
        tier = next((tier for tier in state.tiers if tier.root == path.parent and tier.name != "shared"), None)
        if tier is None:
            raise
        if tier.is_led_by(state.ctx.world.rank):
            remove(path)
        found = CheckpointError(f"{error}; this copy of step {step_of(path)} is removed: start again without it")
        found.everywhere = error.everywhere
        raise found from error


def _change_of_average(averaged: bool, state: TrainState) -> list[str]:
    """A line if the run begins to average its weights, or stops."""
    averages = state.optimizer.average is not None
    if averages == averaged:
        return []
    text = "begins with the weights of this step" if averages else "of the checkpoint is left out: optimizer.ema is 0"
    return [f"the average of the weights {text}"]


def _other_training_state(manifest: Manifest, config: Config) -> str:
    """The reason why a checkpoint lacks state of training needed by the run, or has other.

    It is "" or a part of a message.
    """
    saved = position(manifest).config
    # A checkpoint of a version without these options trained every parameter, and had no experts.
    reasons: dict[str, tuple[Any, Any, str]] = {
        "adapter.rank": (saved.get("adapter.rank", 0), config.adapter.rank, "adapters have the shapes of their rank"),
        "adapter.dora": (saved.get("adapter.dora", False), config.adapter.dora, "only DoRA has magnitudes"),
        "adapter.targets": (
            tuple(saved.get("adapter.targets") or ()),
            config.adapter.targets,
            "other matrices have adapters",
        ),
        "train.trainable": (
            tuple(saved.get("train.trainable") or ()),
            config.train.trainable,
            "moments exist of trained parameters alone",
        ),
    }
    experts = config.model.experts
    if experts is not None:
        reasons["model.moe.balance"] = (
            saved.get("model.moe.balance", experts.balance),
            experts.balance,
            "each way to balance experts has other state",
        )
    for option, (then, now, reason) in reasons.items():
        if then != now:
            return (
                f"; {option} differs ({shown(then)} | {shown(now)}), and {reason}: resume with the value of the "
                "checkpoint, or start from its weights with --checkpoint.init_from in another --run_dir"
            )
    return ""


def _require_same_function(saved: TrainerRecord, path: Path, state: TrainState) -> None:
    """Raise CheckpointError on every rank if the run's options make another function of the checkpoint's weights."""
    changed = [*function_changes(saved.config, state.config), *adapter_changes(saved.config, state.config)]
    if not changed:
        return
    problem = CheckpointError(
        f"{path} does not fit this run (checkpoint | run): {', '.join(changed)}: the model would compute something "
        "else; resume with the values of the checkpoint, or start from its weights with --checkpoint.init_from in "
        "another --run_dir"
    )
    problem.everywhere = True
    raise problem


def _require_fitting_weights(state: TrainState, path: Path) -> None:
    """Raise CheckpointError on every rank if loaded weights are too large for train.precision. A collective."""
    if state.config.train.precision == "fp32":
        return

    def look() -> None:
        for item in _all_slices(state):
            if MAIN in item.tensors:
                problem = rounding_problem(item.spec.pieces[0].name, item.main, item.param.dtype)
                if problem:
                    raise CheckpointError(f"{problem}; go on in the precision that it was trained in, or in bf16")

    on_all_ranks(look, state.ctx, CheckpointError, f"{path} does not fit this run")


def _all_slices(state: TrainState) -> list[StateSlice]:
    return [*state.optimizer.slices(), *fixed_slices(state.stages.values())]


def _saved_slices(state: TrainState) -> list[StateSlice]:
    """What the checkpoints of the run hold: all, or all but the frozen weights of adapters."""
    return [*state.optimizer.slices(), *fixed_slices(state.stages.values(), parameters=not state.base)]


def _go_on(state: TrainState, manifest: Manifest, saved: TrainerRecord) -> list[str]:
    """Set the position of the state after its tensors are loaded; returns a line for each changed option."""
    state.optimizer.step_count = saved.updates
    # The checkpoint holds the fp32 main weights alone. The parameters are rounded from them.
    state.optimizer.refresh_params_from_main()
    # A run in bf16 or fp32 saves no loss scale. Resumed in fp16, it starts with the default one.
    if state.loss_scale.dynamic and saved.loss_scale:
        state.loss_scale = saved.loss_scale
    state.step = manifest.step
    state.consumed_samples = manifest.consumed_samples
    lines = [f"changed since: {line}" for line in changes(saved.config, state.config)]
    policy = state.config.guard.on_spike
    if saved.recent is not None:
        state.recent = saved.recent
    elif policy != "warn":
        lines.append(
            f"guard.on_spike={policy} begins anew: the checkpoint, of an older version, lacks the losses of its steps"
        )
    if state.config.optimizer.moments == "bf16" and saved.config.get("optimizer.moments", "fp32") == "fp32":
        lines.append("the fp32 moments of the checkpoint are rounded to bf16, to nearest")
    return [*lines, *_change_of_rate(state, saved.config)]


def _change_of_rate(state: TrainState, saved: dict[str, Any]) -> list[str]:
    """A line if the run's next learning rate is not the one given by its saved options."""
    config = state.config
    if state.step >= config.train.steps:
        return []
    now = flatten(config)
    # Options that the checkpoint lacks are newer than it. A manifest may hold anything under their names.
    kept = {path: saved[path] for path in now if _may_be(path, saved.get(path), now[path])}
    then = unflatten(now | kept, type(config.model))
    line = change_of_rate(state.step, state.consumed_samples, then, config)
    if line:
        return [line]
    return []


def _may_be(path: str, saved: Any, now: Any) -> bool:
    """Whether a saved value has the type of an option. A length of the rate's schedule is a number or a text."""
    if path not in ("optimizer.warmup_steps", "optimizer.decay_steps"):
        return type(saved) is type(now)
    return type(saved) is int or (isinstance(saved, str) and is_length(saved))


def _start_from_weights(state: TrainState) -> list[str]:
    """Load the weights named by `checkpoint.init_from`, at step 0; returns lines for the user.

    They fill the optimizer's main weights, and the parameters are rounded from those.
    """
    options = state.config.checkpoint
    if options.init_from == "none":
        return []
    path = Path(options.init_from)
    slices, model_config, unused, notes = without_added(path, _all_slices(state), options_of_weights(state), state.ctx)
    _require_trained_head(path, state)
    # The base of adapters has none. They start as they were made.
    slices = [item for item in slices if item.spec.added_by != ADAPTER]
    different: list[str] = []
    if options.strict:
        load_weights(path, slices=slices, ctx=state.ctx, model_config=model_config, unused=unused)
    else:
        different = load_fitting(path, slices=slices, ctx=state.ctx, model_config=model_config)
    _require_fitting_weights(state, path)
    state.optimizer.refresh_params_from_main()
    lines = [f"does not fit (checkpoint | run): {line}{_lost(line)}" for line in different]
    manifest = verified_manifest(path, state.ctx)
    notes += grown_note(manifest, state.config.model.vocab_size)
    state.origin = origin_of(manifest.trainer)
    began = f" ({in_words(state.origin)})" if state.origin else ""
    return [f"started from the weights of {path}{began}, step 0", *notes, *lines, *_function_notes(path, state)]


def _lost(line: str) -> str:
    """What becomes of a tensor that does not fit, by its line of `load_fitting`."""
    if line.startswith("model.") or ": missing | " in line:
        return ""
    if line.endswith(" | unknown"):
        return ": the checkpoint's values are thrown away"
    return ": the checkpoint's values are thrown away, and the run's are drawn"


def _require_trained_head(path: Path, state: TrainState) -> None:
    """Raise CheckpointError on every rank if the head is neither loaded nor trained."""
    config = state.config
    trained = any(fnmatchcase(SCORE, pattern) for pattern in config.train.trainable or ("*",))
    if config.model.head == "vocabulary" or trained or HEAD in verified_manifest(path, state.ctx).model_config:
        return
    patterns = shown(config.train.trainable)
    problem = CheckpointError(f"{path} has no {SCORE}, and train.trainable={patterns} does not train it: add {SCORE}")
    problem.everywhere = True
    raise problem


def _start_from_adapters(state: TrainState) -> list[str]:
    """Load the adapters named by `adapter.init_from`, as `_start_from_weights` does; returns lines for the user.

    Their checkpoint may hold further weights that were trained, if this run trains them too. Those that it lacks are
    the base's.
    """
    config = state.config
    if config.adapter.init_from == "none":
        return []
    path = Path(config.adapter.init_from)
    manifest = verified_manifest(path, state.ctx)
    adapter_base.require_same(manifest.base, dict(state.base), path, config)
    adapter_base.require_same_products(position(manifest).config, path, config)
    slices = [
        item for item in weights_of(_saved_slices(state)) if item.spec.added_by == ADAPTER or holds(manifest, item)
    ]
    reason = "; adapter.targets and train.trainable must name what was trained there"
    load_weights(
        path, slices=slices, ctx=state.ctx, model_config=options_of_weights(state), why=lambda manifest: reason
    )
    _require_fitting_weights(state, path)
    state.optimizer.refresh_params_from_main()
    return [f"started from the adapters of {path}, step 0"]


class _Added(NamedTuple):
    """What an option adds to a model, for runs that start from weights of a model made without it."""

    note: str
    """A line for the user about the added tensors, which keep their initial values."""
    unused: tuple[str, ...] = ()
    """Tensors of the model without the option."""
    differs: tuple[str, ...] = ()
    """Further options, without `model.`, that may then be others than the checkpoint's."""


_ADDED = {
    # A model trained without a selection bias, such as Mixtral. The biases prefer no expert.
    SELECTION_BIAS: _Added("the selection biases of routers start at 0: the weights were made without {option}=bias"),
    # A language model. A score is never tied to the embedding.
    HEAD: _Added(
        "the head is drawn, and the one of the vocabulary is not used: the weights were made without {option}=score",
        unused=("head.weight", "head.bias"),
        differs=("tie_word_embeddings",),
    ),
}


class InitialWeights(NamedTuple):
    """What to load from the weights of checkpoint.init_from."""

    slices: list[StateSlice]
    model_config: dict[str, Any]
    """The options to compare with those of the checkpoint."""
    unused: tuple[str, ...]
    """The tensors of the checkpoint that nobody needs."""
    notes: list[str]


def without_added(
    path: Path, slices: Iterable[StateSlice], model_config: Mapping[str, Any], ctx: ParallelContext
) -> InitialWeights:
    """What to load from the checkpoint, without what options of the run add to its model. A collective.

    `slices` and `model_config` are those of the whole model, as for `load_weights`.
    """
    model_config = dict(model_config)
    lacks = []
    for option in [option for option in _ADDED if option in model_config]:
        stated = verified_manifest(path, ctx).model_config
        # A checkpoint that states the option must hold what it adds.
        if option not in stated:
            lacks.append(option)
            del model_config[option]
            model_config |= {name: stated[name] for name in _ADDED[option].differs if name in stated}
    return InitialWeights(
        [item for item in slices if item.spec.added_by not in lacks],
        model_config,
        tuple(name for option in lacks for name in _ADDED[option].unused),
        [_ADDED[option].note.format(option=f"model.{option}") for option in lacks],
    )


def _function_notes(path: Path, state: TrainState) -> list[str]:
    """A line for each option that makes another function of the weights than where they come from. A collective."""

    def look() -> list[str]:
        saved = open_manifest(path).trainer.get("config") if state.ctx.world.first else None
        # Weights that were not trained here may come without options.
        if type(saved) is dict:
            return function_changes(saved, state.config)
        return []

    changed = on_all_ranks(look, state.ctx, CheckpointError, f"{path} not read")
    return [f"computes something else than the checkpoint's model: {line}" for line in changed]
