"""What a person gets of a job that was carried over: a TOML file, three lists, and the arithmetic of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapar.base.errors import ConfigError
from megapar.config.derive import smallest_world
from megapar.config.files import load, part_toml
from megapar.config.model_rules import Families
from megapar.config.options import Config, flatten, option_types, unflatten
from megapar_tools.migrate.carry import BASE, Line, Moved, typed
from megapar_tools.migrate.settle import settle


@dataclass(frozen=True)
class Account:
    """A job carried over. `refusal` is what megapar's checks say of the options, "" if they can run."""

    moved: Moved
    toml: str
    config: Config
    refusal: str
    arithmetic: tuple[str, ...]
    ranks: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything was carried over, and can run."""
        return not self.moved.left and not self.refusal

    @property
    def percent(self) -> float:
        """The share of the job's options that were carried over or need nothing."""
        left = sum(not line.is_default for line in self.moved.left)
        return 100 * (self.moved.options - left) / max(self.moved.options, 1)


@dataclass(frozen=True)
class Project:
    """What a program hands to this room: families, presets by name, and the check of a configuration."""

    families: Families
    presets: Callable[[], Mapping[str, Path]]
    validate: Callable[[Config, int], Config]

    def account(self, moved: Moved, world: int) -> Account:
        """Return the account of a job that was carried over to `world` ranks."""
        return account_of(moved, self.families, self.presets(), self.validate, world)


def account_of(
    moved: Moved,
    families: Families,
    presets: Mapping[str, Path],
    validate: Callable[[Config, int], Config],
    world: int,
) -> Account:
    """Make a configuration of what was carried over, and check it for `world` ranks, 0 if that is not known."""
    config = _config(moved, families, presets)
    ranks = world or smallest_world(config.parallel)
    refusal = ""
    try:
        validate(config, ranks)
    except ConfigError as error:
        refusal = str(error)
    return Account(moved, _toml(moved, config), config, refusal, tuple(_arithmetic(config, ranks, bool(world))), world)


def _config(moved: Moved, families: Families, presets: Mapping[str, Path]) -> Config:
    """The configuration. Values that its family does not read go to the list of what was left."""
    argv = ["--config", *moved.ours[BASE]] if BASE in moved.ours else []
    start = load(argv, presets, families).config
    family = " ".join(moved.ours.get("model.family", (start.model.family,)))
    options = families.find(family).options
    known = option_types(options)
    for option in [path for path in moved.ours if path != BASE and path not in known]:
        _leave(moved, option, family, families)
    values = flatten(start) if isinstance(start.model, options) else flatten(Config(model=options()))
    for option, words in moved.ours.items():
        if option != BASE:
            values[option] = typed(words, known[option])
    longest = "model.max_position_embeddings"
    if BASE in moved.ours and "model.rope_theta" in known and values["train.seq_length"] > values[longest]:
        # Rotary positions go on beyond the length that a published model states, and others do not ask.
        length = str(values["train.seq_length"])
        here = f"{longest} = {length}, written down; the model's is {values[longest]}"
        moved.ours[longest], moved.sources[longest] = (length,), "the samples are longer than the model's"
        moved.defaults.append(Line("the longest sequence", "", here, is_default=True))
        values[longest] = values["train.seq_length"]
    settle(moved, values)
    return unflatten(values, options)


def _leave(moved: Moved, option: str, family: str, families: Families) -> None:
    """Move what became `option` to the list of what was left: the family does not read it."""
    source, words = moved.sources.pop(option), moved.ours.pop(option)
    name, _, value = source.partition(" ")
    kept = [line for line in moved.carried if (line.theirs, line.value) != (name, value)]
    is_default = len(kept) == len(moved.carried)
    moved.carried = kept
    readers = list(families.readers(option))
    here = f"family {family} has no {option.partition('.')[2]}"
    todo = f"model.family {' or '.join(readers[:3])} has it" if readers else ""
    moved.left.append(Line(name, value or " ".join(words), here, todo, is_default=is_default))


def _toml(moved: Moved, config: Config) -> str:
    """The options as TOML, each with whose value it is as a comment."""
    lines = []
    section = ""
    for line in part_toml(config, [path for path in moved.ours if path != BASE]).splitlines():
        if line.startswith("["):
            section = f"{line[1:-1]}."
        source = moved.sources.get(section + line.partition(" = ")[0], "")
        # A value may hold any letter; a line break in it would end the comment.
        comment = "".join(letter if letter.isprintable() else "?" for letter in source)
        lines.append(f"{line}  # {comment}" if comment and not line.startswith("[") else line)
    if BASE in moved.ours:
        text = moved.ours[BASE][0].replace("\\", "\\\\").replace('"', '\\"')
        lines.insert(0, f'{BASE} = "{text}"')
    return "\n".join([*lines, ""]).lstrip("\n")


def _arithmetic(config: Config, ranks: int, is_known: bool) -> list[str]:
    """How ranks, batches and steps follow from each other."""
    parallel, train = config.parallel, config.train
    replica = parallel.tp * parallel.cp * parallel.pp
    dp = max(ranks // replica, 1)
    world = f"{ranks:,} ranks = tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {dp}"
    if replica * dp != ranks:
        world = f"{ranks:,} ranks are no multiple of tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp}"
    if not is_known:
        world += "; the job does not say how many there are: give --world_size"
    counts = -(-train.global_batch_size // (train.micro_batch_size * dp))
    batch = f"global batch {train.global_batch_size:,} = micro-batch {train.micro_batch_size} x dp {dp}"
    if counts * train.micro_batch_size * dp == train.global_batch_size:
        batch += f" x {counts:,} micro-batches of a replica (gradient accumulation)"
    else:
        batch += f" x at most {counts:,} micro-batches of a replica"
    tokens = train.global_batch_size * train.seq_length
    total = train.samples() * train.seq_length if len(train.batch_ramp) in (0, 3) else 0
    run = f"{tokens:,} tokens a step x {train.steps:,} steps: {total / 1e9:,.2f} billion tokens"
    lines = [world, batch, f"{run}, with a batch that grows" if train.batch_ramp else run]
    if not config.model.vocab_size and config.data.tokenizer == "bytes":
        lines.append("the vocabulary is not known: set model.vocab_size or data.tokenizer; bytes has 257 ids")
    return lines


def report(account: Account, notes: Sequence[str] = ()) -> str:
    """The three lists, and the arithmetic."""
    moved = account.moved
    left = sum(not line.is_default for line in moved.left)
    lines = [f"carried over: {moved.options - left} of {moved.options} options, {account.percent:.0f}%"]
    lines += [f"  {_named(line)} -> {line.here}" for line in moved.carried]
    lines += ["", f"default here: {len(moved.defaults)} options that the job does not set, with other defaults there"]
    lines += [f"  {_named(line)} -> {line.here}" for line in moved.defaults]
    lines += ["", f"no counterpart: {len(moved.left)}"]
    for line in moved.left:
        todo = f"; {line.todo}" if line.todo and line.todo not in line.here else ""
        unset = " (their default)" if line.is_default else ""
        lines.append(f"  {_named(line)}{unset}: {line.here}{todo}")
    lines += ["", *account.arithmetic, *notes]
    lines += [f"these options cannot run: {text}" for text in account.refusal.splitlines()]
    return "\n".join(_one_line(line) for line in lines)


def _named(line: Line) -> str:
    value = line.value if len(line.value) <= 80 else f"{line.value[:77]}..."
    return f"{line.theirs} {value}".rstrip()


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
