"""Prints a script to complete the commands, flags and choices of `megapar` in bash or zsh.

It takes some seconds, because it asks every command for its flags. So write it to a file, and again after an update:

  bash   megapar completion bash > ~/.local/share/bash-completion/completions/megapar
  zsh    megapar completion zsh > ~/.megapar.zsh; and in ~/.zshrc: source ~/.megapar.zsh
"""

import ast
import importlib
import re
import shlex
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import tyro
from megapar_models.registry import FAMILIES, named_configs

from megapar.__main__ import COMMANDS, module_of
from megapar.base.errors import MegaparError
from megapar.config.files import ASKS_FOR_COMPLETION
from megapar.launch.reporting import reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"
# zsh runs bash's functions for completion after this.
FOR_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
# The words of a line are those after `megapar`. Where no word fits, `-o default` completes names of files.
SCRIPT = """\
_megapar() {{
    local command=${{COMP_WORDS[1]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if [ "$COMP_CWORD" = 1 ]; then
        words={commands}
    else
        case "$command" in
{flags}
        esac
        case "$command $previous" in
{values}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _megapar megapar
"""


@dataclass
class Arguments:
    """Print a script that completes the command line of megapar."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """The shell that will read the script."""


def specification(command: str, *flags: str) -> dict[str, Any]:
    """What tyro knows of a command's flags: "options", each with "flags" and maybe "choices", and "subcommands".

    `flags` are given before. Raises MegaparError if tyro writes them in a form unknown here.
    """
    program = importlib.import_module(module_of(command, "megapar"))
    script = StringIO()
    arguments = sys.argv
    sys.argv = [command, *flags, ASKS_FOR_COMPLETION, "bash", "-"]
    try:
        with redirect_stdout(script), suppress(SystemExit):
            program.main()
    finally:
        sys.argv = arguments
    found = re.search(r"^COMPLETION_SPEC = (\{.*\})$", script.getvalue(), re.MULTILINE)
    if not found:
        raise MegaparError(f"megapar {command}: tyro {tyro.__version__} writes completion in an unknown form")
    specification: dict[str, Any] = ast.literal_eval(found[1])
    return specification


def case(pattern: str, words: list[str]) -> str:
    return f"            {shlex.quote(pattern)}) words={shlex.quote(' '.join(words))} ;;"


def bash_script() -> str:
    """The script for bash: for each command its flags, and for each flag with choices these."""
    names = list(named_configs(CONFIGS))
    flags = []
    values = [case("presets presets", names), case("pretrain --config", names)]
    for command in COMMANDS:
        found = specification(command)
        if command == "pretrain":
            for family in FAMILIES:
                found["options"] += specification(command, "--model.family", family)["options"]
        subcommands = found["subcommands"]
        options = [*found["options"], *(option for part in subcommands.values() for option in part["options"])]
        words = {flag: None for option in options for flag in option["flags"] if flag.startswith("--")}
        flags.append(case(command, [*subcommands, *words]))
        for option in options:
            if option.get("choices"):
                values += [case(f"{command} {flag}", option["choices"]) for flag in option["flags"]]
    commands = shlex.quote(" ".join(COMMANDS))
    return SCRIPT.format(commands=commands, flags="\n".join(flags), values="\n".join(values))


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        script = bash_script()
        print(FOR_ZSH + script if args.shell == "zsh" else script, end="")


if __name__ == "__main__":
    main()
