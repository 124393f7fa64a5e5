"""Restores a training state from the checkpoints of its run folder, or starts it from weights."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import CheckpointError, StorageError
from megapar.checkpoint import by_host, tiers
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.folder import exclusive, remove
from megapar.checkpoint.format import Manifest, step_of
from megapar.checkpoint.lineage import Lineage, new_id, set_aside
from megapar.checkpoint.load import has_average, holds, load, load_fitting, load_weights, verified_manifest, weights_of
from megapar.checkpoint.origin import in_words, origin_of
from megapar.checkpoint.resume import choose
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
from megapar.train import adapter_base
from megapar.train.data import compare
from megapar.train.position import TrainerRecord, options_of_weights, position
from megapar.train.resumed_samples import resumed_blend


@contextmanager
def lock_run_dir(run_dir: Path, ctx: ParallelContext, process: RankProcess | None = None) -> Iterator[None]:
    """Lock the run folder against other jobs, and remove what killed jobs left in it. A collective.

    `process`, this rank's, then claims the folder for its reports (`RankProcess.claim_run_dir`).
    """
    with exclusive(run_dir, run_dir / FOLDER, ctx):
        if process is not None:
            process.claim_run_dir(run_dir)
        yield


def find(
    config: Config,
    run_dir: Path,
    ctx: ParallelContext,
    faster: Sequence[Tier] = (),
    *,
    again: bool = False,
    rewind: spikes.RewindPlan | None = None,
    opened: Collection[Path] = (),
) -> Path | None:
    """The checkpoint named by `checkpoint.resume`, or None. A collective.

    `faster` are the tiers besides the run folder. `opened` are folders of other frameworks, which may be named.
    `again`: the job's launcher has started the ranks again, and they go on from the newest whatever the option says.
    With `rewind` they go on from the newest that serves it.
    """
    resume = "auto" if again or rewind is not None else config.checkpoint.resume
    if Path(resume) in opened:
        return Path(resume)

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
            adapter_base.require_same(_manifest(path, state).base, dict(state.base), path, state.config)
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
                manifest=state.opened.get(path),
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
        if manifest.source is not None:
            notes = [*manifest.source.notes, *notes]
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


def _manifest(path: Path, state: TrainState) -> Manifest:
    """The manifest of a checkpoint, or that of another framework's folder opened before. A collective."""
    return state.opened.get(path) or verified_manifest(path, state.ctx)


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
    manifest = _manifest(path, state)
    slices, model_config, unused, notes = without_added(manifest, _all_slices(state), options_of_weights(state))
    _require_trained_head(manifest, path, state)
    # The base of adapters has none. They start as they were made.
    slices = [item for item in slices if item.spec.added_by != ADAPTER]
    load_from = partial(_load_strictly, unused=unused) if options.strict else load_fitting
    different = load_from(path, slices=slices, ctx=state.ctx, model_config=model_config, manifest=manifest)
    _require_fitting_weights(state, path)
    state.optimizer.refresh_params_from_main()
    lines = [f"does not fit (checkpoint | run): {line}{_lost(line)}" for line in different]
    notes += grown_note(manifest, state.config.model.vocab_size)
    state.origin = origin_of(manifest.trainer)
    began = f" ({in_words(state.origin)})" if state.origin else ""
    if manifest.source is not None:
        notes = [*manifest.source.notes, *notes]
    return [f"started from the weights of {path}{began}, step 0", *notes, *lines, *_function_notes(manifest, state)]


def _load_strictly(path: Path, **what: Any) -> list[str]:
    """Load all weights (`load_weights`). No difference is left."""
    load_weights(path, **what)
    return []


def _lost(line: str) -> str:
    """What becomes of a tensor that does not fit, by its line of `load_fitting`."""
    if line.startswith("model.") or ": missing | " in line:
        return ""
    if line.endswith(" | unknown"):
        return ": the checkpoint's values are thrown away"
    return ": the checkpoint's values are thrown away, and the run's are drawn"


def _require_trained_head(manifest: Manifest, path: Path, state: TrainState) -> None:
    """Raise CheckpointError on every rank if the head is neither loaded nor trained."""
    config = state.config
    trained = any(fnmatchcase(SCORE, pattern) for pattern in config.train.trainable or ("*",))
    if config.model.head == "vocabulary" or trained or HEAD in manifest.model_config:
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


def without_added(manifest: Manifest, slices: Iterable[StateSlice], model_config: Mapping[str, Any]) -> InitialWeights:
    """What to load from the checkpoint, without what options of the run add to its model.

    `slices` and `model_config` are those of the whole model, as for `load_weights`.
    """
    model_config = dict(model_config)
    lacks = []
    for option in [option for option in _ADDED if option in model_config]:
        stated = manifest.model_config
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


def _function_notes(manifest: Manifest, state: TrainState) -> list[str]:
    """A line for each option that makes another function of the weights than where they come from."""
    saved = manifest.trainer.get("config")
    # Weights that were not trained here may come without options.
    changed = function_changes(saved, state.config) if type(saved) is dict else []
    return [f"computes something else than the checkpoint's model: {line}" for line in changed]
