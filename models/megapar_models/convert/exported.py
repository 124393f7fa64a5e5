"""What an export of a model to Hugging Face holds, by its options alone: names, shapes, dtypes, and recipes."""

from collections.abc import Mapping

import torch

from megapar.checkpoint.format import Sizes
from megapar.config.model_options import ModelConfig
from megapar_models.convert.config_json import names_of
from megapar_models.convert.recipes import Recipe, recipes, starred
from megapar_models.convert.stream import TensorInfo
from megapar_models.counts import WholeModel


def native_shapes(model: ModelConfig) -> dict[str, Sizes]:
    """The shape of every parameter by its logical name."""
    return {name: piece.shape for name, piece in WholeModel(model).tensors().items()}


def buffer_shapes(model: ModelConfig) -> dict[str, Sizes]:
    """The biases that select experts."""
    return {name: piece.shape for name, piece in WholeModel(model).buffers().items()}


def hf_recipes(model: ModelConfig) -> dict[str, Recipe]:
    """How each tensor of Hugging Face is made of ours, by its name."""
    names = names_of(model)
    shapes = native_shapes(model) | buffer_shapes(model)
    modules = {**names.modules, **names.modules_of(model), "score": "score"}
    found = recipes(shapes, modules, names.layouts, sizes=model, pairs=names.pairs(model))
    for pattern, value in names.constants.items():
        for layer in range(model.num_hidden_layers):
            found[pattern.replace("*", str(layer))] = Recipe((), (), value)
    return found


def in_fp32(wanted: Mapping[str, Recipe], model: ModelConfig) -> set[str]:
    """Theirs that have fp32 in files of any dtype: the biases that select experts, and what the family names."""
    buffers, patterns = buffer_shapes(model), names_of(model).in_fp32

    def kept(name: str) -> bool:
        return name in buffers or starred(name)[0] in patterns

    return {name for name, recipe in wanted.items() if any(kept(part.name) for part in recipe.parts)}


def hf_infos(model: ModelConfig, dtype: torch.dtype) -> dict[str, TensorInfo]:
    """Shape and dtype of each tensor in files of `dtype`."""
    wanted = hf_recipes(model)
    infos = {name: TensorInfo(recipe.shape, dtype) for name, recipe in wanted.items()}
    return infos | {name: TensorInfo(wanted[name].shape, torch.float32) for name in in_fp32(wanted, model)}
