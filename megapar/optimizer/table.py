"""The table of optimizers, and the options of each."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields

from megapar.config.messages import shown
from megapar.config.options import OptimizerConfig
from megapar.config.plugins import named
from megapar.data_parallel.layout import HasParameters
from megapar.errors import ConfigError
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.base import Optimizer
from megapar.params import MAIN, spec_of

OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW}
"""The optimizers by their name in `ParamSpec.optimizer`. A class declares its options (`Optimizer.OPTIONS`)."""


def find(name: str) -> type[Optimizer]:
    """The optimizer of this name: a key of OPTIMIZERS, or MODULE:NAME. Raises ConfigError if there is none."""
    found = named("ParamSpec.optimizer", name, OPTIMIZERS, type)
    if not issubclass(found, Optimizer):
        raise ConfigError(f"ParamSpec.optimizer={name}: is no subclass of {Optimizer.__module__}.{Optimizer.__name__}")
    return found


def names_of(modules: Iterable[HasParameters]) -> list[str]:
    """The names of the optimizers of all trained parameters, sorted."""
    params = [param for module in modules for param in module.parameters() if param.requires_grad]
    return sorted({spec_of(param).optimizer for param in params})


def needing_whole(modules: Iterable[HasParameters]) -> list[str]:
    """Those of `names_of` needing whole parameters (`Optimizer.WHOLE`)."""
    return [name for name in names_of(modules) if find(name).WHOLE]


def check(config: OptimizerConfig, names: Collection[str]) -> None:
    """Raise ConfigError if these optimizers, all those of a run, cannot update it with these options.

    They cannot if an option differs from its default and none of them reads it, or if two of them give a state the same
    name. An option declared by no optimizer of the table belongs to every optimizer.
    """
    classes = {name: find(name) for name in sorted(names)}
    declared = {field.name for optimizer in OPTIMIZERS.values() for field in fields(optimizer.OPTIONS)}
    read = {field.name for optimizer in classes.values() for field in fields(optimizer.OPTIONS)}
    for option in sorted(declared - read):
        value = getattr(config, option)
        if value != getattr(OptimizerConfig(), option):
            text = f"optimizer.{option}={shown(value)}: no optimizer of this run reads it ({', '.join(classes)})"
            raise ConfigError(f"{text}; leave it out")
    owners: dict[str, str] = {}
    for name, optimizer in classes.items():
        for tensor in optimizer.STATE:
            # A checkpoint finds state by its name.
            if tensor.name == MAIN or owners.setdefault(tensor.name, name) != name:
                other = owners.get(tensor.name, "every optimizer")
                raise ConfigError(f"{name} keeps a state {tensor.name}, and so does {other}: rename one of them")
