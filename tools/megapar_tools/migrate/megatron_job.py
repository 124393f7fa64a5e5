"""Reads a job of Megatron-LM or GPT-NeoX: a command, a launch script, saved arguments, or a recipe."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from megapar.base.errors import ConfigError
from megapar_tools.migrate import neox, sources
from megapar_tools.migrate.account import Account, Project
from megapar_tools.migrate.carry import Option, move
from megapar_tools.migrate.finish import read_command, settings
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.shell import launch_of
from megapar_tools.migrate.sources import words_of

MEGATRON = "Megatron-LM"
LoadSaved = Callable[[Path], dict[str, Any]]
"""Returns the arguments in a checkpoint, or in the folder of one."""


@dataclass(frozen=True)
class MegatronJob:
    """Turn a job of Megatron-LM into a TOML file for --config. A command may follow behind --."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A launch script; .json or .yaml with arguments by name; or a checkpoint's folder or model_optim_rng.pt."""
    output: Path | None = None
    """The TOML file to write. Without it the TOML goes to standard output, and the lists to standard error."""
    world_size: int = 0
    """Ranks of the job; 0: those that its launcher starts."""
    var: tuple[str, ...] = field(default=())
    """NAME=VALUE of variables that the script does not set; 1=VALUE is its first argument."""


def options_of(args: MegatronJob, words: list[str], load_saved: LoadSaved) -> tuple[list[Option], int, list[str]]:
    """The job's options, its number of ranks if it is known, and notes."""
    source = args.source
    if source is not None and (source.is_dir() or source.suffix == ".pt"):
        return saved_options(load_saved(source))
    if source is not None and source.suffix in (".json", ".yaml", ".yml"):
        table = sources.read_table(source)
        recipe = table.get("MODEL_ARGS")
        if isinstance(recipe, dict):
            return recipe_options(recipe, settings(args.var))
        return saved_options(table)
    launch, world, notes = read_command(source, words, settings(args.var))
    return sources.options_of_words(launch.words, (MEGATRON,), launch), world, notes


def recipe_options(recipe: dict[str, object], variables: dict[str, str]) -> tuple[list[Option], int, list[str]]:
    """Return the options of a recipe of Megatron-LM's own tests: flags as keys, with variables of the shell."""
    words = [word for name, value in recipe.items() for word in (name, *(() if value is True else words_of(value)))]
    quoted = (re.sub(r'(["\\`])', r"\\\1", word) for word in words)
    launch = launch_of("job.py " + " ".join(f'"{word}"' for word in quoted), "MODEL_ARGS", variables)
    cut = [piece for word in launch.words for piece in word.split()]
    return sources.options_of_words(cut, (MEGATRON,), launch), 0, ["its MODEL_ARGS are read"]


def saved_options(saved: dict[str, object]) -> tuple[list[Option], int, list[str]]:
    """Options of saved arguments."""
    saved = saved.get("args", saved) if isinstance(saved.get("args"), dict) else saved  # type: ignore[assignment]
    world = saved.get("world_size")
    known = read_flags("megatron")
    saved = {known["saved_names"].get(name, name): value for name, value in saved.items()}
    found, unset = sources.options_of_saved(saved, MEGATRON, known["saved_opposites"])
    return found, world if isinstance(world, int) else 0, [f"{unset} saved arguments are unset, off or nobody's choice"]


def of_neox(project: Project, table: dict[str, object], world: int) -> Account:
    """Carry a job of GPT-NeoX over."""
    moved = move(neox.options_of(table, world), project.families, world=world, without_defaults=(neox.DEEPSPEED,))
    neox.settle_neox(moved, table)
    return project.account(moved, world)


def account(project: Project, load_saved: LoadSaved, args: MegatronJob, words: list[str]) -> tuple[Account, list[str]]:
    """Carry the job over."""
    if args.source is not None and args.source.suffix in (".yml", ".yaml"):
        table = sources.read_table(args.source)
        if neox.is_neox(table):
            return of_neox(project, table, args.world_size), ["its keys are GPT-NeoX's"]
    options, world, notes = options_of(args, words, load_saved)
    if not options:
        raise ConfigError(f"{args.source or 'the command'}: has no flags")
    world = args.world_size or world
    moved = move(options, project.families, world=world, dashes=lambda framework: "--")
    return project.account(moved, world), notes
