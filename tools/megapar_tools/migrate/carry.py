"""Carries the options of a running job over into ours, by the rows of the table, and keeps account of each.

Nothing is dropped: an option is carried over, or needs nothing here, or is listed with the reason and what to do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from megapar.config.lengths import in_samples
from megapar.config.model_rules import Families
from megapar.config.options import Length, default_config, flatten, option_types
from megapar_tools.migrate.conversions import UNKNOWN_DATA, nothing
from megapar_tools.migrate.job import OFF, Job, NoCounterpart, Ours, Words, plain, whole
from megapar_tools.migrate.rows import FROM_OTHERS, OtherFlag
from megapar_tools.migrate.table import TABLE

BASE = "base"
AUTO = "auto"
# A default of theirs for one of these options is written down: it decides what is computed. Others stay at ours.
_DECIDE = (
    *("optimizer.lr", "optimizer.min_lr", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.betas"),
    *("optimizer.eps", "optimizer.weight_decay", "optimizer.clip_grad", "train.global_batch_size", "train.steps"),
    *("train.micro_batch_size", "train.seq_length", "train.seed", "train.precision", "data.split"),
)


@dataclass(frozen=True)
class Option:
    """An option of a running job: its framework, name and values. `unresolved` says what keeps them from being read.

    `spelled` is what the job calls it, where the table has another name.
    """

    framework: str
    name: str
    words: Words
    unresolved: str = ""
    spelled: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the account: what they call it, its value there, and what it is here, or why it is nothing.

    `todo` is what a person can do about it. `is_default` is set if the job does not set the option.
    """

    theirs: str
    value: str
    here: str
    todo: str = ""
    is_default: bool = False


@dataclass
class Moved:
    """The account. `ours` has the values of our options as words, and `sources` whose they are, by dotted path."""

    options: int = 0
    carried: list[Line] = field(default_factory=list)
    defaults: list[Line] = field(default_factory=list)
    left: list[Line] = field(default_factory=list)
    ours: dict[str, Words] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mover:
    """Fills the account. `types` and `own` are the types and defaults of our options, of all families."""

    moved: Moved
    rows: Mapping[tuple[str, str], OtherFlag]
    job: Job
    types: Mapping[str, Any]
    own: Mapping[str, Any]

    def give(self, option: Option, name: str) -> None:
        """Account for an option of the job."""
        value = " ".join(option.words)
        row = self.rows.get((option.framework, plain(option.name))) or self._section(option)
        if option.unresolved and not (row and _needs_no_value(row)):
            here = f"cannot be resolved: {option.unresolved}"
            if row and row.option == "data.train":
                self.moved.ours.setdefault(row.option, (UNKNOWN_DATA,))
                self.moved.sources.setdefault(row.option, f"{name}, which cannot be resolved")
            self.moved.left.append(Line(name, value, here, "give its value with --var, or write it into the file"))
            return
        if row is None:
            todo = "look for a counterpart in docs/comparison.md"
            self.moved.left.append(Line(name, value, "megapar's table does not know it", todo))
            return
        if option.words == (AUTO,) and option.framework == "DeepSpeed":
            where = f"taken from {row.auto}" if row.auto else "computed here too"
            self.moved.carried.append(Line(name, value, f"nothing to set: {where}"))
            return
        try:
            ours = self._converted(row, option.words or ("true",))
            said = self._set(ours, name, value)
        except NoCounterpart as reason:
            self.moved.left.append(Line(name, value, str(reason), _todo(row, str(reason))))
            return
        if said and row.relation == "choice" and row.note:
            said = f"{said} ({row.note})"
        self.moved.carried.append(Line(name, value, said or _nothing(row)))

    def default(self, framework: str, row: OtherFlag, name: str) -> None:
        """Account for a default of theirs, unless a given option has decided ours."""
        words = () if row.default == FROM_OTHERS else tuple(row.default.split())
        value = " ".join(words)
        try:
            ours = self._converted(row, words)
        except NoCounterpart as reason:
            self.moved.left.append(Line(name, value, str(reason), _todo(row, str(reason)), is_default=True))
            return
        for option, given in ours.items():
            self._set_default(option, given, f"{framework}'s default {name}", Line(name, value, ""))

    def _set_default(self, option: str, words: Words, source: str, line: Line) -> None:
        theirs, own = typed(words, self.types[option]), self.own[option]
        if option in self.moved.ours or theirs in (None, own):
            return
        shown = f"{option} = {_spelled(theirs)}"
        if option.startswith("model.") or option in _DECIDE:
            self.moved.ours[option] = words
            self.moved.sources[option] = source
            here = f"{shown}, written down; the default here is {_spelled(own)}"
        else:
            here = f"{option} stays {_spelled(own)}, the default here (theirs: {_spelled(theirs)})"
        self.moved.defaults.append(Line(line.theirs, line.value, here, is_default=True))

    def _section(self, option: Option) -> OtherFlag | None:
        """The row of a section around a key, as `wandb` of `wandb.project`."""
        parts = plain(option.name).split(".")
        for length in range(len(parts) - 1, 0, -1):
            row = self.rows.get((option.framework, ".".join(parts[:length])))
            if row is not None and (row.relation in ("lacking", "always") or row.convert is not None):
                return row
        return None

    def _converted(self, row: OtherFlag, words: Words) -> Ours:
        """Options of ours that a value becomes. Raises NoCounterpart."""
        value = " ".join(words).lower()
        if row.convert is not None:
            if words in ((), ("",)) or row.relation != "sets" or value not in OFF:
                return row.convert(self.job, words)
            return {}
        if row.relation == "lacking":
            if value in OFF:
                return {}
            raise NoCounterpart(row.note)
        if row.relation == "always":
            if row.choices and value not in map(str.lower, row.choices):
                raise NoCounterpart(f"megapar has only {' or '.join(row.choices)}")
            return {}
        if row.relation == "sets":
            if value not in (*OFF, "0"):
                return {row.option: (row.ours,)}
            # A switch of ours is turned the other way. Of a choice nobody knows which value is meant.
            opposite = {"true": "false", "false": "true"}.get(row.ours)
            return {row.option: (opposite,)} if opposite else {}
        if row.relation == "choice":
            for theirs, ours in row.choices.items():
                if theirs.lower() == value:
                    return {row.option: (ours,)}
            raise NoCounterpart(f"{' and '.join(row.choices)} have a counterpart")
        if row.relation == "computed":
            raise NoCounterpart(f"a person has to set {row.option}")
        return {row.option: words}

    def _set(self, ours: Ours, name: str, value: str) -> str:
        """Take over values of ours; returns them for the account. Raises NoCounterpart."""
        for option, words in ours.items():
            taken = self.moved.ours.get(option)
            if option == BASE:
                continue
            if option not in self.types:
                raise NoCounterpart(f"there is no {option}")
            if typed(words, self.types[option]) is None:
                raise NoCounterpart(f"{' '.join(words)[:60]!r} is no value of {option}")
            if taken is not None and typed(taken, self.types[option]) != typed(words, self.types[option]):
                shown = _spelled(typed(taken, self.types[option]))
                raise NoCounterpart(f"{option} is {shown} by {self.moved.sources[option]} already")
        for option, words in ours.items():
            self.moved.ours[option] = words
            self.moved.sources[option] = f"{name} {value}".rstrip()
        lines = (f"{o} = {_spelled(typed(w, self.types[o]) if o in self.types else w[0])}" for o, w in ours.items())
        return ", ".join(lines)


def move(
    options: Sequence[Option],
    families: Families,
    *,
    world: int = 0,
    samples: int = 0,
    without_defaults: Iterable[str] = (),
    dashes: Callable[[str], str] = lambda framework: "",
) -> Moved:
    """Carry the options of a job over. Defaults of frameworks in `without_defaults` are not theirs here.

    `dashes` are those before the names of a framework's options.
    """
    frameworks = list(dict.fromkeys(option.framework for option in options))
    rows = {(framework, plain(row.name)): row for framework in frameworks for row in TABLE[framework]}
    given: dict[str, Words] = {}
    for option in options:
        if not option.unresolved and (option.words != (AUTO,) or option.framework != "DeepSpeed"):
            given.setdefault(plain(option.name), option.words)
    with_defaults = [framework for framework in frameworks if framework not in without_defaults]
    defaults = {
        name: tuple(row.default.split())
        for (framework, name), row in rows.items()
        if framework in with_defaults and row.default and row.default != FROM_OTHERS
    }
    moved = Moved(len(options))
    types = {**families.types(), **option_types()}
    own = flatten(default_config())
    own = {path: next(iter(families.readers(path).values()), None) for path in types} | own
    unread = frozenset(plain(option.name) for option in options if option.unresolved)
    mover = _Mover(moved, rows, Job(given, defaults, world, samples, unread), types, own)
    for option in options:
        mover.give(option, f"{dashes(option.framework)}{option.spelled or option.name}")
    named = {plain(option.name) for option in options}
    for (framework, name), row in rows.items():
        if framework in with_defaults and row.default and name not in named:
            mover.default(framework, row, f"{dashes(framework)}{row.name}")
    return moved


def _nothing(row: OtherFlag) -> str:
    """Return the words "nothing to set", with the reason if the note of a row is one. Other notes explain a value."""
    reason = row.note if row.relation in ("always", "lacking") or row.convert is nothing else ""
    return f"nothing to set: {reason}" if reason else "nothing to set"


def _needs_no_value(row: OtherFlag) -> bool:
    """Whether an option means the same here whatever its value."""
    return (
        (row.relation == "lacking" and row.convert is None)
        or row.convert is nothing
        or (row.relation == "always" and not row.choices)
    )


def _todo(row: OtherFlag, reason: str) -> str:
    """What to do about an option that was not carried over, as far as `reason` does not say it."""
    note = "" if reason in row.note or row.note in reason else row.note
    if row.option:
        return f"set {row.option}: {note}" if note else f"set {row.option}"
    return note


def typed(words: Words, annotation: Any) -> Any:
    """Words as a value of an option of this type. None if they are no such value."""
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        values = [typed((word,), items[0]) for text in words for word in text.split(",")]
        if items[0] is str:
            values = list(words)
        right = items[-1] is Ellipsis or len(items) == len(values)
        return None if None in values or not right else tuple(values)
    text = " ".join(words)
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if str(choice) == text), None)
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower())
    if annotation is str:
        return text if text.isprintable() and text else None
    try:
        if annotation == Length and not text.replace(".", "").isdecimal():
            in_samples(text, 1)
            return text
        return whole(text) if annotation in (int, Length) else float(text)
    except (NoCounterpart, ValueError):
        return None


def _spelled(value: Any) -> str:
    """A value for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(_spelled, value)) or "none"
    return str(value)
