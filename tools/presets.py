"""Lists what --config knows by name, published models and configurations of runs, or prints one of these files."""

import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import tyro
from megapar_models.registry import named_configs, presets

from megapar.base.errors import ConfigError
from megapar.launch.reporting import reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"


@dataclass
class Arguments:
    """List the names that --config and the key `base` of a TOML file take, or print the file behind one."""

    name: tyro.conf.Positional[str] = ""
    """The name of a file to print, as a start for a file of your own; without it all are listed."""


def first_sentence(text: str) -> str:
    """The first sentence of the comment at the head of a TOML file."""
    lines = re.match(r"(?:#.*\n)*", text)
    assert lines
    comment = " ".join(line.removeprefix("#").strip() for line in lines[0].splitlines())
    return re.split(r"(?<=\.) ", comment)[0].removesuffix(".")


def listed_models() -> list[str]:
    """A line for each model: name, family, number of parameters, and the rest of its file's first sentence."""
    rows = []
    for name, path in presets().items():
        text = path.read_text()
        # A preset begins with "# TITLE: N parameters, MORE (SOURCE)." A test counts the parameters.
        found = re.fullmatch(r"(.+): ([\d,]+) parameters(.*)", first_sentence(text))
        assert found, f"{path} does not begin with its number of parameters"
        title, parameters, more = found.groups()
        rows.append((name, tomllib.loads(text)["model"]["family"], parameters, title + more))
    name_width = max(len(name) for name, *_ in rows)
    family_width = max(len(family) for _, family, *_ in rows)
    count_width = max(len(parameters) for *_, parameters, _ in rows)
    return [
        f"  {name:{name_width}}  {family:{family_width}}  {parameters:>{count_width}}  {title}"
        for name, family, parameters, title in rows
    ]


def listed_runs() -> list[str]:
    """A line for each configuration of a whole run: name, and the first sentence of its file."""
    runs = {name: path for name, path in named_configs(CONFIGS).items() if path.parent == CONFIGS}
    width = max(map(len, runs))
    return [f"  {name:{width}}  {first_sentence(path.read_text())}" for name, path in runs.items()]


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        files = named_configs(CONFIGS)
        if args.name in files:
            print(files[args.name].read_text(), end="")
        elif args.name:
            near = get_close_matches(args.name, files)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(files)}"
            raise ConfigError(f"{args.name}: no such preset; {hint}")
        else:
            print("models, without data and training: name, family, parameters", *listed_models(), sep="\n")
            print("\nwhole runs, most of which expect data in data/:", *listed_runs(), sep="\n")


if __name__ == "__main__":
    main()
