"""The table of optimizers: who updates a parameter, and with which options."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields

from megapar.base.errors import ConfigError
from megapar.config.groups import Group, group_of
from megapar.config.messages import shown
from megapar.config.options import OptimizerConfig
from megapar.config.plugins import named
from megapar.data_parallel.layout import HasParameters, Update
from megapar.declare.params import MAIN, ParamSpec, spec_of
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.base import Optimizer
from megapar.optimizer.lion import Lion
from megapar.optimizer.muon import Muon
from megapar.optimizer.sgd import SGD

OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "lion": Lion, "sgd": SGD}
"""The optimizers by their name (optimizer.name). A class declares its options (`Optimizer.OPTIONS`)."""

OF_ELEMENTS = "adamw"
"""Updates the elements if the optimizer of the run updates matrices alone."""


def find(name: str) -> type[Optimizer]:
    """The optimizer of this name: a key of OPTIMIZERS, or MODULE:NAME. Raises ConfigError if there is none."""
    found = named("optimizer.name", name, OPTIMIZERS, type)
    if not issubclass(found, Optimizer):
        raise ConfigError(f"optimizer.name={name}: is no subclass of {Optimizer.__module__}.{Optimizer.__name__}")
    read, there = ({field.name for field in fields(of)} for of in (found.OPTIONS, OptimizerConfig))
    if unknown := sorted(read - there):
        text = f"its OPTIONS has {', '.join(unknown)}, which the section optimizer lacks; that has "
        raise ConfigError(f"optimizer.name={name}: {text}{', '.join(sorted(there))}")
    return found


def update_of(config: OptimizerConfig) -> Callable[[ParamSpec], Update]:
    """Says who updates a parameter. It follows from the spec and from the options, and is the same in every layout.

    Raises ConfigError if a group of optimizer.groups cannot be read. The function raises ValueError if one matches a
    part of a fused parameter (`group_of`): `check` refuses it before.
    """
    groups = _groups(config)

    def update(spec: ParamSpec) -> Update:
        group = group_of(groups, spec.names_to_select())
        if group is None:
            return Update(name_of(config, spec))
        return Update(name_of(config, spec), group.lr, group.decay if spec.decay else 1.0)

    return update


def name_of(config: OptimizerConfig, spec: ParamSpec) -> str:
    """The name of the optimizer of a parameter: what its spec says, or else what the option says."""
    if spec.optimizer:
        return spec.optimizer
    if spec.update == "element" and find(config.name).MATRICES_ONLY:
        return OF_ELEMENTS
    return config.name


def names_of(config: OptimizerConfig, modules: Iterable[HasParameters]) -> list[str]:
    """The names of the optimizers of all trained parameters, sorted."""
    return sorted({name_of(config, spec) for spec in _trained(modules)})


def needing_whole(config: OptimizerConfig, modules: Iterable[HasParameters]) -> list[str]:
    """Return the optimizers of `names_of` that need whole parameters (`Optimizer.WHOLE`)."""
    return [name for name in names_of(config, modules) if find(name).WHOLE]


def groups_used(config: OptimizerConfig, modules: Iterable[HasParameters]) -> tuple[list[str], list[str]]:
    """The patterns of optimizer.groups that decide about a trained parameter, and what is wrong with others, sorted."""
    groups = _groups(config)
    used: set[str] = set()
    problems: set[str] = set()
    for spec in _trained(modules):
        try:
            group = group_of(groups, spec.names_to_select())
        except ValueError as error:
            problems.add(str(error))
        else:
            used.update([group.pattern] if group else [])
    return sorted(used), sorted(problems)


def check_groups(config: OptimizerConfig, ranks: Iterable[tuple[Iterable[str], Iterable[str]]]) -> None:
    """Raise ConfigError if a pattern of optimizer.groups matches a part of a fused parameter, or nothing on any rank.

    `ranks` have found `groups_used`.
    """
    used: set[str] = set()
    problems: set[str] = set()
    for found in ranks:
        used.update(found[0])
        problems.update(found[1])
    listed = sorted(problems)
    for group in _groups(config):
        if group.pattern not in used:
            listed.append(f"{group.pattern}: decides about no trained parameter; leave it out")
    if listed:
        raise ConfigError(f"optimizer.groups {listed[0]}")


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
    if config.offload and not any(optimizer.OFFLOADS for optimizer in classes.values()):
        text = f"no optimizer of this run can keep its state in host memory ({', '.join(classes)})"
        raise ConfigError(f"optimizer.offload={shown(config.offload)}: {text}; leave it at 0")
    owners: dict[str, str] = {}
    for name, optimizer in classes.items():
        for tensor in optimizer.states_of(config):
            # A checkpoint finds state by its name.
            if tensor.name == MAIN or owners.setdefault(tensor.name, name) != name:
                other = owners.get(tensor.name, "every optimizer")
                raise ConfigError(f"{name} keeps a state {tensor.name}, and so does {other}: rename one of them")


def _trained(modules: Iterable[HasParameters]) -> list[ParamSpec]:
    return [spec_of(param) for module in modules for param in module.parameters() if param.requires_grad]


def _groups(config: OptimizerConfig) -> list[Group]:
    try:
        return [Group.parse(text) for text in config.groups]
    except ValueError as error:
        raise ConfigError(f"optimizer.groups {error}") from error
