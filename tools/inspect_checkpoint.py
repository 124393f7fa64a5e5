"""Shows the content of a checkpoint, checks it for completeness, and compares it with another.

It needs neither a GPU nor the layout of the run behind the checkpoint.
"""

import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from megapar_models.convert.formats.command import AnyToNative, open_asked
from megapar_models.convert.formats.contents import Contents, ContentsReader
from megapar_models.convert.formats.detect import Format, format_of, is_native
from megapar_models.convert.saved import whole_config
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import Manifest, dtype_name, read_manifest
from megapar.checkpoint.load import Reader, flatten
from megapar.checkpoint.origin import in_words, origin_of
from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json

_WIDTH = 1000  # columns for a reader other than a terminal; the table takes what it needs


@dataclass(frozen=True)
class Options:
    """Show a checkpoint's tensors, step and layout.

    Exit code 0: complete, and equal to --compare if given; 4: incomplete, damaged, or different.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A checkpoint's folder, such as runs/default/checkpoints/step_00000100, or one of another framework."""
    verify: Literal["size", "crc"] = "size"
    """size: manifest, file sizes, and that every tensor is covered once; crc: also every stored byte, and that values
    are finite."""
    compare: Path | None = None
    """Another checkpoint, of any layout and any framework: list what is not bitwise equal."""
    config: str = ""
    """The model of another framework's folder that does not describe it: a TOML file or a config.json."""
    json: Path | None = None
    """Write the report to this file as well."""


def describe(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The report without verification, as JSON types."""
    tensors = {
        name: {"shape": list(entry.shape), "dtype": entry.dtype, "chunks": len(entry.chunks)}
        for name, entry in manifest.tensors.items()
    }
    weights = [entry for name, entry in manifest.tensors.items() if name.startswith("main.")]
    return {
        "path": str(path),
        "step": manifest.step,
        "consumed_samples": manifest.consumed_samples,
        "parameters": sum(math.prod(entry.shape) for entry in weights),
        "files": len(manifest.files),
        "bytes": sum(manifest.files.values()),
        "layout": manifest.layout,
        "model_config": manifest.model_config,
        "trainer": manifest.trainer,
        "data": manifest.data,
        "tensors": tensors,
    }


class Opened(NamedTuple):
    """A checkpoint of megapar or of another framework: `words` say what the latter is."""

    path: Path
    manifest: Manifest
    words: list[str]

    def reader(self, *, judge: bool = True) -> Reader | ContentsReader:
        """What reads its tensors. `judge` is that of `Reader`."""
        if isinstance(self.manifest.source, Contents):
            return ContentsReader(self.manifest.source, self.manifest, judge=judge)
        return Reader(self.path, self.manifest, judge=judge)


def open_any(path: Path, config: str = "") -> Opened:
    """Open a checkpoint. Raises CheckpointError if it is damaged, ConfigError if its model is nowhere described."""
    if is_native(path) or format_of(path) is None:
        return Opened(path, read_manifest(path), [])
    contents = open_asked(AnyToNative(path, path, config=config))
    assert contents.model is not None, contents.title
    return Opened(path, contents.manifest(whole_config(contents.model)), contents.in_words())


def verify_values(opened: Opened, console: Console) -> None:
    """Read every chunk, or tensor of another framework. Raises CheckpointError at the first damaged one."""
    tensors = opened.manifest.tensors
    with opened.reader() as reader:
        for name in track(tensors, "verifying", console=console, transient=True, disable=not console.is_terminal):
            if isinstance(reader, Reader):
                for chunk in tensors[name].chunks:
                    reader.chunk(name, chunk)
            else:
                reader.tensor(name)  # other frameworks keep no checksums


def compare(opened: Opened, other: Opened, console: Console) -> list[str]:
    """A line for each difference in position, model, data and tensors. Layouts and options are not compared.

    Another framework's folder says nothing of the data.
    """
    ours, theirs = opened.manifest, other.manifest
    left = _position(ours)
    right = _position(theirs)
    if ours.source or theirs.source:
        left, right = ({key: value for key, value in each.items() if _is_common(key)} for each in (left, right))
    lines = [
        f"{key}: {left.get(key, 'not stated')} | {right.get(key, 'not stated')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
    names = sorted(ours.tensors.keys() | theirs.tensors.keys())
    # judge=False reads values that are not finite without an error: they are differences to be shown.
    with opened.reader(judge=False) as left_reader, other.reader(judge=False) as right_reader:
        for name in track(names, "comparing", console=console, transient=True, disable=not console.is_terminal):
            line = _tensor_difference(name, (left_reader, opened.path), (right_reader, other.path))
            if line:
                lines.append(f"{name}: {line}")
    return lines


def _position(manifest: Manifest) -> dict[str, Any]:
    """What two checkpoints of the same step of one training have in common besides their tensors."""
    # Of the trainer's entries only plain values: the nested ones are the run's options, and the lineage, which has the
    # random names of the run's starts.
    trainer = {key: value for key, value in manifest.trainer.items() if not isinstance(value, dict | list)}
    sections = ("step", "consumed_samples", "model_config", "data")
    return flatten({section: getattr(manifest, section) for section in sections} | {"trainer": trainer})


def _is_common(key: str) -> bool:
    """Whether folders of all frameworks have an entry of `_position`."""
    return key in ("step", "trainer.updates") or key.startswith("model_config.")


def _tensor_difference(
    name: str, one: tuple[Reader | ContentsReader, Path], other: tuple[Reader | ContentsReader, Path]
) -> str | None:
    """How the tensors of one name differ, in words; None if they are bitwise equal."""
    (left_reader, left_path), (right_reader, right_path) = one, other
    left = left_reader.manifest.tensors.get(name)
    right = right_reader.manifest.tensors.get(name)
    if left is None or right is None:
        return f"only in {left_path if left else right_path}"
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{left.dtype} {list(left.shape)} | {right.dtype} {list(right.shape)}"
    a = left_reader.tensor(name)
    b = right_reader.tensor(name)
    # As bytes: equal NaNs count as equal, and 0.0 and -0.0 as different.
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    changed = int((a != b).sum())
    largest = float((a.double() - b.double()).abs().max())
    return f"{changed:,} of {a.numel():,} elements differ, by at most {largest:.3g}"


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report: a row for each logical tensor. What most tensors have of states is said once, below."""
    by_name: dict[str, list[str]] = {}
    for full in report["tensors"]:
        state, name = full.split(".", 1)
        by_name.setdefault(name, []).append(state)
    counts = Counter(", ".join(states) for states in by_name.values())
    usual = max(counts, key=lambda states: counts[states], default="")
    table = Table("tensor", "shape", "dtype", "chunks", *(["other states"] if len(counts) > 1 else []))
    for column in table.columns:
        column.overflow = "fold"  # an ellipsis would hide what a reader looks for
    for name, states in by_name.items():
        entries = [report["tensors"][f"{state}.{name}"] for state in states]
        shape = " x ".join(map(str, entries[0]["shape"]))
        own = ", ".join(states)
        others = [own if own != usual else ""] if len(counts) > 1 else []
        table.add_row(name, shape, entries[0]["dtype"], str(sum(e["chunks"] for e in entries)), *others)
    # As text, because rich would end the process if the reader is gone, and the exit code would be lost.
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")
    if counts:
        print(f"states of {counts[usual]:,} of {len(by_name):,} tensors: {usual}")
    # An axis of 0 was left to be derived, and a dense model has no ranks of experts.
    layout = ", ".join(f"{key} {value}" for key, value in report["layout"].items() if value)
    print(f"{report['path']}: step {report['step']}, {report['consumed_samples']:,} samples consumed")
    if origin := origin_of(report["trainer"]):
        print(f"the weights began as {in_words(origin)} of Hugging Face")
    print(f"{report['parameters']:,} parameters; {report['bytes']:,} bytes in {report['files']} files")
    for line in report.get("framework", ()):
        print(line)
    print(f"written by {layout or 'an unstated layout'}; verified by {report['verified']}")
    if "compared" in report:
        print(f"compared with {report['compared']}: {len(report['differences'])} differences")
        print("".join(f"  {line}\n" for line in report["differences"]), end="")


def show_stored(options: Options, found: Format) -> int:
    """Print the tensors of another framework's folder by their names there, because no model is known."""
    tensors = found.store(options.path).tensors
    report = {name: {"shape": list(info.shape), "dtype": dtype_name(info.dtype)} for name, info in tensors.items()}
    if options.json:
        write_json(options.json, {"path": str(options.path), "framework": [found.title], "stored": report})
    for name, info in sorted(tensors.items()):
        print(f"{name}  {' x '.join(map(str, info.shape)) or 'a number'}  {dtype_name(info.dtype)}")
    nbytes = sum(info.nbytes for info in tensors.values())
    print(f"{options.path}: {found.title}")
    print(
        f"{len(tensors):,} tensors, {nbytes:,} bytes; --config FILE, a config.json or a TOML file, says of which model"
    )
    return 0


def inspect(options: Options) -> int:
    """Inspect a checkpoint; returns the exit code. Raises CheckpointError if it is incomplete or damaged."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # of 80 columns too few would be left for names that a program looks for
    progress = Console(stderr=True)
    found = None if is_native(options.path) else format_of(options.path)
    if found and not options.config and not found.describes_model(options.path):
        return show_stored(options, found)
    opened = open_any(options.path, options.config)
    report = {**describe(options.path, opened.manifest), "verified": options.verify}
    if opened.words:
        files = [path for path in opened.path.rglob("*") if path.is_file()]
        report |= {"framework": opened.words, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    if options.verify == "crc":
        verify_values(opened, progress)
    if options.compare:
        report["compared"] = str(options.compare)
        report["differences"] = compare(opened, open_any(options.compare, options.config), progress)
    if options.json:
        write_json(options.json, report)
    try:
        show(report, console)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python flushes again at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if report.get("differences"):
        return CheckpointError.exit_code
    return 0


def main() -> int:
    with reported():
        return inspect(tyro.cli(Options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
