"""The safetensors files of a Hugging Face folder: their index, their headers, and the tensors stored in them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import Sizes, reading
from megapar.system.regular_files import read_regular
from megapar_models.convert.quantized import FP8, MXFP4, Form, fp8_scales_shape
from megapar_models.convert.recipes import starred
from megapar_models.convert.stream import CODES, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HeaderEntry = tuple[str, str, Sizes]
"""What a header says of a tensor: its file, safetensors' dtype, its shape."""


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
    """Return the matrices in a stored tensor, by name: the tensor itself, or the matrices of all experts of a layer.

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
    """Return safetensors' dtype and the shape of each tensor in a file. No tensor is read. Raises CheckpointError."""
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


def read_headers(folder: Path) -> tuple[dict[str, HeaderEntry], set[str]]:
    """Return what the headers of a folder's files say of each tensor, and the tensors of the index in no file.

    No tensor is read. Raises CheckpointError if files are missing, are not safetensors, do not hold what the index
    says, or hold a tensor under two names.
    """
    listed = listed_files(folder)
    absent = set(listed)
    files = sorted(set(listed.values())) if listed else [SINGLE]
    found: dict[str, HeaderEntry] = {}
    for file in files:
        for key, header in _header(folder, file).items():
            if listed and listed.get(key) != file:
                raise CheckpointError(f"{folder / file}: holds {key}, which {INDEX} does not place there")
            absent.discard(key)
            if key in found:
                raise CheckpointError(f"{folder}: holds {key} twice, in {found[key][0]} and in {file}")
            found[key] = (file, *header)
    return found, absent


def listed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; nothing if there is no index. Raises CheckpointError."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        listed = dict(json.loads(read_regular(path))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of safetensors files ({error!r})") from None
    for file in listed.values():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path}: names {file!r}, a path outside the folder")
    single = folder / SINGLE
    if single.exists() and SINGLE not in listed.values():
        raise CheckpointError(
            f"{single}: is there beside {INDEX}, which does not name it: transformers reads {SINGLE} alone; remove "
            "the one that is left over"
        )
    return listed


def _header(folder: Path, file: str) -> dict[str, tuple[str, Sizes]]:
    """Return safetensors' dtype and the shape of each tensor in a file. No tensor is read."""
    path = folder / file
    if not path.is_file():
        if file != SINGLE:
            raise CheckpointError(f"{path}: missing, though {INDEX} names it: copy or download this shard again")
        pickled = " (.bin files are pickles, which are never read)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{path}: missing; save the model with safetensors{pickled}")
    return header_of(path)


def find_stored_tensors(
    folder: Path, found: Mapping[str, HeaderEntry], canonical: Callable[[str], str | None]
) -> dict[str, Stored]:
    """Return the stored tensors by key, from `read_headers`. A quantized tensor and its scales become one.

    Raises CheckpointError for other dtypes, unless the tensor is no weight.
    """
    dtypes = {code: dtype for dtype, code in CODES.items()}
    understood = _quantized(folder, found)
    keys = {stored.key for stored in understood.values()} | {stored.scales[1] for stored in understood.values()}
    for key, (file, code, shape) in found.items():
        if key in keys or canonical(key) is None:
            continue
        if code not in dtypes:
            raise CheckpointError(
                f"{folder / file}: {key} is {code}; {', '.join(dtypes)} become fp32 exactly, others not"
            )
        understood[key] = Stored(file, key, TensorInfo(shape, dtypes[code]))
    return understood


def _quantized(folder: Path, found: Mapping[str, HeaderEntry]) -> dict[str, Stored]:
    """Return the quantized tensors: values of the right dtype, beside scales of theirs.

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
                    f"{folder}: {scales} has shape {list(found[scales][2])}, not {list(expected)} as the "
                    f"blocks of {key} {list(shape)}"
                )
            info = TensorInfo(whole, torch.bfloat16)
            quantized[name] = Stored(file, key, info, form=form, scales=(found[scales][0], scales))
    return quantized
