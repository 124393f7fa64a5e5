"""Conversion of Hugging Face's weights to native ones and back, by a family's table of names.

One tensor is in memory at a time.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import BUFFER, Manifest, reading
from megapar.checkpoint.load import Reader
from megapar.config.messages import first_few
from megapar.declare.params import MAIN
from megapar_models.convert.quantized import FP8, fp8, mxfp4
from megapar_models.convert.recipes import Recipe, TensorPlace
from megapar_models.convert.safetensors_folder import (
    INDEX,
    SINGLE,
    Stored,
    find_stored_tensors,
    read_headers,
    unstacked,
)
from megapar_models.convert.stream import TensorInfo, check_finite, shards, write_file


class HFWeights:
    """The safetensors files of a Hugging Face folder. A tensor is mapped from its file when it is asked for.

    `canonical` returns the recipes' name for a stored name, or None if the tensor is no weight. `stacked` names tensors
    of all experts: each counts as one tensor for each matrix of an expert (`unstacked`).
    Raises CheckpointError if files are missing, are not safetensors, do not hold what the index says, or hold a tensor
    under two names.
    """

    def __init__(
        self,
        folder: Path,
        canonical: Callable[[str], str | None] = str,
        stacked: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        found, absent = read_headers(folder)
        for key, stored in find_stored_tensors(folder, found, canonical).items():
            name = canonical(key)
            if name is not None:
                self._add(unstacked(name, stored, stacked))
        if absent:
            raise CheckpointError(f"{folder / INDEX}: names tensors that no file holds: {first_few(sorted(absent))}")

    def _add(self, matrices: Mapping[str, Stored]) -> None:
        for name, stored in matrices.items():
            if name in self.tensors:
                both = f"as {self.tensors[name].key} and as {stored.key}"
                raise CheckpointError(f"{self.folder}: holds {name} twice, {both}")
            self.tensors[name] = stored

    def dtype(self, beside: Container[str] = ()) -> torch.dtype:
        """The common dtype of all tensors but those in `beside`.

        If they differ, fp32: it holds the values of each dtype we read.
        """
        dtypes = {stored.info.dtype for name, stored in self.tensors.items() if name not in beside}
        if len(dtypes) == 1:
            return dtypes.pop()
        return torch.float32

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A mapped tensor, or tensor[expert]. Its pages may be released when the tensor is. Quantized ones are fp32."""
        stored = self.tensors[name]
        whole = self._mapped(stored.file, stored.key)
        if stored.form is not None:
            scales = self._mapped(*stored.scales)
            if stored.form == FP8:
                return fp8(whole, scales)
            if expert is None:
                return torch.stack([mxfp4(*pair) for pair in zip(whole, scales, strict=True)])
            return mxfp4(whole[expert], scales[expert])
        if expert is not None:
            return whole[expert]
        if stored.expert is None:
            return whole
        # A view: the pages of the other experts are not read.
        return whole[stored.expert, stored.first_row : stored.first_row + stored.info.shape[0]]

    def _mapped(self, file: str, key: str) -> Tensor:
        with reading(f"{self.folder / file}: {key}"), safe_open(self.folder / file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor

    def check(self, wanted: Mapping[str, Recipe], tied: Mapping[str, str]) -> None:
        """Raise CheckpointError unless the tensors are those of the recipes and have their shapes.

        A name in `tied` may also be stored, if its tensor equals the one it is tied to. It is then dropped.
        """
        for copy in tied.keys() & self.tensors.keys() - wanted.keys():
            if tied[copy] in self.tensors and not torch.equal(
                check_finite(copy, self.read(copy)),  # NaN would differ from itself
                check_finite(tied[copy], self.read(tied[copy])),
            ):
                why = (
                    "tie_word_embeddings, but",
                    "if the file is right, set tie_word_embeddings to false in config.json",
                )
                if ".layers." in copy:  # of multi-token prediction
                    remedy = "leave them out with --no-mtp (convert) or --model.num_nextn_predict_layers 0"
                    why = "layers share embedding and head, but", remedy
                raise CheckpointError(f"{self.folder}: {why[0]} {copy} differs from {tied[copy]}: {why[1]}")
            del self.tensors[copy]
        missing = wanted.keys() - self.tensors.keys()
        unexpected = self.tensors.keys() - wanted.keys()
        problems = []
        if missing:
            problems.append(f"missing {first_few(sorted(missing))}")
        if unexpected:
            problems.append(f"unexpected {first_few(sorted(unexpected))}")
        shaped = [
            f"{name} has shape {list(self.tensors[name].info.shape)}, not {list(recipe.shape)}"
            for name, recipe in wanted.items()
            if name not in missing and self.tensors[name].info.shape != recipe.shape
        ]
        if shaped:
            problems.append(first_few(shaped))
        if problems:
            raise CheckpointError(f"{self.folder}: tensors are not those of its config.json: {'; '.join(problems)}")
        for name, recipe in wanted.items():
            if recipe.constant is not None:
                self._check_constant(name, recipe.constant)

    def _check_constant(self, name: str, value: float) -> None:
        """Raise CheckpointError if the stored number is not the constant, rounded to its dtype."""
        stored = self.read(name)
        if not torch.equal(stored, torch.full_like(stored, value)):
            raise CheckpointError(f"{self.folder}: {name} is {stored.item()}; models here compute with {value}")


def native_tensor(weights: HFWeights, sources: Sequence[TensorPlace]) -> Tensor:
    """The logical tensor at `sources`, fp32 and contiguous."""
    parts = [place.part.read(weights.read(place.source, place.part.expert)) for place in sources]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def their_tensor(
    path: Path, manifest: Manifest, recipe: Recipe, dtype: torch.dtype = torch.float32, state: str = MAIN
) -> Tensor:
    """A recipe's tensor, of the weights or of a state of an optimizer, from the native checkpoint `path`.

    Raises CheckpointError if a chunk is damaged.
    """
    if recipe.constant is not None:
        return torch.full(recipe.shape, recipe.constant, dtype=dtype)
    out = torch.empty(recipe.shape, dtype=dtype)
    for part in recipe.parts:
        # A Reader for each tensor: when it closes, the pages of its mapped files are released.
        # A bias that selects experts is no parameter.
        kept = BUFFER if state == MAIN and f"{BUFFER}.{part.name}" in manifest.tensors else state
        with Reader(path, manifest) as reader:
            part.write(reader, out, kept)
    return out


def write_model(
    folder: Path, infos: Mapping[str, TensorInfo], make: Callable[[str], Tensor], *, shard_bytes: int
) -> None:
    """Write model.safetensors, or its shards and their index, to `folder`. `make` returns the tensor of a name.

    Tensors are sorted by name, as safetensors sorts them.
    """
    files = shards(dict(sorted(infos.items())), shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / file, shard, make)
        index |= dict.fromkeys(shard, file)
    if len(files) > 1:
        total = sum(info.nbytes for info in infos.values())
        document: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n")
