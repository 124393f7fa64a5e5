"""Folders of Hugging Face as contents: config.json and safetensors, weights alone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN, Box
from megapar_models.convert.by_name import HF_CONFIG
from megapar_models.convert.config_json import from_hugging_face
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.formats.contents import Contents, StoredAt
from megapar_models.convert.huggingface import HFWeights
from megapar_models.convert.other_parts import listed, open_text, with_stored_layers
from megapar_models.convert.stream import TensorInfo
from megapar_models.convert.typed_fields import read_object


@dataclass(frozen=True)
class HuggingFaceStore:
    """The safetensors of a folder. Quantized tensors are made bf16 of when they are read, whole."""

    weights: HFWeights

    @property
    def folder(self) -> Path:
        return self.weights.folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self.weights.tensors.items()}

    @property
    def values(self) -> Mapping[str, Any]:
        return {}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        values = self.weights.read(name)
        return values if box is None else values[box.slices]


def open_hugging_face(folder: Path, model: ModelConfig | None = None, accepted: Collection[str] = ()) -> Contents:
    """The contents of a folder with config.json, which states the model.

    `model` is asked for its family alone, and whether it predicts several tokens ahead. If not, a folder's layers of
    multi-token prediction are left out.

    Raises ConfigError for an unsupported config.json, and CheckpointError if the tensors are not its model's.
    """
    raw = read_object(folder / HF_CONFIG)
    stated = from_hugging_face(raw, model.family if model else "", tuple(accepted))
    stated, lines = with_stored_layers(folder, raw, stated, mtp=model is None or model.num_nextn_predict_layers > 0)
    wanted = hf_recipes(stated)
    weights = open_text(folder, raw, stated, wanted)
    places = {name: StoredAt(name) for name, recipe in wanted.items() if recipe.parts}
    recipes = {name: recipe for name, recipe in wanted.items() if recipe.parts}
    title = f"Hugging Face's {raw['model_type']}"
    left = (*lines, *listed(folder, raw, stated))
    return Contents(title, HuggingFaceStore(weights), recipes, {MAIN: places}, left_out=left, model=stated)
