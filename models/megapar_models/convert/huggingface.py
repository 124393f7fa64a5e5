"""Hugging Face's weights to native ones and back, by a family's table of names. One tensor is in memory at a time."""

import json
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapar.checkpoint.format import MAIN, Manifest, Sizes
from megapar.checkpoint.load import Reader
from megapar.errors import CheckpointError
from megapar.messages import first_few
from megapar_models.convert.stream import CODES, TensorInfo, check_finite, shards, write_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Recipe(NamedTuple):
    """A Hugging Face tensor: native tensors stacked along their first dimension, then `transposed` or not (GPT-2's
    Conv1D keeps [in, out])."""

    parts: tuple[tuple[str, Sizes], ...]
    transposed: bool

    @property
    def shape(self) -> Sizes:
        first = self.parts[0][1]
        stacked = (sum(shape[0] for _, shape in self.parts), *first[1:])
        return stacked[::-1] if self.transposed else stacked


def recipes(
    shapes: Mapping[str, Sizes], modules: Mapping[str, str], transposed: Container[str] = ()
) -> dict[str, Recipe]:
    """How each Hugging Face tensor is made of native ones.

    `shapes` are the model's logical tensors in order. `modules` names for each of their modules, `*` standing for the
    layer's number, the Hugging Face module; several may have the same, which holds them stacked. Weights of modules in
    `transposed` are.
    """
    made: dict[str, Recipe] = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        number = re.search(r"\d+|$", module)[0]  # type: ignore[index]
        theirs = modules[re.sub(r"\d+", "*", module, count=1)]
        turned = theirs in transposed and len(shape) == 2
        target = f"{theirs}.{kind}".replace("*", number)
        made[target] = Recipe((*made[target].parts, (name, shape)) if target in made else ((name, shape),), turned)
    return made


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: str
    key: str
    info: TensorInfo


class Weights:
    """The safetensors files of a Hugging Face folder; tensors are mapped from them when asked for.

    `canonical` gives each stored name the one that the recipes use, or None if it is no weight. Raises CheckpointError
    if files are missing, foreign, or not what the index says.
    """

    def __init__(self, folder: Path, canonical: Callable[[str], str | None] = str):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        listed = self._listed()
        absent = set(listed)
        for file in sorted(set(listed.values())) if listed else [SINGLE]:
            for key, info in self._header(file).items():
                if listed and listed.get(key) != file:
                    raise CheckpointError(f"{folder / file}: holds {key}, which {INDEX} does not place there")
                absent.discard(key)
                name = canonical(key)
                if name is not None:
                    self.tensors[name] = Stored(file, key, info)
        if absent:
            raise CheckpointError(f"{folder / INDEX}: names tensors that no file holds: {first_few(sorted(absent))}")

    def _listed(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            listed = dict(json.loads(path.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not an index of safetensors files ({error!r})") from None
        for file in listed.values():
            if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
                raise CheckpointError(f"{path}: names {file!r}, a path outside the folder")
        return listed

    def _header(self, file: str) -> dict[str, TensorInfo]:
        path = self.folder / file
        dtypes = {code: dtype for dtype, code in CODES.items()}
        if not path.is_file():
            if file != SINGLE:
                raise CheckpointError(f"{path}: missing, though {INDEX} names it: copy or download this shard again")
            pickled = " (.bin files are pickles, which are never read)" if list(self.folder.glob("*.bin")) else ""
            raise CheckpointError(f"{path}: missing; save the model with safetensors{pickled}")
        found = {}
        try:
            with safe_open(path, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(key)
                    if part.get_dtype() not in dtypes:
                        raise CheckpointError(
                            f"{path}: {key} is {part.get_dtype()}; {', '.join(dtypes)} become fp32 exactly, others not"
                        )
                    found[key] = TensorInfo(tuple(part.get_shape()), dtypes[part.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all tensors, or fp32, which holds any of several."""
        found = {stored.info.dtype for stored in self.tensors.values()}
        return found.pop() if len(found) == 1 else torch.float32

    def read(self, name: str) -> Tensor:
        """A mapped tensor: its pages are in memory as long as it is."""
        stored = self.tensors[name]
        with safe_open(self.folder / stored.file, "pt") as opened:
            return opened.get_tensor(stored.key)

    def check(self, wanted: Mapping[str, Recipe], tied: Mapping[str, str]) -> None:
        """Raises CheckpointError unless the tensors are those of the recipes, with their shapes. A name in `tied` may
        be stored besides, if it equals the tensor that it is tied to."""
        for copy in tied.keys() & self.tensors.keys() - wanted.keys():
            if tied[copy] in self.tensors and not torch.equal(
                check_finite(copy, self.read(copy)),  # NaN would differ from itself
                check_finite(tied[copy], self.read(tied[copy])),
            ):
                raise CheckpointError(f"{self.folder}: tie_word_embeddings, but {copy} differs from {tied[copy]}")
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


class Place(NamedTuple):
    """Where a native tensor lies in a Hugging Face one: rows from `first` on, of its transpose if `transposed`."""

    source: str
    first: int
    shape: Sizes
    transposed: bool


def places(wanted: Mapping[str, Recipe]) -> dict[str, Place]:
    """The recipes the other way round, by native name."""
    found = {}
    for source, recipe in wanted.items():
        first = 0
        for name, shape in recipe.parts:
            found[name] = Place(source, first, shape, recipe.transposed)
            first += shape[0]
    return found


def native_tensor(weights: Weights, place: Place) -> Tensor:
    """A logical tensor, fp32 and contiguous."""
    stored = weights.read(place.source)
    rows = (stored.t() if place.transposed else stored)[place.first : place.first + place.shape[0]]
    return torch.empty(place.shape, dtype=torch.float32).copy_(rows)


def hugging_face_tensor(path: Path, manifest: Manifest, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """A recipe's tensor out of the native checkpoint `path`. Raises CheckpointError if a chunk is damaged."""
    out = torch.empty(recipe.shape, dtype=dtype)
    rows = out.t() if recipe.transposed else out
    first = 0
    for name, shape in recipe.parts:
        with Reader(path, manifest) as reader:  # one for each tensor, so that its pages are let go
            reader.fill(f"{MAIN}.{name}", (0,) * len(shape), rows[first : first + shape[0]])
        first += shape[0]
    return out


def write_model(
    folder: Path, infos: Mapping[str, TensorInfo], make: Callable[[str], Tensor], *, shard_bytes: int
) -> None:
    """model.safetensors, or shards of it with their index, into `folder`; tensors by name, as safetensors sorts."""
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
