"""Selects the parameters to train. The others are frozen.

A frozen parameter has no gradient and no optimizer state. Checkpoints hold it like any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from torch import nn

from megapar.base.errors import ConfigError
from megapar.comm import collectives
from megapar.declare.context import ParallelContext
from megapar.declare.params import selected, spec_of


@dataclass(frozen=True)
class Frozen:
    """The result of `freeze` on one rank."""

    used: list[str]
    """Patterns with a match."""
    torn: list[str]
    """For each fused parameter matched only in part: its first and its last logical tensor."""
    trained: int
    """Elements of trained parameters, as counted by this rank: one rank counts each element of the model."""
    total: int
    """Elements of all parameters, as counted by this rank."""


def freeze(modules: Iterable[nn.Module], patterns: Sequence[str]) -> Frozen:
    """Freeze each parameter of `modules` without a match in `patterns`. Without patterns nothing is frozen.

    Patterns are those of a shell, such as `layers.1?.mlp.*`.
    """
    used: set[str] = set()
    torn: list[str] = []
    trained = 0
    total = 0
    # By id, because two stages of a rank may share a tied embedding.
    for param in {id(param): param for module in modules for param in module.parameters()}.values():
        spec = spec_of(param)
        names = spec.names_to_select()
        matching = [[p for p in patterns if fnmatchcase(name, p)] for name in names]
        for matched in matching:
            used.update(matched)
        is_trained = selected(spec, patterns)
        if any(matching) and not is_trained:
            torn.append(f"{names[0]} to {names[-1]}")
        # A parameter that the model itself has frozen stays frozen.
        is_trained = is_trained and param.requires_grad
        param.requires_grad_(is_trained)
        owned = 0
        # The first replica counts. Experts have fewer replicas than other parameters.
        if spec.grad_axis.first:
            owned = sum(last - first for first, last in spec.owned_ranges())
        total += owned
        if is_trained:
            trained += owned
    return Frozen(sorted(used), torn, trained, total)


def freeze_others(modules: Iterable[nn.Module], patterns: Sequence[str], ctx: ParallelContext) -> list[str]:
    """Freeze parameters on all ranks by the patterns of train.trainable; returns lines for the user. A collective.

    Raises ConfigError on every rank if a pattern matches no parameter of the model, or only a part of a fused one, such
    as a layer's keys without its queries.
    """
    if not patterns:
        return []
    # All ranks, because a pattern may match only parameters of another pipeline stage.
    gathered = collectives.gather_json(asdict(freeze(modules, patterns)), ctx.world, ctx.device)
    everywhere = [Frozen(**fields) for fields in gathered]
    refuse(patterns, everywhere)
    trained = sum(rank.trained for rank in everywhere)
    total = sum(rank.total for rank in everywhere)
    return [f"trains {trained:,} of {total:,} parameters: {' '.join(patterns)}; the others are frozen"]


def refuse(patterns: Sequence[str], everywhere: Sequence[Frozen]) -> None:
    """Raise ConfigError for an unused pattern or a torn parameter."""
    used = {pattern for rank in everywhere for pattern in rank.used}
    unused = [pattern for pattern in patterns if pattern not in used]
    torn = sorted({name for rank in everywhere for name in rank.torn})
    error = None
    if unused:
        error = ConfigError(f"train.trainable {' '.join(unused)}: matches no parameter of the model")
    elif torn:
        error = ConfigError(
            f"train.trainable {' '.join(patterns)}: matches a part of {torn[0]}, which is one parameter: name all of "
            "its parts or none"
        )
    if error:
        error.everywhere = True
        raise error
