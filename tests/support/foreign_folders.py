"""Folders of other frameworks in memory, and native checkpoints with random moments to be written as such."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.formats.contents import OPTIMIZERS
from megapar_models.convert.stream import TensorInfo, write_checkpoint
from megapar_models.registry import weight_options
from torch import Tensor

from megapar.checkpoint.format import BUFFER, TRAINING_STATE, Manifest, TensorEntry, read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.options import Config, flatten
from megapar.declare.params import MAIN, Box


@dataclass
class MemoryStore:
    """The folder of a framework in memory."""

    folder: Path
    held: dict[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self.held[name] if box is None else self.held[name][box.slices]


def store_of(tensors: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> MemoryStore:
    """A folder in memory: tensors of these values, or zeros of these shapes."""
    held = {name: each if isinstance(each, Tensor) else torch.zeros(each) for name, each in tensors.items()}
    return MemoryStore(Path("folder"), held, values or {})


def random_native(config: Config, folder: Path, matrices: str = "adamw") -> Path:
    """A native checkpoint of 4 steps with random weights and moments. `matrices` of layers may be those of muon."""
    generator = torch.Generator().manual_seed(5)
    shapes = native_shapes(config.model)
    kept = {f"{MAIN}.{name}": shape for name, shape in shapes.items()}
    kept |= {f"{BUFFER}.{name}": shape for name, shape in buffer_shapes(config.model).items()}
    used = set()
    for name, shape in shapes.items():
        by_muon = matrices == "muon" and name.startswith("layers.") and len(shape) == 2
        for state in ("momentum",) if by_muon else ("exp_avg", "exp_avg_sq"):
            kept[f"{state}.{name}"] = shape
            used.add(state)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in kept.items()}
    tensors = {name: values.abs() if name.startswith("exp_avg_sq.") else values for name, values in tensors.items()}
    entries = {name: TensorEntry(shape, "float32", ()) for name, shape in kept.items()}
    trainer = {"updates": 4, "loss_scale": None, "config": flatten(config)}
    states = {state: declared for state, declared in OPTIMIZERS.items() if state in used}
    manifest = Manifest(4, 16, {}, weight_options(config), trainer, {}, {}, entries, states)
    path = folder / "native"
    path.mkdir()
    write_checkpoint(path, manifest, tensors.__getitem__)
    return path


def require_equal(path: Path, other: Path, *, rtol: float = 0.0) -> None:
    """Two native checkpoints have the same tensors, and the same counts of steps. Counts of experts begin at 0."""
    manifest, found = read_manifest(path), read_manifest(other)
    assert (found.step, found.trainer["updates"]) == (manifest.step, manifest.trainer["updates"])
    begun = {name for name in found.tensors if name.startswith(f"{TRAINING_STATE}.")} - manifest.tensors.keys()
    assert found.tensors.keys() - begun == manifest.tensors.keys()
    assert found.states == manifest.states
    with Reader(path, manifest) as reader, Reader(other, found) as of_other:
        for name in manifest.tensors:
            torch.testing.assert_close(of_other.tensor(name), reader.tensor(name), rtol=rtol, atol=0)
        assert not any(of_other.tensor(name).any() for name in begun)
