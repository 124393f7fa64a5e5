"""Reads a job of Hugging Face's Trainer or DeepSpeed: a command, a launch script, arguments, or a ds_config."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from megapar.base.errors import ConfigError
from megapar_tools.migrate import sources
from megapar_tools.migrate.account import Account, Project
from megapar_tools.migrate.carry import Option, move
from megapar_tools.migrate.finish import read_command, settings, with_model, with_objective
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import plain
from megapar_tools.migrate.shell import Launch

DEEPSPEED, HUGGING_FACE = "DeepSpeed", "Hugging Face"
OF_DS_CONFIG = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


@dataclass(frozen=True)
class DeepSpeedJob:
    """Turn a job of Hugging Face's Trainer or DeepSpeed into a TOML file. A command may follow behind --."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A launch script; .json or .yaml with TrainingArguments by name; or a ds_config."""
    ds_config: Path | None = None
    """The ds_config; by default the file of --deepspeed, from here or from the folder of the source."""
    model: str = ""
    """A preset such as llama3-8b, a model at Hugging Face (ORG/MODEL[@REVISION]), or config.toml in a folder that
    megapar convert hf-to-native wrote."""
    output: Path | None = None
    """The TOML file to write. Without it the TOML goes to standard output, and the lists to standard error."""
    world_size: int = 0
    """Ranks of the job; 0: those that its launcher starts."""
    samples: int = 0
    """Samples of the training set, from which steps follow where the job counts epochs."""
    var: tuple[str, ...] = field(default=())
    """NAME=VALUE of variables that the script does not set; 1=VALUE is its first argument."""


@dataclass(frozen=True)
class Read:
    """What a source holds: options of Hugging Face's arguments, a ds_config, ranks if known, notes, and the launch."""

    given: list[Option]
    table: dict[str, Any]
    world: int = 0
    notes: tuple[str, ...] = ()
    launch: Launch | None = None


def arguments_of(args: DeepSpeedJob, words: list[str]) -> Read:
    """Read the source, or the command behind --."""
    source = args.source
    if source is None or source.suffix not in (".json", ".yaml", ".yml", ".conf"):
        launch, world, notes = read_command(source, words, settings(args.var))
        given = sources.options_of_words(launch.words, (HUGGING_FACE, DEEPSPEED), launch)
        return Read(given, {}, world, tuple(notes), launch)
    table = sources.read_table(source)
    if any(key in table for key in OF_DS_CONFIG):
        return Read([], table)
    inner = table.pop("deepspeed", None)
    given = [Option(HUGGING_FACE, name, sources.words_of(value)) for name, value in sources.set_in(table).items()]
    if isinstance(inner, str):
        given.append(Option(HUGGING_FACE, "deepspeed", (inner,)))
    return Read(given, inner if isinstance(inner, dict) else {})


def as_the_trainer_calls_them(given: list[Option]) -> tuple[list[Option], bool]:
    """The options by names of the table, and whether they are those of a Trainer, whose defaults then hold."""
    known = read_flags("hugging_face")
    names = {plain(option.name) for option in given}
    is_axolotl = bool(names & {"base_model", "num_epochs", "sequence_len"})
    renamed = known["axolotl" if is_axolotl else "own_loops"]
    # A name that the Trainer has too stays what it is, such as --batch_size beside per_device_train_batch_size.
    every = {**renamed, **known["of_any_program"]}
    other = {name: theirs for name, theirs in every.items() if name in names and theirs not in names}
    has_trainer = bool(names & known["rows"]["training_arguments"].keys())
    has_trainer = has_trainer and (is_axolotl or not other.keys() & renamed.keys())
    return [
        replace(option, name=other[plain(option.name)], spelled=option.name) if plain(option.name) in other else option
        for option in given
    ], has_trainer or is_axolotl


def ds_config_of(args: DeepSpeedJob, read: Read) -> tuple[dict[str, Any], str]:
    """Return the table of the ds_config, if the job names one, and its name: a file, or what the script writes."""
    if args.ds_config is not None:
        return sources.read_table(args.ds_config), str(args.ds_config)
    options = [option for option in read.given if option.name in ("deepspeed", "deepspeed_config") and option.words]
    for name in [option.words[0] for option in options]:
        text = sources.document_of(read.launch, name) if read.launch else None
        if text is not None:
            return sources.read_table(Path(name), text), f"{name}, which the script writes"
        for folder in (Path(), *([args.source.parent] if args.source else [])):
            if (folder / name).is_file():
                return sources.read_table(folder / name), str(folder / name)
        raise ConfigError(f"--deepspeed {name}: no such file; name it with --ds_config")
    return {}, ""


def account(project: Project, args: DeepSpeedJob, words: list[str]) -> tuple[Account, list[str]]:
    """Carry the job over."""
    read = arguments_of(args, words)
    table, notes = read.table, [*read.notes]
    config, file = ds_config_of(args, read)
    if file:
        table, notes = config, [*notes, f"ds_config: {file}"]
    given, has_trainer = as_the_trainer_calls_them(read.given)
    options = [*sources.options_of_table(table, DEEPSPEED, read.launch), *given]
    if not options:
        raise ConfigError(f"{args.source or 'the command'}: has no options")
    world = args.world_size or read.world
    moved = move(
        options,
        project.families,
        world=world,
        samples=args.samples,
        # The Trainer hands its own values to DeepSpeed. A loop of somebody's own has defaults that nobody knows.
        without_defaults=((DEEPSPEED,) if given else ()) + (() if has_trainer else (HUGGING_FACE,)),
        dashes=lambda framework: "--" if framework == HUGGING_FACE else "",
    )
    with_objective(moved, read.launch.program if read.launch else "")
    with_model(moved, args.model, "model_name_or_path", "model_name", "base_model")
    return project.account(moved, world), notes
