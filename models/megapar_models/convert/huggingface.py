"""Conversion of Hugging Face's weights to native ones and back, by a family's table of names.

One tensor is in memory at a time.
"""

import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import BUFFER, Manifest, Sizes, reading
from megapar.checkpoint.load import Reader
from megapar.config.messages import first_few
from megapar.declare.params import MAIN
from megapar.system.regular_files import read_regular
from megapar_models.convert.quantized import FP8, MXFP4, Form, fp8, fp8_scales_shape, mxfp4
from megapar_models.convert.recipes import Recipe, TensorPlace, starred
from megapar_models.convert.stream import CODES, TensorInfo, check_finite, shards, write_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Stored(NamedTuple):
    """The file of a stored tensor, its name there, its shape and its dtype.

    If the stored tensor holds all experts, this is one matrix of an expert: the rows from `first_row` on of
    tensor[expert]. Otherwise `expert` is None. If it is quantized, `form` is not None: `file` and `key` are of the
    values, `scales` are file and key of the scales, and `info` is of the tensor made of both.
    """

    file: str
    key: str
    info: TensorInfo
    expert: int | None = None
    first_row: int = 0
    form: Form | None = None
    scales: tuple[str, str] = ("", "")


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


def header_of(path: Path) -> dict[str, tuple[str, Sizes]]:
    """safetensors' dtype and the shape of each tensor in a file. No tensor is read. Raises CheckpointError."""
    if _is_pointer(path):
        raise CheckpointError(f"{path}: a pointer of Git LFS, and not the weights: fetch them with git lfs pull")
    infos = {}
    with reading(str(path)), safe_open(path, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            part = opened.get_slice(key)
            infos[key] = (part.get_dtype(), tuple(part.get_shape()))
    return infos


def _is_pointer(path: Path) -> bool:
    """Whether a file has the text that Git LFS leaves in the place of a large file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


_POINTER = b"version https://git-lfs.github.com/spec/"


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
        listed = self._listed()
        absent = set(listed)
        files = sorted(set(listed.values())) if listed else [SINGLE]
        found: dict[str, tuple[str, str, Sizes]] = {}  # by key: file, safetensors' dtype, shape
        for file in files:
            for key, header in self._header(file).items():
                if listed and listed.get(key) != file:
                    raise CheckpointError(f"{folder / file}: holds {key}, which {INDEX} does not place there")
                absent.discard(key)
                if key in found:
                    raise CheckpointError(f"{folder}: holds {key} twice, in {found[key][0]} and in {file}")
                found[key] = (file, *header)
        for key, stored in self._understood(found, canonical).items():
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

    def _listed(self) -> dict[str, str]:
        """The file of each tensor by the index; nothing if there is no index."""
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            listed = dict(json.loads(read_regular(path))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not an index of safetensors files ({error!r})") from None
        for file in listed.values():
            if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
                raise CheckpointError(f"{path}: names {file!r}, a path outside the folder")
        single = self.folder / SINGLE
        if single.exists() and SINGLE not in listed.values():
            raise CheckpointError(
                f"{single}: is there beside {INDEX}, which does not name it: transformers reads {SINGLE} alone; remove "
                "the one that is left over"
            )
        return listed

    def _header(self, file: str) -> dict[str, tuple[str, Sizes]]:
        """Return safetensors' dtype and the shape of each tensor in a file. No tensor is read."""
        path = self.folder / file
        if not path.is_file():
            if file != SINGLE:
                raise CheckpointError(f"{path}: missing, though {INDEX} names it: copy or download this shard again")
            pickled = " (.bin files are pickles, which are never read)" if list(self.folder.glob("*.bin")) else ""
            raise CheckpointError(f"{path}: missing; save the model with safetensors{pickled}")
        return header_of(path)

    def _understood(
        self, found: Mapping[str, tuple[str, str, Sizes]], canonical: Callable[[str], str | None]
    ) -> dict[str, Stored]:
        """The stored tensors by name. A quantized tensor and its scales become one.

        Raises CheckpointError for other dtypes, unless the tensor is no weight.
        """
        dtypes = {code: dtype for dtype, code in CODES.items()}
        understood = self._quantized(found)
        keys = {stored.key for stored in understood.values()} | {stored.scales[1] for stored in understood.values()}
        for key, (file, code, shape) in found.items():
            if key in keys or canonical(key) is None:
                continue
            if code not in dtypes:
                raise CheckpointError(
                    f"{self.folder / file}: {key} is {code}; {', '.join(dtypes)} become fp32 exactly, others not"
                )
            understood[key] = Stored(file, key, TensorInfo(shape, dtypes[code]))
        return understood

    def _quantized(self, found: Mapping[str, tuple[str, str, Sizes]]) -> dict[str, Stored]:
        """The quantized tensors: values of the right dtype, beside scales of theirs.

        They count as bf16, the dtype in which they are computed with. Raises CheckpointError if scales have a shape
        that is not of these values.
        """
        quantized = {}
        for form in (FP8, MXFP4):
            for key, (file, code, shape) in found.items():
                base = key.removesuffix(form.values)
                scales = f"{base}{form.scales}"
                if base == key or scales not in found or (code, found[scales][1]) != form.dtypes:
                    continue
                if form == FP8:
                    name = key
                    whole = shape
                    expected = fp8_scales_shape(shape)
                else:
                    name = base
                    whole = (shape[0], shape[2] * 2 * shape[3], shape[1])
                    expected = shape[:-1]
                if found[scales][2] != expected:
                    raise CheckpointError(
                        f"{self.folder}: {scales} has shape {list(found[scales][2])}, not {list(expected)} as the "
                        f"blocks of {key} {list(shape)}"
                    )
                info = TensorInfo(whole, torch.bfloat16)
                quantized[name] = Stored(file, key, info, form=form, scales=(found[scales][0], scales))
        return quantized

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
                raise CheckpointError(
                    f"{self.folder}: tie_word_embeddings, but {copy} differs from {tied[copy]}: if the file is right, "
                    "set tie_word_embeddings to false in config.json"
                )
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


def hugging_face_tensor(path: Path, manifest: Manifest, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """A recipe's tensor from the native checkpoint `path`. Raises CheckpointError if a chunk is damaged."""
    if recipe.constant is not None:
        return torch.full(recipe.shape, recipe.constant, dtype=dtype)
    out = torch.empty(recipe.shape, dtype=dtype)
    for part in recipe.parts:
        # A Reader for each tensor: when it closes, the pages of its mapped files are released.
        # A bias that selects experts is no parameter.
        state = BUFFER if f"{BUFFER}.{part.name}" in manifest.tensors else MAIN
        with Reader(path, manifest) as reader:
            part.write(reader, out, state)
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
