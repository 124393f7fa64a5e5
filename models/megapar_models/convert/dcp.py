"""Export to torch.distributed.checkpoint, for users of DTensors with any sharding.

Keys are our logical names, and values are fp32. Load only trusted folders: torch unpickles its `.metadata`.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from megapar.checkpoint.format import BUFFER, Manifest, dtype_of, read_manifest
from megapar.checkpoint.load import Reader
from megapar.declare.params import MAIN
from megapar_models.convert.formats.dcp_target import meta, whole, write_dcp

CONFIG = "model_config.json"
STATES = (MAIN, BUFFER)  # weights, and what else belongs to the model, such as the bias of a router


def export(source: Path, target: Path, advance: Callable[[Tensor], Tensor] = lambda values: values) -> list[str]:
    """Write the weights of the native checkpoint `source` and model_config.json to the folder `target`.

    The folder must not exist. It appears complete or not at all. Returns the keys. `advance` is called with each tensor
    before it is written, and returns it.
    Raises CheckpointError if the source is damaged, ConfigError if the target exists, and StorageError if it cannot be
    written.
    """
    manifest = read_manifest(source)
    weights, pieces = {}, {}
    for name, entry in manifest.tensors.items():
        state, _, key = name.partition(".")
        if state in STATES:
            weights[key] = meta(entry.shape, dtype_of(entry.dtype))
            pieces[key] = whole(entry.shape, partial(_read, source, manifest, name))

    def describe(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(manifest.model_config, indent=1) + "\n")

    write_dcp(target, weights, pieces, advance=advance, finish=describe)
    return list(weights)


def _read(source: Path, manifest: Manifest, name: str) -> Tensor:
    # A Reader for each tensor: when it closes, the pages of its mapped files are released.
    with Reader(source, manifest) as reader:
        return reader.tensor(name)
