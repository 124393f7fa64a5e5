"""What a checkpoint's manifest costs with many ranks: seconds and memory of those who write it, verify it and use it.

The manifest is that of a model of 70 billion parameters, cut as tensor, pipeline and ZeRO ranks would cut it; the files
in it exist in their sizes, but empty. Each measurement is a process of its own.

- publish: rank 0 puts the parts of all ranks together, checks them and writes the manifest.
- verify: rank 0 reads it at a resume, and looks at every file and chunk.
- use: another rank reads what it needs, here the tensors of one pipeline stage in all their chunks.
- retain: rank 0 looks whether an old checkpoint is complete, before it removes a still older one.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megapar_models.counts import WholeModel
from megapar_models.registry import validate

from benchmarks.counting import cost, memory
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, table
from megapar.checkpoint.format import Chunk, Manifest, boxes, folder_name, is_complete, read_manifest
from megapar.checkpoint.save import publish
from megapar.config.options import Config, ModelConfig
from megapar.train.provenance import provenance

MODEL = ModelConfig(
    hidden_size=8192,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=28672,
    vocab_size=32000,
)
STATE = ("main", "exp_avg", "exp_avg_sq")  # what AdamW keeps
TP = 8
PP = 8
FACTS: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}
Parts = list[dict[str, Any] | None]


@dataclass(frozen=True)
class Options:
    """Measure manifests on this machine."""

    ranks: tuple[int, ...] = (64, 1024, 4096)
    """Numbers of ranks, each a multiple of 64: 8 tensor-parallel ranks times 8 pipeline stages."""
    layers: int = MODEL.num_hidden_layers
    """Layers of the model: fewer for a quick look."""
    json: Path | None = None
    """Write all numbers to this file."""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The model's logical tensors by name, in order."""
    config = validate(Config(model=replace(MODEL, num_hidden_layers=layers)), 1)
    return {name: piece.shape for name, piece in WholeModel(config.model).tensors().items()}


def parts_of(tensors: dict[str, tuple[int, ...]], ranks: int) -> Parts:
    """What each rank would report as written: rows of a tensor over tensor-parallel ranks, each piece over replicas."""
    dp = ranks // (TP * PP)
    written: list[dict[str, Any]] = [defaultdict(dict) for _ in range(ranks)]
    sizes = [0] * ranks
    for number, (name, shape) in enumerate(tensors.items()):
        stage = number * PP // len(tensors)
        tp = TP if len(shape) > 1 else 1
        rows = shape[0] // tp
        for i in range(tp):
            numel = rows * math.prod(shape[1:])
            for replica in range(dp):
                rank = i + TP * (replica + dp * stage)
                cut = replica * numel // dp, (replica + 1) * numel // dp
                for box in boxes((rows, *shape[1:]), *cut):
                    offset = (box.offset[0] + i * rows, *box.offset[1:])
                    for state in STATE:
                        entry = written[rank].setdefault(
                            f"{state}.{name}", {"shape": shape, "dtype": "float32", "chunks": []}
                        )
                        key = f"{state}.{name}#{len(entry['chunks'])}"
                        entry["chunks"].append(Chunk(f"rank_{rank:05d}.safetensors", key, offset, box.size, 2**31 + 7))
                        sizes[rank] += 4 * math.prod(box.size)
    parts: Parts = []
    for rank, entries in enumerate(written):
        file = f"rank_{rank:05d}.safetensors"
        parts.append({"file": file, "bytes": sizes[rank], "tensors": entries, "states": {}} if entries else None)
    return parts


def counted(action: Callable[[], object], target: torch.device) -> dict[str, float]:
    """CPU seconds of `action`, and its peak of bytes."""
    costs = []
    taken = memory(lambda: costs.append(cost(action)[0]), target).taken
    return {"seconds": costs[0].cpu, "bytes": taken}


def apart(action: Callable[[], object]) -> dict[str, float]:
    """The same in a process of its own."""
    found: dict[str, float] = run_ranks(1, "cpu", partial(counted, action))[0]
    return found


def use(folder: Path, outline: dict[str, Any], names: list[str]) -> int:
    """Parse the tensors `names` like a rank with the outline from rank 0; how many chunks they have."""
    manifest = Manifest.from_outline(folder, outline)
    return sum(len(manifest.tensors[name].chunks) for name in names)


def measure(ranks: int, layers: int, root: Path) -> dict[str, Any]:
    """All measurements for one number of ranks."""
    tensors = shapes(layers)
    parts = parts_of(tensors, ranks)
    temporary = root / ".tmp-manifest"
    temporary.mkdir()
    for part in parts:
        if part:
            with open(temporary / part["file"], "wb") as file:
                file.truncate(part["bytes"])
    folder = root / folder_name(ranks)
    found = {"publish": apart(lambda: publish(temporary, root, {**FACTS, "step": ranks}, parts))}
    found["verify"] = apart(lambda: read_manifest(folder).files)
    outline = read_manifest(folder).outline()
    assert outline is not None, "the manifest can be read in parts"
    names = [f"{state}.{name}" for name in list(tensors)[: len(tensors) // PP] for state in STATE]
    found["use"] = apart(partial(use, folder, outline, names))
    found["retain"] = apart(lambda: is_complete(folder))
    return {"ranks": ranks, "manifest_bytes": (folder / "manifest.json").stat().st_size, **found}


def cells(row: dict[str, Any], who: str) -> tuple[str, ...]:
    """A row of the table."""
    size = f"{row['manifest_bytes'] / 1e6:.1f} MB"
    return f"{row['ranks']:,}", size, who, f"{row[who]['seconds']:.2f}", f"{row[who]['bytes'] / 1e6:,.0f} MB"


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file."""
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(ranks, options.layers, Path(name)))
    lines = (cells(row, who) for row in rows for who in ("publish", "verify", "use", "retain"))
    shown = table(lines, ("ranks", "manifest", "who"), ("CPU seconds", "peak memory"), sections=1)
    Report(options, provenance(torch.device("cpu"))).finish({"rows": rows}, shown)
