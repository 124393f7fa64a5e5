"""Reads a job of torchtitan: its TOML file, with flags of a command."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from megapar.base.errors import ConfigError
from megapar_tools.migrate import sources
from megapar_tools.migrate.account import Account, Project
from megapar_tools.migrate.carry import Option, move
from megapar_tools.migrate.finish import read_command, with_model
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import plain

TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class TorchtitanJob:
    """Turn a job of torchtitan into a TOML file for --config. Its flags may follow behind --."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """The job's TOML file."""
    model: str = ""
    """A preset such as llama3-8b, or a TOML file with the model; by default the preset of model.flavor."""
    output: Path | None = None
    """The TOML file to write. Without it the TOML goes to standard output, and the lists to standard error."""
    world_size: int = 0
    """Ranks of the job; 0: not known, or those that the launcher behind -- starts."""


def options_of(args: TorchtitanJob, words: list[str]) -> tuple[list[Option], int, list[str]]:
    """The job's options, its number of ranks if it is known, and notes."""
    file, world = args.source, 0
    flags: list[Option] = []
    notes: list[str] = []
    if words:
        launch, world, notes = read_command(None, words, {})
        flags = sources.options_of_words(launch.words, (TORCHTITAN,), launch)
    named = [option for option in flags if plain(option.name) == "job.config_file" and option.words]
    if file is None and named:
        file = Path(named[0].words[0])
    given = sources.options_of_table(sources.read_table(file), TORCHTITAN) if file else []
    given, flags = [renamed(option) for option in given], [renamed(switched(option)) for option in flags]
    overridden = {plain(option.name) for option in flags}
    return [*(option for option in given if plain(option.name) not in overridden), *flags], world, notes


def switched(option: Option) -> Option:
    """--section.no_key as the key that it turns off."""
    section, _, key = option.name.rpartition(".")
    if option.words or not key.startswith("no_"):
        return option
    return Option(option.framework, f"{section}.{key.removeprefix('no_')}", ("false",), option.unresolved)


def renamed(option: Option) -> Option:
    """An option by its later name."""
    return replace(option, name=read_flags("torchtitan")["renamed"].get(option.name, option.name))


def account(project: Project, args: TorchtitanJob, words: list[str]) -> tuple[Account, list[str]]:
    """Carry the job over."""
    options, world, notes = options_of(args, words)
    if not options:
        raise ConfigError("nothing to read: give a TOML file, or flags behind --")
    world = args.world_size or world
    moved = move(options, project.families, world=world)
    with_model(moved, args.model, "model.flavor", "model.name")
    return project.account(moved, world), notes
