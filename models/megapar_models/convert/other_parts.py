"""Tensors of other parts than the language model: an import lists them, and an export puts them back (`--like`).

They are those of a tower of images, of its projector, and of layers of multi-token prediction that are not read.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import reading
from megapar.config.messages import counted, first_few
from megapar.config.model_options import ModelConfig
from megapar_models.convert.by_name import HF_CONFIG
from megapar_models.convert.config_json import canonical_name, is_derived, is_multimodal, left_out, names_of, understood
from megapar_models.convert.exported import dtypes_of, hf_copies, projections
from megapar_models.convert.huggingface import HFWeights
from megapar_models.convert.multimodal import PREFIXES
from megapar_models.convert.recipes import Recipe
from megapar_models.convert.safetensors_folder import INDEX, SINGLE, HeaderEntry, read_headers
from megapar_models.convert.stream import CODES, TensorInfo
from megapar_models.convert.typed_fields import read_object
from megapar_models.family import Raw
from megapar_models.registry import find

_DTYPES = {code: dtype for dtype, code in CODES.items()}
Make = Callable[[str], Tensor]


def with_stored_layers(
    folder: Path, raw: Raw, model: ModelConfig, *, mtp: bool = True
) -> tuple[ModelConfig, list[str]]:
    """Return the model with as many layers of multi-token prediction as a folder with this config.json holds.

    Without `mtp` they are left out. Beside it lines for the user, if config.json says another number.
    """
    stated = model.num_nextn_predict_layers
    none = replace(model, num_nextn_predict_layers=0)
    if not mtp or find(model.family).stage.mtp_rule(model) is None:
        return none, []
    prefixes = PREFIXES if is_multimodal(raw) else {}
    stored = {canonical_name(key, names_of(model), (), prefixes) for key in read_headers(folder)[0]}
    held = 0
    while held < max(stated, _MOST_LAYERS):
        try:
            name = projections(replace(model, num_nextn_predict_layers=held + 1))[held]
        except ConfigError:  # files of the family have no further one
            break
        if name not in stored:
            break
        held += 1
    lines = []
    if held < stated and any(name in understood(raw) for name in _STATED):
        text = f"config.json states {counted(stated, 'layer')} of multi-token prediction, and the files hold {held}"
        lines = [f"{text}: the model is read with {held}"]
    return replace(model, num_nextn_predict_layers=held), lines


_MOST_LAYERS = 16
_STATED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def _left_out(raw: Raw, model: ModelConfig) -> tuple[str, ...]:
    """Return `left_out`, without the layers of multi-token prediction if the model has them."""
    ignored = left_out(raw, model.family)
    if not model.num_nextn_predict_layers:
        return ignored
    own = projections(model)
    return tuple(start for start in ignored if not any(name.startswith(start) for name in own))


def open_text(folder: Path, raw: Raw, model: ModelConfig, wanted: Mapping[str, Recipe]) -> HFWeights:
    """Return the weights of the language model in a folder with this config.json.

    Raises CheckpointError if the tensors are not those of `wanted`, or if copies differ.
    """
    names, ignored = names_of(model), _left_out(raw, model)
    prefixes = PREFIXES if is_multimodal(raw) else {}
    found = HFWeights(folder, lambda name: canonical_name(name, names, ignored, prefixes), names.stacked)
    found.check(wanted, hf_copies(model))
    return found


def others_in(folder: Path, raw: Raw, model: ModelConfig) -> dict[str, HeaderEntry]:
    """Return what the headers of a folder's files say of the tensors that an import leaves out."""
    ignored = _left_out(raw, model)
    found = read_headers(folder)[0] if ignored else {}
    return {key: entry for key, entry in found.items() if key.startswith(ignored) and not is_derived(key)}


def listed(folder: Path, raw: Raw, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each beginning of names with tensors that an import leaves out: how many, and their bytes."""
    others = others_in(folder, raw, model)
    for start in _left_out(raw, model):
        own = [entry for key, entry in others.items() if key.startswith(start)]
        if own:
            yield f"left out: {len(own)} tensors {start}*, {sum(map(_bytes_of, own)):,} bytes"


def _bytes_of(entry: HeaderEntry) -> int:
    _, code, shape = entry
    bits = re.match(r"[A-Z]+(\d+)", code)  # such as F32, BF16 and F8_E4M3; BOOL has a byte
    return math.prod(shape) * (int(bits[1]) if bits else 8) // 8


@dataclass(frozen=True)
class SourceOfParts:
    """A folder of Hugging Face with a language model, under its names there, and with other parts."""

    folder: Path
    raw: Raw
    text: HFWeights
    others: Mapping[str, HeaderEntry]
    found_fp32: Collection[str]
    """The second result of `dtypes_of`."""

    def plan(self, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return all tensors of the folder: those of the text with the dtypes of `infos`, the others as they are."""
        plan = {key: TensorInfo(shape, _DTYPES[code]) for key, (_, code, shape) in self.others.items()}
        for name, info in infos.items():
            stored = self.text.tensors[name]
            plan[stored.key] = info if stored.expert is None else TensorInfo(self._stack(stored.key), info.dtype)
        return plan

    def _parts(self, key: str) -> list[str]:
        """Return our names for what is in a tensor of the folder."""
        return [name for name, stored in self.text.tensors.items() if stored.key == key]

    def _stack(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor of all experts."""
        parts = [self.text.tensors[name] for name in self._parts(key)]
        rows = max(part.first_row + part.info.shape[0] for part in parts)
        return (1 + max(part.expert or 0 for part in parts), rows, parts[0].info.shape[1])

    def tensor(self, key: str, make: Make) -> Tensor:
        """Return a tensor of `plan`. `make` returns one of the text by our name of it."""
        if key in self.others:
            path = self.folder / self.others[key][0]
            with reading(f"{path}: {key}"), safe_open(path, "pt") as opened:
                found: Tensor = opened.get_tensor(key)
            return found
        parts = self._parts(key)
        if self.text.tensors[parts[0]].expert is None:
            return make(parts[0])
        stack: Tensor | None = None
        for name in parts:
            part, rows = self.text.tensors[name], make(name)
            if stack is None:
                stack = torch.empty(self._stack(key), dtype=rows.dtype)
            stack[part.expert, part.first_row : part.first_row + len(rows)] = rows
        assert stack is not None
        return stack


def source_of_parts(like: str | Path | None, model: ModelConfig, wanted: Mapping[str, Recipe]) -> SourceOfParts | None:
    """Return the folder `like`, if it has weights of more than the language model. None: it has not.

    Raises CheckpointError if its language model has tensors other than `wanted`, and ConfigError for tensors of a
    dtype that is not written.
    """
    if like is None or not any((Path(like) / name).is_file() for name in (SINGLE, INDEX)):
        return None
    folder, raw = Path(like), read_object(Path(like) / HF_CONFIG)
    others = others_in(folder, raw, model)
    if not others:
        return None
    text = open_text(folder, raw, model, wanted)
    wrong = [key for key, (_, code, _) in others.items() if code not in _DTYPES]
    wrong += [stored.key for stored in text.tensors.values() if stored.form is not None]
    if wrong:
        text_of = f"{first_few(sorted(wrong))}: of these dtypes {', '.join(_DTYPES)} are put back"
        raise ConfigError(f"--like {folder}: {text_of}; name the folder that is not quantized")
    return SourceOfParts(folder, raw, text, others, dtypes_of(text, wanted, model)[1])
