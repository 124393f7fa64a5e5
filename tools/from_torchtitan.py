"""Turns the options of a job of torchtitan into a configuration of megapar, and says what became of each.

    python tools/from_torchtitan.py llama3_8b.toml --world_size 64 --output job.toml
    python tools/from_torchtitan.py llama3_8b.toml --world_size 64 -- --training.steps 5000

Flags behind -- win over the file, as they do in torchtitan. Three lists say what was carried over, which defaults
differ here, and what has no counterpart. The exit code is 0 if everything was carried over, and 2 otherwise.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from megapar_models.registry import FOR_OPTIONS, presets, validate

from megapar.base.errors import ConfigError
from megapar.launch.reporting import open_streams, reported
from megapar.migrate import sources
from megapar.migrate.account import Account, account_of
from megapar.migrate.carry import Option, move
from megapar.migrate.finish import behind_dashes, read_command, show, with_model
from megapar.migrate.flag_files import read_flags
from megapar.migrate.job import plain

TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class Arguments:
    """Turn a job of torchtitan into a TOML file for --config. Its flags may follow behind --."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """The job's TOML file."""
    model: str = ""
    """A preset such as llama3-8b, or a TOML file with the model; by default the preset of model.flavor."""
    output: Path | None = None
    """The TOML file to write. Without it the TOML goes to standard output, and the lists to standard error."""
    world_size: int = 0
    """Ranks of the job; 0: not known, or those that the launcher behind -- starts."""


def options_of(args: Arguments, words: list[str]) -> tuple[list[Option], int, list[str]]:
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


def account(args: Arguments, words: list[str]) -> tuple[Account, list[str]]:
    """Carry the job over."""
    options, world, notes = options_of(args, words)
    if not options:
        raise ConfigError("nothing to read: give a TOML file, or flags behind --")
    world = args.world_size or world
    moved = move(options, FOR_OPTIONS, world=world)
    with_model(moved, args.model, "model.flavor", "model.name")
    return account_of(moved, FOR_OPTIONS, presets(), validate, world), notes


def main() -> int:
    open_streams()
    with reported():
        flags, words = behind_dashes(sys.argv[1:])
        args = tyro.cli(Arguments, args=flags, description=__doc__, use_underscores=True)
        return show(*account(args, words), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
