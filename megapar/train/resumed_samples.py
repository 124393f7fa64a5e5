"""Which samples a resumed run reads: those that follow the samples of its checkpoint, none again and none left out.

The source of the sample at each position of a run follows from the blend. The sample that the source gives there
follows from the number of its samples before, from train.seed, train.seq_length and data.split. So a run goes on
rightly if each source has given as many samples before the checkpoint by the options of now as it really has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import CheckpointError, DataError
from megapar.checkpoint.format import Manifest
from megapar.config.data_spec import DataSource, blend_stages, weights_to_come
from megapar.config.messages import counted, shown
from megapar.config.options import Config, flatten, unflatten
from megapar.data.blend import Blend, BlendPhase

_DECIDING = (
    *("data.train", "data.stages", "data.split", "data.tokenizer"),
    *("train.steps", "train.global_batch_size", "train.batch_ramp", "train.seq_length", "train.seed"),
)  # the options that decide the samples


def stages_of(config: Config) -> tuple[BlendPhase, ...]:
    """The blend that the options ask for from the first sample on."""
    return tuple(BlendPhase(*stage) for stage in blend_stages(config))


class Resumed(NamedTuple):
    """The blend of a resumed run, and lines for the user."""

    stages: tuple[BlendPhase, ...]
    notes: list[str]


def resumed_blend(
    manifest: Manifest, saved: Mapping[str, Any], config: Config, hashes: Mapping[str, str], path: Path
) -> Resumed:
    """The blend of a run that goes on from the checkpoint `path`, whose options were `saved`.

    `hashes` are those of this run's files. Budgets in tokens keep the blend of the samples read so far, and get what is
    left of them. Raises DataError on every rank if samples would come again or be left out, unless
    data.accept_changed is set.
    """
    before = _Before.of(manifest, saved, config)
    now = stages_of(config)
    if not before.consumed:
        return Resumed(now, [])
    problems = _other_samples(before, config, manifest.data.get("samples", {}))
    sources = _Union.of(before.sources, _sources(config), manifest.data.get("hashes", {}), hashes)
    moved: list[str] = []
    going_on = Resumed(now, [])
    if _has_budgets(before.config) and _has_budgets(config) and sources.unchanged:
        going_on = _with_budgets(before, config)
    else:
        moved = _moved(before, now, sources)
    if moved:
        problems.append(f"data.train, data.stages: {', '.join(moved)}")
    if not problems:
        return going_on
    if config.data.accept_changed:
        return Resumed(now, [f"data changed since: {line}" for line in problems])
    remedies = ["put the old values back"]
    if moved and len(problems) == 1:
        remedies = [f"for other weights from here on give {_from_here_on(before, config, sources)}"]
    problem = DataError(
        f"data changed since {path} was saved: after its {before.consumed:,} samples, {'; '.join(problems)}; "
        f"{', '.join(remedies)}, or go on regardless with --data.accept_changed"
    )
    problem.everywhere = True
    raise problem


@dataclass(frozen=True)
class _Before:
    """What the samples before a checkpoint were: how many, and by which options and which blend."""

    consumed: int
    config: Config
    stages: tuple[BlendPhase, ...]

    @property
    def sources(self) -> list[str]:
        return _sources(self.config)

    @property
    def past(self) -> tuple[BlendPhase, ...]:
        """The stages of the samples that were read."""
        return tuple(stage for stage in self.stages if stage.first < self.consumed)

    def taken(self, stages: Sequence[BlendPhase]) -> list[int]:
        """How many samples each source would have given by these stages."""
        found: list[int] = Blend(stages, self.config.train.seed).taken(self.consumed).tolist()
        return found

    @classmethod
    def of(cls, manifest: Manifest, saved: Mapping[str, Any], config: Config) -> "_Before":
        now = flatten(config)
        kept = {}
        for option in _DECIDING:
            value = saved.get(option)
            value = tuple(value) if type(value) is list else value
            # An option that the checkpoint lacks is newer than it. A manifest may hold anything under its name.
            if type(value) is type(now[option]) and (type(value) is not tuple or _fits(option, value)):
                kept[option] = value
        then = unflatten(now | kept, type(config.model))
        stages = stages_of(then)
        if "stages" in manifest.data:
            stages = _parsed(manifest, len(then.data.train))
        return cls(manifest.consumed_samples, then, stages)


def _fits(option: str, values: tuple[Any, ...]) -> bool:
    kinds = (str,) if option in ("data.train", "data.stages") else (int, float)
    return all(isinstance(value, kinds) for value in values) and (option != "data.train" or len(values) > 0)


def _parsed(manifest: Manifest, sources: int) -> tuple[BlendPhase, ...]:
    """The stages of a manifest. Raises CheckpointError if they are not those of a blend of so many sources."""
    stated = manifest.data["stages"]
    try:
        stages = tuple(BlendPhase(int(first), tuple(map(float, weights))) for first, weights in stated)
        good = bool(stages) and stages[0].first == 0 and all(len(stage.weights) == sources for stage in stages)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise CheckpointError(f"checkpoint of step {manifest.step}: data.stages is {stated!r}, no blend of its sources")
    return stages


def _sources(config: Config) -> list[str]:
    return [DataSource.parse(text).source for text in config.data.train]


def _has_budgets(config: Config) -> bool:
    return any(DataSource.parse(text).unit == "tokens" for text in config.data.train)


@dataclass(frozen=True)
class _Union:
    """The sources of a run before and after a change of its options.

    `names` are those of before, and then those that were added. `of_now` has the number of each source of now among
    them.
    """

    names: list[str]
    of_now: list[int]
    added: list[str]
    gone: list[str]

    @classmethod
    def of(
        cls, before: Sequence[str], now: Sequence[str], hashes_before: Mapping[str, str], hashes: Mapping[str, str]
    ) -> "_Union":
        """A source is the same if its name is, or if files of one name elsewhere have the same contents."""
        names = list(before)
        of_now: list[int] = []
        contents = [_contents(source, hashes_before) for source in before]
        for source in now:
            found = [number for number, name in enumerate(before) if name == source]
            if not found and _contents(source, hashes):
                same = _contents(source, hashes)
                found = [n for n, other in enumerate(contents) if other == same and before[n] not in now]
            found = [number for number in found if number not in of_now]
            if not found:
                found = [len(names)]
                names.append(source)
            of_now.append(found[0])
        gone = [name for number, name in enumerate(before) if number not in of_now]
        return cls(names, of_now, names[len(before) :], gone)

    @property
    def unchanged(self) -> bool:
        """Whether the sources of now are those of before, in their order."""
        return not self.added and not self.gone and self.of_now == sorted(self.of_now)

    def of_before(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Weights of the sources of before as those of all."""
        return (*weights, *[0.0] * len(self.added))

    def spread(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Numbers of the sources of now as those of all."""
        found: list[Any] = [0] * len(self.names)
        for number, value in zip(self.of_now, values, strict=True):
            found[number] = value
        return tuple(found)


def _contents(source: str, hashes: Mapping[str, str]) -> dict[str, str]:
    """The hashes of a pair's files by their suffix."""
    return {path.removeprefix(source): value for path, value in hashes.items() if path.startswith(f"{source}.")}


def _other_samples(before: _Before, config: Config, numbers: Mapping[str, int]) -> list[str]:
    """A line for each changed option that makes other samples of the sources.

    `numbers` are those of the samples of each source of before.
    """
    then = flatten(before.config)
    now = flatten(config)
    kinds = {source.partition(":")[0] for source in before.sources}
    files = [source for source in before.sources if source.partition(":")[0] not in ("synthetic", "hf")]
    concerned = {
        "train.seed": bool(files),
        "train.seq_length": bool(kinds - {"synthetic"}),
        "data.split": bool(files),
        "data.tokenizer": "hf" in kinds,
    }
    changed = [option for option, concerns in concerned.items() if concerns and then[option] != now[option]]
    if not changed:
        return []
    shares = []
    for source, taken in zip(before.sources, before.taken(before.stages), strict=True):
        number = numbers.get(source, 0)
        if source in files and type(number) is int and number and taken % number:
            shares.append(f"{taken % number / number:.0%} of {source}")
    read = f" ({', '.join(shares)} was read, and may come again in place of what was not)" if shares else ""
    return [f"{option} {shown(then[option])} -> {shown(now[option])}: other samples{read}" for option in changed]


def _moved(before: _Before, now: tuple[BlendPhase, ...], sources: _Union) -> list[str]:
    """How many samples of each source would come again or be left out."""
    if sources.unchanged and before.past == tuple(stage for stage in now if stage.first < before.consumed):
        return []
    had = sources.of_before(before.taken(before.stages))
    would = sources.spread(before.taken(now))
    found = []
    for name, given, counted_now in zip(sources.names, had, would, strict=True):
        if counted_now < given:
            found.append(f"{counted(int(given - counted_now), 'sample')} of {name} would come again")
        if counted_now > given:
            found.append(f"{counted(int(counted_now - given), 'sample')} of {name} would be left out")
    return found


def _with_budgets(before: _Before, config: Config) -> Resumed:
    """The blend of before, and from here on what is left of the tokens of data.train. The sources are the same."""
    entries = [DataSource.parse(text) for text in config.data.train]
    then = [DataSource.parse(text) for text in before.config.data.train]
    same = [entry[1:] for entry in then] == [entry[1:] for entry in entries]
    if same and before.config.train.samples() == config.train.samples():
        return Resumed(before.past, [])
    taken = before.taken(before.stages)
    weights = weights_to_come(config, before.consumed, taken)
    if not sum(weights) > 0:  # nothing is left to train
        return Resumed(before.past, [])
    length = config.train.seq_length
    words = [
        f"{tokens * length:,} of {entry.source} read, {left:,.0f} to come"
        for entry, tokens, left in zip(entries, taken, weights, strict=True)
    ]
    note = f"data.train: from sample {before.consumed:,} on by the tokens that are left: {'; '.join(words)}"
    return Resumed((*before.past, BlendPhase(before.consumed, weights)), [note])


def _from_here_on(before: _Before, config: Config, sources: _Union) -> str:
    """The options that read on by the weights of now after the samples that were read."""
    past = [BlendPhase(first, sources.of_before(weights)) for first, weights in before.past]
    now = stages_of(config)
    if _has_budgets(config):
        had = sources.of_before(before.taken(before.stages))
        now = (
            BlendPhase(0, weights_to_come(config, before.consumed, [int(had[number]) for number in sources.of_now])),
        )
    passed = [stage for stage in now if stage.first <= before.consumed]
    coming = [stage for stage in now if stage.first > before.consumed]
    stages = [*past[1:], BlendPhase(before.consumed, sources.spread(passed[-1].weights))]
    stages += [BlendPhase(first, sources.spread(weights)) for first, weights in coming]
    entries = [f"{weight:.12g}:{name}" for weight, name in zip(past[0].weights, sources.names, strict=True)]
    words = [f"{first}:{','.join(f'{weight:.12g}' for weight in weights)}" for first, weights in stages]
    return f"--data.train {' '.join(entries)} --data.stages {' '.join(words)}"
