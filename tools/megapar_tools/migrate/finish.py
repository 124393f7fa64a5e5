"""What the programs tools/from_*.py have in common: their command lines, and what they write."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from megapar.base.errors import ConfigError, storing
from megapar.system.atomic_files import replacing
from megapar_tools.migrate.account import Account, report
from megapar_tools.migrate.carry import BASE, Line, Moved
from megapar_tools.migrate.shell import Launch, launch_of, read_launch
from megapar_tools.migrate.sources import readable, world_of

Read = Callable[[Any, list[str]], tuple[Account, list[str]]]
"""Returns the account of a job and notes, of a program's arguments and the words behind --."""


def behind_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The program's own flags, and the words behind the first --."""
    place = argv.index("--") if "--" in argv else len(argv)
    return _one_var([_ranks_by_one_name(word) for word in argv[:place]]), [*argv[place + 1 :]]


def _ranks_by_one_name(word: str) -> str:
    """--world and --gpus of other programs as --world_size."""
    name, equals, value = word.partition("=")
    return f"--world_size{equals}{value}" if name in ("--world", "--gpus", "--world-size") else word


def _one_var(words: Sequence[str]) -> list[str]:
    """The values of every --var behind one, so that it may be given several times, with a value or more."""
    kept: list[str] = []
    values: list[str] = []
    is_var = False
    for word in words:
        if word == "--var" or word.startswith("--var="):
            values += word.split("=", 1)[1:]
            is_var = True
        elif is_var and "=" in word and not word.startswith("--"):
            values.append(word)
        else:
            kept.append(word)
            is_var = False
    return [*kept, *(["--var", *values] if values else [])]


def run(jobs: Mapping[str, tuple[type[Any], Read]], description: str | None) -> int:
    """Run a program that carries a job over; returns its exit code. Several frameworks are sub-commands."""
    flags, words = behind_dashes(sys.argv[1:])
    if len(jobs) == 1:
        args = tyro.cli(next(iter(jobs.values()))[0], args=flags, description=description, use_underscores=True)
    else:
        named: dict[str, Callable[..., Any]] = {name: job for name, (job, _) in jobs.items()}
        args = tyro.extras.subcommand_cli_from_dict(named, args=flags, description=description, use_underscores=True)
    account = next(read for job, read in jobs.values() if isinstance(args, job))
    return show(*account(args, words), args.output)


def settings(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE by name. Raises ConfigError for another text."""
    wrong = [text for text in texts if not text.partition("=")[0].isidentifier() and not text[:1].isdigit()]
    if wrong or any("=" not in text for text in texts):
        raise ConfigError(f"--var {' '.join(wrong or texts)}: expected NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def read_command(source: Path | None, words: Sequence[str], variables: dict[str, str]) -> tuple[Launch, int, list[str]]:
    """The training command of a launch script, or of `words`; its number of ranks, 0 if unknown; and notes."""
    if source is None and not words:
        raise ConfigError("nothing to read: give a file, or a command behind --")
    if source is not None and words:
        raise ConfigError(f"{source} and a command behind --: give one of them")
    if source is None:
        command = " ".join(map(shlex.quote, words))
        # Flags alone need no program.
        launch = launch_of(command if not words[0].startswith("--") else f"job.py {command}", "the command", variables)
    else:
        launch = read_launch(source, variables)
    shown = " ".join(map(readable, launch.launcher))
    notes = [f"line {launch.line} starts {launch.program.rpartition('/')[2]}"] if source else []
    if shown:
        notes.append(f"the launcher stays as it is: {shown}")
    notes += [readable(note) for note in launch.notes]
    return launch, world_of(launch.launcher), notes


def show(account: Account, notes: Sequence[str], output: Path | None) -> int:
    """Write the TOML and print the account; returns the exit code."""
    text = report(account, notes)
    if output is None:
        print(account.toml, end="")
        print(text, file=sys.stderr)
    else:
        with storing(output), replacing(output) as file:
            file.write(account.toml.encode())
        print(text)
        print(f"wrote {output}; see its memory with: {_dry_run(account, output)}")
    return 0 if account.is_whole else ConfigError.exit_code


def _dry_run(account: Account, output: Path) -> str:
    """The command that plans the job: --parallel.dp stands for the ranks that are not here."""
    parallel = account.config.parallel
    replica = parallel.tp * parallel.cp * parallel.pp
    dp = f" --parallel.dp {account.ranks // replica}" if account.ranks >= replica else ""
    return f"megapar pretrain --config {shlex.quote(str(output))} --dry_run{dp}"


# trl's trainers of preferences, as the names of its scripts call them.
_TRAINERS = frozenset(("dpo", "kto", "orpo", "cpo", "grpo", "rloo", "xpo", "bco", "ppo", "nash"))


def with_objective(moved: Moved, program: str) -> None:
    """Take the objective from the name of a script of trl, such as dpo.py; kto.py and its like have none here."""
    named = _TRAINERS & set(re.split("[^a-z]+", program.lower()))
    if not named:
        return
    if named != {"dpo"}:
        lines = [line for line in moved.carried if "train.objective = " in line.here]
        moved.carried = [line for line in moved.carried if line not in lines]
        for option in ("train.objective", "train.beta"):
            moved.ours.pop(option, None)
            moved.sources.pop(option, None)
        why = f"of trl's {'/'.join(sorted(named)).upper()}, which has no objective here"
        moved.left += [replace(line, here=why) for line in lines]
    elif "train.objective" not in moved.ours and not any(line.theirs.lstrip("-") == "loss_type" for line in moved.left):
        moved.ours["train.objective"], moved.sources["train.objective"] = ("dpo",), program
        here = "train.objective = dpo, written down; the default here is cross_entropy"
        moved.defaults.append(Line(program.rpartition("/")[2], "", here, is_default=True))


def with_model(moved: Moved, model: str, *names: str) -> None:
    """Take the model from `model`, a preset or a TOML file, in place of the options `names`; or say that it lacks."""
    if model:
        path = Path(model)
        moved.ours[BASE] = (str(path.resolve()) if path.is_file() else model,)
        for line in [line for line in moved.left if line.theirs.lstrip("-") in names]:
            moved.left.remove(line)
            moved.carried.append(Line(line.theirs, line.value, f"{BASE} = {model}, by --model"))
    elif BASE not in moved.ours and not any(line.theirs.lstrip("-") in names for line in moved.left):
        todo = "give one with --model: a preset (megapar presets), or a converted model's config.toml"
        moved.left.append(Line("the model", "", "the job's options do not say which", todo, is_default=True))
