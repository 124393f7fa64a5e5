"""What an export of a model to Hugging Face holds, by its options alone: names, shapes, dtypes, and recipes."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import MANIFEST, Sizes, read_manifest
from megapar.config.model_options import ModelConfig
from megapar_models.convert.config_json import names_of
from megapar_models.convert.huggingface import HFWeights
from megapar_models.convert.recipes import Recipe, recipes, starred, their_name
from megapar_models.convert.stream import FOUND_FP32, TensorInfo
from megapar_models.convert.typed_fields import NAMES
from megapar_models.counts import WholeModel


def native_shapes(model: ModelConfig) -> dict[str, Sizes]:
    """The shape of every parameter by its logical name."""
    return {name: piece.shape for name, piece in WholeModel(model).tensors().items()}


def buffer_shapes(model: ModelConfig) -> dict[str, Sizes]:
    """The biases that select experts, and numbers that are not trained."""
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
    renamed = names.mtp_names(model)
    return {_in_files(name, renamed): recipe for name, recipe in found.items()} if renamed else found


def recipes_in_memory(model: ModelConfig) -> dict[str, Recipe]:
    """Return `hf_recipes` of a model that transformers has in memory. Raises ConfigError for multi-token prediction."""
    if model.num_nextn_predict_layers:
        text = "transformers' model leaves layers of multi-token prediction out; native-to-hf writes them"
        raise ConfigError(f"model.num_nextn_predict_layers={model.num_nextn_predict_layers}: {text}")
    return hf_recipes(model)


def _in_files(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name in files of a tensor with this name by the tables (`HuggingFace.mtp_names`)."""
    for ours, theirs in renamed.items():
        if name.startswith(ours):
            return f"{theirs}{name.removeprefix(ours)}"
    return name


def hf_copies(model: ModelConfig) -> dict[str, str]:
    """Return the copies of tensors in files of the model, each with its original, which it must equal."""
    names = names_of(model)
    return {**(names.tied if model.tie_word_embeddings else {}), **names.mtp_copies(model)}


def projections(model: ModelConfig) -> list[str]:
    """Return the names of tensors of which each layer of multi-token prediction has one, in the order of layers."""
    names = names_of(model)
    modules = {**names.modules, **names.modules_of(model)}
    ours = (f"layers.{number}.eh_proj.weight" for number in range(model.num_hidden_layers, model.all_layers))
    found = (their_name(name, modules).replace("*", name.split(".")[1], 1) for name in ours)
    return [_in_files(name, names.mtp_names(model)) for name in found]


def in_fp32(wanted: Mapping[str, Recipe], model: ModelConfig) -> set[str]:
    """Theirs that have fp32 in files of any dtype: the biases that select experts, and what the family names."""
    names = names_of(model)
    buffers = {starred(name)[0] for name in buffer_shapes(model)} - {*names.maybe_fp32}
    return _holding(wanted, {*names.in_fp32, *buffers})


def _holding(wanted: Mapping[str, Recipe], patterns: Collection[str]) -> set[str]:
    """Return names of theirs that hold one of ours with one of these names, with * for numbers."""
    return {name for name, recipe in wanted.items() if any(starred(part.name)[0] in patterns for part in recipe.parts)}


def hf_infos(model: ModelConfig, dtype: torch.dtype, found_fp32: Collection[str] = ()) -> dict[str, TensorInfo]:
    """Shape and dtype of each tensor in files of `dtype`. `found_fp32` is that of the import (`dtypes_of`)."""
    wanted = hf_recipes(model)
    infos = {name: TensorInfo(recipe.shape, dtype) for name, recipe in wanted.items()}
    fp32 = in_fp32(wanted, model) | {name for name in wanted if starred(name)[0] in found_fp32}
    return infos | {name: TensorInfo(wanted[name].shape, torch.float32) for name in fp32}


def dtypes_of(weights: HFWeights, wanted: Mapping[str, Recipe], model: ModelConfig) -> tuple[torch.dtype, list[str]]:
    """Return the dtype of a file, and names of tensors, with * for numbers, that some files have in fp32, as this one.

    `HuggingFace.maybe_fp32` says which tensors these are. An export has them in fp32 again.
    """
    some = _holding(wanted, names_of(model).maybe_fp32)
    dtype = weights.dtype(in_fp32(wanted, model) | some)
    return dtype, sorted({starred(name)[0] for name in some if weights.tensors[name].info.dtype == torch.float32})


def ours_in_fp32(model: ModelConfig, found_fp32: Collection[str]) -> set[str]:
    """Return our tensors in those of `found_fp32` (`dtypes_of`)."""
    if not found_fp32:
        return set()
    found = (recipe for name, recipe in hf_recipes(model).items() if starred(name)[0] in found_fp32)
    return {part.name for recipe in found for part in recipe.parts}


def found_in_fp32(folders: Iterable[Path | None]) -> list[str]:
    """Return the second result of `dtypes_of` that the first of these folders' checkpoints notes; [] if none does."""
    for folder in folders:
        if folder is not None and (folder / MANIFEST).is_file():
            names = read_manifest(folder).trainer.get(FOUND_FP32, [])
            if names and NAMES.fits(names):
                return list(names)
    return []
