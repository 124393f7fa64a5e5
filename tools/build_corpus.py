"""Build a text corpus without a download: each source file of Python's standard library is a document."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from megapar.base.errors import ConfigError, DataError, storing
from megapar.launch.reporting import reported
from megapar.system.atomic_files import replace_file

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Arguments:
    """Write train.jsonl and validation.jsonl; the same Python gives the same files."""

    output: Path
    """Folder of the two files."""
    validation_percent: float = 3.0
    """Share of documents held out, chosen by a hash of their path."""
    max_mb: float = 0.0
    """Stop after about this many megabytes of text; 0 takes all, about 30."""


def documents(root: Path) -> Iterator[tuple[str, str, float]]:
    """Yield (relative path, text, position in [0, 1)) of each distinct UTF-8 source, ordered by a hash of the path.

    The position depends on the path alone. So a document stays in training or in validation, whatever other files are
    there.
    """
    # Packages that somebody installed are left out: every machine with this Python gets the same files.
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path.as_posix() for path in paths if not _SKIPPED_FOLDERS.intersection(path.parts)]
    digests = {path: hashlib.sha256(path.encode()).digest() for path in kept}
    seen: set[bytes] = set()
    for path in track(sorted(kept, key=digests.__getitem__), "reading", console=Console(stderr=True)):
        source = (root / path).read_bytes()
        fingerprint = hashlib.sha256(source).digest()
        if not source.strip() or fingerprint in seen:
            continue
        seen.add(fingerprint)
        try:
            text = source.decode()
        except UnicodeDecodeError:
            continue  # the library's tests hold files that are broken on purpose
        yield path, text, int.from_bytes(digests[path][-8:], "big") / 2**64


def build(args: Arguments) -> dict[str, tuple[int, int]]:
    """Write both files; returns the numbers of (documents, bytes) of each. Raises DataError if one would be empty."""
    if not 0 < args.validation_percent < 100:
        raise ConfigError(f"--validation_percent {args.validation_percent}: give a number between 0 and 100")
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    sizes = {"train": 0, "validation": 0}
    for path, text, position in documents(root):
        if args.max_mb and sum(sizes.values()) >= args.max_mb * 1e6:
            break
        name = "validation" if position * 100 < args.validation_percent else "train"
        parts[name].append(json.dumps({"text": text, "path": path}))
        sizes[name] += len(text.encode())
    for name, lines in parts.items():
        if not lines:
            why = "raise --max_mb" if args.max_mb else "is Python's standard library there as .py files?"
            raise DataError(f"{root}: no sources for {name}.jsonl; {why}")
        write(args.output / f"{name}.jsonl", lines)
    return {name: (len(lines), sizes[name]) for name, lines in parts.items()}


def write(path: Path, lines: list[str]) -> None:
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        for name, (count, num_bytes) in build(args).items():
            print(f"{args.output / name}.jsonl: {count:,} documents, {num_bytes / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
