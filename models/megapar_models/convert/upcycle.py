"""Sparse upcycling (arXiv 2212.05055): a dense model's weights as the start of a mixture of experts.

Every expert is a copy of the dense model's MLP, and the router is initialized anew. The weights of a token's experts
add up to one (norm_topk_prob), so the mixture computes what the dense model computes.
"""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import Manifest
from megapar.checkpoint.load import Reader
from megapar.config.messages import first_few, shown
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.declare.params import MAIN
from megapar.declare.random import initial_values
from megapar_models.convert.saved import with_fitting_objective
from megapar_models.convert.stream import check_finite
from megapar_models.counts import WholeModel
from megapar_models.registry import find, validate


def mixture_of(dense: Config, family: str, experts: int, experts_per_token: int, seed: int) -> Config:
    """The options of the mixture, validated. `seed` becomes train.seed.

    Raises ConfigError if the model has experts already, or if the family cannot be one of this model.
    """
    if dense.model.num_experts:
        raise ConfigError(f"model.moe.num_experts={dense.model.num_experts}: the model is a mixture already")
    if experts > 1 and experts_per_token == 1:
        raise ConfigError(
            "--experts_per_token 1: the weight of a single expert, divided by itself, is always 1, so the router would "
            "get no gradient and never learn; use 2 or more, whose weights add up to one as well"
        )
    options = find(family).options
    moe = options().experts
    if moe is None:
        raise ConfigError(f"model.family={family}: has no experts; choose a family of mixtures, such as mixtral")
    moe = replace(moe, num_experts=experts, num_experts_per_tok=experts_per_token, norm_topk_prob=True)
    model = options(**_shared(dense.model, options, family) | {"family": family, "moe": moe})
    # The data need not fit these options: no text is read.
    train = replace(dense.train, seed=seed)
    mixture = with_fitting_objective(replace(dense, model=model, train=train))
    return replace(validate(mixture, 1), data=dense.data)


def _shared(dense: ModelConfig, options: type[ModelConfig], family: str) -> dict[str, Any]:
    """The values of the dense model's options for `options`. Raises ConfigError if the family lacks one in use."""
    names = {f.name for f in fields(options)}
    values = {f.name: getattr(dense, f.name) for f in fields(dense)}
    initial = type(dense)()
    for name in values.keys() - names:
        if values[name] != getattr(initial, name):
            raise ConfigError(f"model.{name}={shown(values[name])}: family {family} has no such thing")
    return {name: value for name, value in values.items() if name in names}


def dense_name(name: str) -> str:
    """The name of the dense model's tensor behind a tensor of the mixture."""
    return re.sub(r"\.experts\.\d+\.", ".", name)


def tensor_of(source: Path, manifest: Manifest, config: Config) -> Callable[[str], Tensor]:
    """A function from the name of a tensor of the mixture `config` to the tensor, fp32.

    `source` and `manifest` are those of the dense model's native checkpoint. Raises CheckpointError if the dense model
    lacks a tensor, or has one without use for the mixture.
    """
    declared = WholeModel(config.model).declarations
    stored = {name.removeprefix(f"{MAIN}.") for name in manifest.tensors if name.startswith(f"{MAIN}.")}
    routers = {name for name in declared if name.endswith(".router.weight")}
    copied = {dense_name(name) for name in declared.keys() - routers}
    if copied != stored:
        lines = [f"missing {name}" for name in sorted(copied - stored)]
        lines += [f"unexpected {name}" for name in sorted(stored - copied)]
        family = find(config.model.family).name
        raise CheckpointError(f"{source}: is no dense model that {family} could be made of: {first_few(lines)}")

    def make(name: str) -> Tensor:
        if name in routers:
            piece, spec = declared[name]
            return initial_values(piece, spec.init, config.train.seed)
        # A Reader for each tensor: when it closes, the pages of its mapped files are released.
        with Reader(source, manifest) as reader:
            return check_finite(name, reader.tensor(f"{MAIN}.{dense_name(name)}"))

    return make
