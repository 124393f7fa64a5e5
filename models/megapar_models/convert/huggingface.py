"""Conversion of Hugging Face's weights to native ones and back, by a family's table of names.

One tensor is in memory at a time.
"""

import json
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapar.checkpoint.format import Manifest, Sizes
from megapar.checkpoint.load import Reader
from megapar.config.messages import first_few
from megapar.errors import CheckpointError
from megapar.params import MAIN
from megapar.system.regular_files import read_regular
from megapar_models.convert.stream import CODES, TensorInfo, check_finite, shards, write_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Recipe(NamedTuple):
    """How to make a Hugging Face tensor: native tensors are stacked along their first dimension.

    With `transposed`, the result is then transposed: GPT-2's Conv1D stores [in, out].
    """

    parts: tuple[tuple[str, Sizes], ...]
    transposed: bool

    @property
    def shape(self) -> Sizes:
        """The shape of the Hugging Face tensor."""
        first = self.parts[0][1]
        stacked = (sum(shape[0] for _, shape in self.parts), *first[1:])
        if self.transposed:
            return stacked[::-1]
        return stacked


def recipes(
    shapes: Mapping[str, Sizes], modules: Mapping[str, str], transposed: Container[str] = ()
) -> dict[str, Recipe]:
    """The recipe of each Hugging Face tensor by its name.

    `shapes` are the shapes of the model's logical tensors, in order. `modules` maps each of our modules to the Hugging
    Face module, with `*` for the numbers of layer and expert. Several of our modules may have the same one: it then
    holds them stacked. 2-D weights of the Hugging Face modules in `transposed` are transposed.
    """
    made: dict[str, Recipe] = {}
    for name, shape in shapes.items():
        module, _, weight_or_bias = name.rpartition(".")
        pattern, numbers = starred(module)
        theirs = modules[pattern]
        is_transposed = theirs in transposed and len(shape) == 2  # a bias has nothing to transpose
        target = f"{_numbered(theirs, numbers)}.{weight_or_bias}"
        parts = made[target].parts if target in made else ()
        made[target] = Recipe((*parts, (name, shape)), is_transposed)
    return made


def starred(name: str) -> tuple[str, list[str]]:
    """Put * in the place of each numeric component of a dotted name. Returns the name and the numbers, in order."""
    components = name.split(".")
    numbers = [component for component in components if component.isdecimal()]
    return ".".join("*" if component.isdecimal() else component for component in components), numbers


def _numbered(pattern: str, numbers: Iterable[str]) -> str:
    """Put the numbers in the place of the stars: the inverse of `starred`."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


class Stored(NamedTuple):
    """The file of a stored tensor, its name there, its shape and its dtype.

    If the stored tensor holds all experts, this is one matrix of an expert: the rows from `first_row` on of
    tensor[expert]. Otherwise `expert` is None.
    """

    file: str
    key: str
    info: TensorInfo
    expert: int | None = None
    first_row: int = 0


def unstacked(name: str, stored: Stored, stacked: Mapping[str, Sequence[str]]) -> dict[str, Stored]:
    """The matrices in a stored tensor, by name: the tensor itself, or the matrices of all experts of a layer.

    `stacked` is `megapar_models.family.HuggingFace.stacked`. A tensor without the shape of stacked experts is returned
    as it is, and so reported as unexpected.
    """
    pattern, _ = starred(name)
    modules = stacked.get(pattern, ())
    shape = stored.info.shape
    if not modules or len(shape) != 3 or shape[1] % len(modules):
        return {name: stored}
    experts, rows, columns = shape
    info = TensorInfo((rows // len(modules), columns), stored.info.dtype)
    folder = name.rpartition(".")[0]
    matrices = {}
    for expert in range(experts):
        for number, module in enumerate(modules):
            first_row = number * info.shape[0]
            matrices[f"{folder}.{expert}.{module}.weight"] = Stored(stored.file, stored.key, info, expert, first_row)
    return matrices


class Weights:
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
        listed = self._listed()
        absent = set(listed)
        files = sorted(set(listed.values())) if listed else [SINGLE]
        for file in files:
            for key, info in self._header(file).items():
                if listed and listed.get(key) != file:
                    raise CheckpointError(f"{folder / file}: holds {key}, which {INDEX} does not place there")
                absent.discard(key)
                name = canonical(key)
                if name is not None:
                    self._add(unstacked(name, Stored(file, key, info), stacked))
        if absent:
            raise CheckpointError(f"{folder / INDEX}: names tensors that no file holds: {first_few(sorted(absent))}")

    def _add(self, matrices: Mapping[str, Stored]) -> None:
        for name, stored in matrices.items():
            if name in self.tensors:
                both = f"as {self.tensors[name].key} and as {stored.key}"
                raise CheckpointError(f"{self.folder}: holds {name} twice, {both}")
            self.tensors[name] = stored

    def _listed(self) -> dict[str, str]:
        """The file of each tensor by the index; nothing if there is no index."""
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            listed = dict(json.loads(read_regular(path))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not an index of safetensors files ({error!r})") from None
        for file in listed.values():
            if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
                raise CheckpointError(f"{path}: names {file!r}, a path outside the folder")
        return listed

    def _header(self, file: str) -> dict[str, TensorInfo]:
        """Return shape and dtype of each tensor in a file. No tensor is read."""
        path = self.folder / file
        dtypes = {code: dtype for dtype, code in CODES.items()}
        if not path.is_file():
            if file != SINGLE:
                raise CheckpointError(f"{path}: missing, though {INDEX} names it: copy or download this shard again")
            pickled = " (.bin files are pickles, which are never read)" if list(self.folder.glob("*.bin")) else ""
            raise CheckpointError(f"{path}: missing; save the model with safetensors{pickled}")
        infos = {}
        try:
            with safe_open(path, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(key)
                    if part.get_dtype() not in dtypes:
                        raise CheckpointError(
                            f"{path}: {key} is {part.get_dtype()}; {', '.join(dtypes)} become fp32 exactly, others not"
                        )
                    infos[key] = TensorInfo(tuple(part.get_shape()), dtypes[part.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
        return infos

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype of all tensors. If they differ, fp32: it holds the values of each dtype we read."""
        dtypes = {stored.info.dtype for stored in self.tensors.values()}
        if len(dtypes) == 1:
            return dtypes.pop()
        return torch.float32

    def read(self, name: str) -> Tensor:
        """A mapped tensor. Its pages may be released when the tensor is."""
        stored = self.tensors[name]
        with safe_open(self.folder / stored.file, "pt") as opened:
            whole: Tensor = opened.get_tensor(stored.key)
        if stored.expert is None:
            return whole
        # A view: the pages of the other experts are not read.
        return whole[stored.expert, stored.first_row : stored.first_row + stored.info.shape[0]]

    def check(self, wanted: Mapping[str, Recipe], tied: Mapping[str, str]) -> None:
        """Raise CheckpointError unless the tensors are those of the recipes and have their shapes.

        A name in `tied` may also be stored, if its tensor equals the one it is tied to. It is then dropped.
        """
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
    """The place of a native tensor in a Hugging Face tensor: the rows from `first` on.

    With `transposed`, they are rows of the Hugging Face tensor's transpose.
    """

    source: str
    first: int
    shape: Sizes
    transposed: bool


def places(wanted: Mapping[str, Recipe]) -> dict[str, Place]:
    """The place of each native tensor by its name: the inverse of the recipes."""
    by_name = {}
    for source, recipe in wanted.items():
        first = 0
        for name, shape in recipe.parts:
            by_name[name] = Place(source, first, shape, recipe.transposed)
            first += shape[0]
    return by_name


def native_tensor(weights: Weights, source: Place) -> Tensor:
    """The logical tensor at `source`, fp32 and contiguous."""
    stored = weights.read(source.source)
    if source.transposed:
        stored = stored.t()
    rows = stored[source.first : source.first + source.shape[0]]
    return torch.empty(source.shape, dtype=torch.float32).copy_(rows)


def hugging_face_tensor(path: Path, manifest: Manifest, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """A recipe's tensor from the native checkpoint `path`. Raises CheckpointError if a chunk is damaged."""
    out = torch.empty(recipe.shape, dtype=dtype)
    rows = out.t() if recipe.transposed else out
    first = 0
    for name, shape in recipe.parts:
        # A Reader for each tensor: when it closes, the pages of its mapped files are released.
        with Reader(path, manifest) as reader:
            reader.fill(f"{MAIN}.{name}", (0,) * len(shape), rows[first : first + shape[0]])
        first += shape[0]
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
