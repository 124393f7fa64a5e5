"""Makes conversations out of the docstrings of Python's library: what a function does, and its first sentence.

It writes OUTPUT/train.jsonl and OUTPUT/validation.jsonl, always the same ones for one version of Python.
"""

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import tyro

from megapar.launch.reporting import reported
from megapar.system.atomic_files import replace_file

# Modules whose import shows, changes or asks for something.
_NOT_IMPORTED = {"antigravity", "idlelib", "this", "turtle", "turtledemo", "tkinter", "__phello__"}


@dataclass
class Arguments:
    """Make conversations out of the docstrings of Python's library."""

    output: Path
    """Folder of the two files."""
    held_out: int = 8
    """Every so many-th conversation is for validation."""


def conversations() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield a conversation for each public function or class of the library with a sentence about it."""
    seen: set[str] = set()
    for name in sorted(set(sys.stdlib_module_names) - _NOT_IMPORTED):
        module = _imported(name)
        for attribute, thing in sorted(vars(module).items()) if module else ():
            is_own = getattr(thing, "__module__", None) == name
            if attribute.startswith("_") or not is_own or not (inspect.isroutine(thing) or inspect.isclass(thing)):
                continue
            answer = _sentence(inspect.getdoc(thing) or "")
            if answer and answer not in seen:
                seen.add(answer)
                question = f"What is {name}.{attribute}?"
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _imported(name: str) -> ModuleType | None:
    if name.startswith("_"):
        return None
    try:
        return importlib.import_module(name)
    except ImportError:  # of another system
        return None


def _sentence(text: str) -> str:
    """The first sentence of a docstring. "" if it is none, or too long for a small model."""
    first = " ".join(text.split("\n\n")[0].split())
    found = re.match(r"[A-Z][^()<>]{15,140}?\.(?=\s|$)", first)
    return found[0] if found else ""


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        parts: dict[str, list[str]] = {"train": [], "validation": []}
        for talk in conversations():
            line = json.dumps(talk)
            # By content, so that another version of Python keeps most of its parts.
            number = int(hashlib.sha256(line.encode()).hexdigest(), 16)
            parts["validation" if number % args.held_out == 0 else "train"].append(line)
        args.output.mkdir(parents=True, exist_ok=True)
        for name, lines in parts.items():
            replace_file(args.output / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())
        counts = ", ".join(f"{len(lines):,} for {name}" for name, lines in parts.items())
        print(f"{args.output}: conversations out of docstrings of Python {sys.version.split()[0]}: {counts}")


if __name__ == "__main__":
    main()
