"""What is trained beside the factors of adapters: whole modules, which PEFT keeps as its `modules_to_save`.

PEFT wraps such a module of transformers, and the module's tensors are in the file under their own names. So a module is
written if all of its tensors were trained. It is refused if transformers has no such module by itself: experts and
routers have other names there than in files, and a parameter beside modules belongs to a larger one.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from typing import NamedTuple

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import BUFFER, Manifest
from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN
from megapar_models.convert.config_json import names_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.recipes import Recipe, TensorPlace, places, starred
from megapar_models.counts import WholeModel

_NO_MODULES = (".router.", ".experts.")
_COPY = ".base_layer.weight"


def trained_beside(manifest: Manifest, model: ModelConfig, factors: Collection[str]) -> set[str]:
    """The logical names of the trained tensors in a checkpoint of adapters that are none of its `factors`.

    Raises ConfigError if the biases of routers have moved: they are no parameters, and no module holds them alone.
    """
    biases = [name for name in manifest.tensors if name.startswith(f"{BUFFER}.")]
    experts = model.experts
    if biases and experts is not None and experts.has_selection_bias and experts.router_bias_update_rate:
        text = "moves in training (model.moe.router_bias_update_rate), and PEFT has no place for it: merge instead"
        raise ConfigError(f"native-to-peft: {biases[0].removeprefix(f'{BUFFER}.')} {text}")
    stored = {name.removeprefix(f"{MAIN}.") for name in manifest.tensors if name.startswith(f"{MAIN}.")}
    return stored.difference(factors)


def modules_to_save(model: ModelConfig, trained: Set[str], adapted: Set[str]) -> dict[str, Recipe]:
    """The tensors of PEFT's modules_to_save that hold the `trained` ones of ours, by their names in transformers.

    `adapted` are the matrices with an adapter. Raises ConfigError if PEFT cannot keep a tensor in a module.
    """
    wanted = hf_recipes(model)
    owners = {name.rpartition(".")[0] for name, recipe in wanted.items() if trained & _ours(recipe)}
    found: dict[str, Recipe] = {}
    for module in sorted(owners):
        inside = {name: recipe for name, recipe in wanted.items() if name.startswith(f"{module}.")}
        ours = {tensor for recipe in inside.values() for tensor in _ours(recipe)}
        first = min(ours & trained)
        why = ""
        if any(word in f"{first}." for word in _NO_MODULES):
            why = "PEFT keeps no router and no expert"
        elif any("." in name.removeprefix(f"{module}.") for name in inside):
            why = f"PEFT would keep all of {module} with it"
        elif {tensor.rpartition(".")[0] for tensor in ours} & adapted:
            why = f"PEFT keeps {module} or adapts it, not both"
        elif not ours <= trained or not all(recipe.parts for recipe in inside.values()):
            why = f"PEFT keeps all of {module}, of which only a part was trained"
        if why:
            raise ConfigError(f"native-to-peft: {first} was trained beside the adapters, and {why}: merge instead")
        found |= inside
    if model.tie_word_embeddings:
        # PEFT's copy of the embedding is not tied to the head, so the head gets an equal one.
        found |= {copy: found[name] for copy, name in names_of(model).tied.items() if name in found}
    return found


def _ours(recipe: Recipe) -> set[str]:
    return {part.name for part in recipe.parts}


class PeftExtras(NamedTuple):
    """The tensors in a file of PEFT beside the factors, by their names in transformers.

    `kept` has the places of those of ours that were trained. `copies` has the places of ours that the file repeats of
    the base, by its names, and `tied` the names of equal tensors.
    """

    kept: dict[str, list[TensorPlace]]
    copies: dict[str, TensorPlace]
    tied: dict[str, str]


def read_beside(
    model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], modules: Iterable[str], *, ties: bool
) -> tuple[PeftExtras, list[str]]:
    """What a file of PEFT has beside the factors, and problems.

    `shapes` are those of its tensors by their names in transformers, and `modules` is modules_to_save. `ties` says
    that PEFT ties a kept embedding to the head, as ensure_weight_tying does.
    """
    wanted = hf_recipes(model)
    tied = names_of(model).tied if model.tie_word_embeddings else {}
    wrong, kept, copies = [], set(), {}
    place = {found[0].source: found[0] for found in places(wanted).values() if len(found) == 1}
    for name, shape in shapes.items():
        source = name.replace(_COPY, ".weight")
        recipe = wanted.get(tied.get(source, source))
        if recipe is None or recipe.shape != shape:
            wrong.append(f"{name} {list(shape)}")
        elif any(name.rpartition(".")[0].endswith(module) for module in modules):
            kept.add(name)
        elif source in place and len(recipe.parts) == 1:
            copies[name] = place[source]
        else:
            wrong.append(f"{name}: in no module of modules_to_save")
    for copy, name in tied.items():
        if (name in kept and copy not in kept and not ties) or (copy in kept and name not in kept):
            wrong.append(f"{copy} and {name} are one matrix here, and only one of them was trained")
    ours = {name: found for name, found in places(wanted).items() if all(part.source in kept for part in found)}
    used = {part.source for found in ours.values() for part in found}
    wrong += [f"{name}: a part of a tensor, without the others" for name in sorted(kept - used - tied.keys())]
    return PeftExtras(ours, copies, {copy: name for copy, name in tied.items() if {copy, name} <= kept}), wrong


def trainable(model: ModelConfig, kept: Set[str]) -> list[str]:
    """Patterns of train.trainable for these tensors: with a * for the layer if it then matches no others."""
    every = [*WholeModel(model).tensors()]
    found = set()
    for name in kept:
        pattern = starred(name)[0]
        matches = [other for other in every if fnmatchcase(other, pattern)]
        found.add(pattern if kept >= {*matches} else name)
    return sorted(found)
