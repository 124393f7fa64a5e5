"""Classic checkpoints of Megatron-LM (`--ckpt-format torch`) as contents: weights alone (`convert.megatron`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.checkpoint.format import Sizes
from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN, Box
from megapar_models.convert import megatron
from megapar_models.convert.exported import native_shapes
from megapar_models.convert.formats.contents import Contents, StoredAt
from megapar_models.convert.recipes import recipes
from megapar_models.convert.stream import TensorInfo


@dataclass(frozen=True)
class ClassicStore:
    """All ranks' files as one: tensors have our names, in fp32. A tensor is put together whole when it is read."""

    source: megatron.MegatronCheckpoint
    shapes: Mapping[str, Sizes]

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, torch.float32) for name, shape in self.shapes.items()}

    @property
    def values(self) -> Mapping[str, Any]:
        return self.source.args

    def read(self, name: str, box: Box | None = None) -> Tensor:
        values = self.source.tensor(name)
        return values if box is None else values[box.slices]


def open_classic(folder: Path, vocab_size: int = 0, accepted: Collection[str] = ()) -> Contents:
    """The contents of a folder with mp_rank_*, or of the one above it. Raises CheckpointError as `megatron.read`."""
    source = megatron.read(folder, vocab_size, accepted)
    model: ModelConfig = source.model
    shapes = native_shapes(model)
    source.check(shapes)
    same = recipes(shapes, {name: name for name in shapes})
    title = f"Megatron-LM's classic format, iteration {source.iteration:,}"
    left = ("optimizer and random states of Megatron-LM's classic format",)
    places = {name: StoredAt(name) for name in same}
    return Contents(title, ClassicStore(source, shapes), same, {MAIN: places}, left_out=left, model=model)
