"""Checkpoints of FSDP2 by torch's own functions, as accelerate, NeMo Automodel, VeOmni and scripts of users write them.

The model is one of transformers, so its parameters have the names of Hugging Face's files, or those of stacked experts
that transformers 5 has in memory. The folder does not hold the model's options: they are an argument. What writes
which names (all below one prefix, or none):

    model.NAME, optim.state.NAME.exp_avg                torch's examples; NeMo Automodel, VeOmni (by the names alone)
    app.model.NAME, app.optim.state.NAME.exp_avg        torch's tutorial of a Stateful application
    pytorch_model_fsdp_0/, optimizer_0/                 accelerate: two folders
    model/, optim/ or optimizer/                        NeMo Automodel (by the names alone)

Megatron-FSDP's fsdp_dtensor is read if its model has Hugging Face's names (by the names alone).
"""

import re
from dataclasses import replace
from pathlib import Path

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from megapar_models.convert.config_json import canonical_name, names_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.formats.by_parameter import Spelling, contents_by_parameter
from megapar_models.convert.formats.contents import Contents
from megapar_models.convert.formats.dcp import INDEX, open_dcp
from megapar_models.convert.formats.derived import JoinedStore
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.formats.torchtitan import is_torchtitan, read_torchtitan
from megapar_models.convert.saved import whole_config

_STEP = re.compile(r"step-(\d{1,18})")


def is_torch(folder: Path) -> bool:
    """Whether a folder is one of torch's DCP, a run of torchtitan's with step-N folders, or accelerate's of two."""
    return bool(_parts(folder))


def _parts(folder: Path) -> list[Path]:
    """The DCP folders of a checkpoint: itself, the newest step-N in it, or all below it. Empty if there is none."""
    if (folder / INDEX).is_file():
        return [folder]
    below = sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
    steps = {int(found[1]): path for path in below if (found := _STEP.fullmatch(path.name))}
    return [steps[max(steps)]] if steps else below


def open_store(folder: Path) -> TensorStore:
    """Open a checkpoint of torch's DCP. Several folders are one store. Raises CheckpointError if there is none."""
    parts = _parts(folder)
    if not parts:
        raise CheckpointError(f"{folder}: has no {INDEX}, and no folder below it has one: no checkpoint of torch's DCP")
    if len(parts) == 1:
        return open_dcp(parts[0])
    return JoinedStore(folder, {path.name: open_dcp(path) for path in parts})


def open_torch(folder: Path, model: ModelConfig, *, weights_only: bool = False) -> Contents:
    """The contents of a checkpoint by torchtitan, or by FSDP2 with Hugging Face's names: its names say which.

    Raises CheckpointError as `read_fsdp` and `read_torchtitan`, and ConfigError for an invalid model.
    """
    store = open_store(folder)
    read = read_torchtitan if is_torchtitan(store) else read_fsdp
    return read(store, whole_config(model).model, weights_only=weights_only)


def read_fsdp(
    store: TensorStore, model: ModelConfig, *, step: int | None = None, weights_only: bool = False
) -> Contents:
    """Find the model and the state of its optimizer in a store, by Hugging Face's names.

    `step` and `weights_only` are as in `contents_by_parameter`. Raises CheckpointError if they are not there, and
    ConfigError if the family has no names at Hugging Face.
    """
    names = replace(names_of(model), base_prefix="")
    tied = names.tied if model.tie_word_embeddings else {}
    recipes = hf_recipes(model)
    constants = {name for name, recipe in recipes.items() if recipe.constant is not None}

    def canonical(name: str) -> str | None:
        found = canonical_name(name, names)
        return None if found in constants else found

    title = "FSDP2 with Hugging Face's names, {prefix}"
    spelling = Spelling(canonical, names.stacked, model.num_experts, tied)
    return contents_by_parameter(title, store, recipes, spelling, model, step=step, weights_only=weights_only)
