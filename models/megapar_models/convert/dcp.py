"""Export to torch.distributed.checkpoint, for users of DTensors with any sharding.

Keys are our logical names, and values are fp32. Load only trusted folders: torch unpickles its `.metadata`.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megapar.checkpoint.format import BUFFER, Manifest, dtype_of, read_manifest
from megapar.checkpoint.load import Reader
from megapar.declare.params import MAIN
from megapar_models.convert.stream import check_finite, new_folder

CONFIG = "model_config.json"
STATES = (MAIN, BUFFER)  # weights, and what else belongs to the model, such as the bias of a router


class _Streaming(DefaultSavePlanner):
    """A save planner: it plans with meta tensors, and reads each tensor only to write it, one at a time.

    `stored` has the name in the native checkpoint of each key.
    """

    def __init__(
        self, source: Path, manifest: Manifest, stored: Mapping[str, str], advance: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.stored = stored
        self.source = source
        self.manifest = manifest
        self.advance = advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        # A Reader for each tensor: when it closes, the pages of its mapped files are released.
        with Reader(self.source, self.manifest) as reader:
            values = reader.tensor(self.stored[index.fqn])
        return self.advance(check_finite(index.fqn, values))


def export(source: Path, target: Path, advance: Callable[[Tensor], Tensor] = lambda values: values) -> list[str]:
    """Write the weights of the native checkpoint `source` and model_config.json to the folder `target`.

    The folder must not exist. It appears complete or not at all. Returns the keys. `advance` is called with each tensor
    before it is written, and returns it.
    Raises CheckpointError if the source is damaged, ConfigError if the target exists, and StorageError if it cannot be
    written.
    """
    manifest = read_manifest(source)
    weights: dict[str, Any] = {}
    stored = {}
    for name, entry in manifest.tensors.items():
        state, _, key = name.partition(".")
        if state in STATES:
            weights[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
            stored[key] = name
    with new_folder(target, sum(tensor.nbytes for tensor in weights.values())) as folder:
        planner = _Streaming(source, manifest, stored, advance)
        # The writer keeps in memory what it wrote until a file is whole. So each tensor gets a file of its own.
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns that one process saves; no_dist asks for it
                save(weights, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's wrapper of the cause is a BaseException, but no Exception
            raise next(cause for cause, _ in error.failures.values()) from None
        (folder / CONFIG).write_text(json.dumps(manifest.model_config, indent=1) + "\n")
    return list(weights)
