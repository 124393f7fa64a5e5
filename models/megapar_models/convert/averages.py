"""Checkpoints of the average of weights (optimizer.ema)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import BUFFER, read_manifest
from megapar.checkpoint.load import Reader, has_average
from megapar.checkpoint.origin import origin_of
from megapar.declare.params import AVERAGE, MAIN
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.progress import progress
from megapar_models.convert.saved import saved_config, text_record
from megapar_models.convert.stream import SHARD_BYTES, TensorInfo, new_folder, write_weights


@dataclass(frozen=True)
class AverageOfWeights:
    """Make a checkpoint of the average of weights in another one (optimizer.ema), for all that reads weights.

    Weights that the run did not train have no average; they are those of SRC.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint of a run with optimizer.ema, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


def average_of_weights(options: AverageOfWeights) -> None:
    """Make the checkpoint. Raises CheckpointError if SRC has no average, holds adapters alone, or is damaged."""
    manifest = read_manifest(options.src)
    if not has_average(manifest):
        raise CheckpointError(f"{options.src}: has no average of weights; train with optimizer.ema, such as 0.999")
    if manifest.base:
        text = "has the average of adapters, without the weights of their base; merge takes the trained adapters"
        raise CheckpointError(f"{options.src}: {text}")
    config = saved_config(manifest, options.family)
    buffers = buffer_shapes(config.model)
    shapes = native_shapes(config.model) | buffers
    needed = sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())
    with new_folder(options.dst, needed) as folder, progress(len(shapes)) as advance:

        def make(name: str) -> Tensor:
            states = (BUFFER,) if name in buffers else (AVERAGE, MAIN)
            stored = next(f"{state}.{name}" for state in states if f"{state}.{name}" in manifest.tensors)
            # A Reader for each tensor: when it closes, the pages of its mapped files are released.
            with Reader(options.src, manifest) as reader:
                return advance(reader.tensor(stored))

        texts = text_record(options.src)
        kept: dict[str, Any] = {"texts": texts, "origin": origin_of(manifest.trainer)}
        write_weights(folder, config, shapes, make, shard_bytes=options.shard_bytes, buffers=buffers, **kept)
    print(f"{options.dst}: the average of weights at step {manifest.step} of {options.src}")
