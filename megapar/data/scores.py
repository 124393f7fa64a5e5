"""Log-probabilities of the tokens of a pair by some model: a column beside the pair, as fp32, little endian.

The file OUTPUT has a number for each token of the pair, in its order: the log-probability of the token in nats, given
those before it in its document. That of a document's first token is 0. OUTPUT.json says which pair and which model they
are of. A column is whole if it has its description.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megapar.base.errors import DataError, reason_of
from megapar.data.file_array import DataFile, FileArray
from megapar.data.indexed import IndexedDataset
from megapar.system.atomic_files import replacing, write_json
from megapar.system.regular_files import read_regular

DTYPE = np.dtype("<f4")


def references_path(prefix: str | Path) -> Path:
    """The column beside a pair of preferences with the log-probabilities by the reference model."""
    return Path(f"{prefix}.reference")


def _description(output: Path) -> Path:
    return Path(f"{output}.json")


@contextmanager
def writing_scores(output: Path, dataset: IndexedDataset, model: Mapping[str, Any]) -> Iterator[BinaryIO]:
    """A file for the column of `dataset`. It gets its name and its description if the block ends without an error.

    `model` describes the model.
    """
    _description(output).unlink(missing_ok=True)  # first: a kill in between must not leave it beside another column
    with replacing(output) as file:
        yield file
    hashes = {Path(path).suffix: value for path, value in dataset.fingerprints().items()}
    write_json(_description(output), {"tokens": len(dataset.tokens), "data": hashes, "model": model})


def read_scores(path: Path, dataset: IndexedDataset) -> FileArray:
    """The column `path` of `dataset`, [tokens], read when it is used.

    Raises DataError if it is missing, or of another pair.
    """
    remedy = f"write it with megapar score CHECKPOINT --input {dataset.bin_path.with_suffix('')} --output {path}"
    try:
        stated = json.loads(read_regular(_description(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: no column of log-probabilities ({reason_of(error)}); {remedy}") from error
    hashes = {Path(name).suffix: value for name, value in dataset.fingerprints().items()}
    file = DataFile(path)
    is_of_pair = isinstance(stated, dict) and stated.get("data") == hashes
    if not is_of_pair or file.size != len(dataset.tokens) * DTYPE.itemsize:
        raise DataError(f"{path}: of other tokens than {dataset.bin_path}; {remedy}")
    return FileArray(file, DTYPE)
