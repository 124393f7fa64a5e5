"""Which parameters a run trains. The others are frozen: no gradient, no optimizer state, saved like any other."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from torch import nn

from megapar import comm
from megapar.context import ParallelContext
from megapar.errors import ConfigError
from megapar.params import spec_of


@dataclass(frozen=True)
class Frozen:
    """What `freeze` found on a rank: patterns that matched, fused parameters of which they name a part, and elements
    that this rank owns, trained and in all."""

    used: list[str]
    torn: list[str]
    trained: int
    total: int


def freeze(modules: Iterable[nn.Module], patterns: Sequence[str]) -> Frozen:
    """Freeze each parameter of `modules` whose name matches none of `patterns`; without patterns none.

    Patterns are those of a shell, such as `layers.1?.mlp.*`.
    """
    used: set[str] = set()
    torn: list[str] = []
    trained = 0
    total = 0
    for param in {id(param): param for module in modules for param in module.parameters()}.values():
        spec = spec_of(param)
        matching = [[p for p in patterns if fnmatchcase(piece.name, p)] for piece in spec.pieces]
        used.update(pattern for found in matching for pattern in found)
        is_trained = not patterns or all(matching)
        if any(matching) and not is_trained:
            torn.append(spec.name)
        param.requires_grad_(is_trained)
        owned = sum(last - first for first, last in spec.owned_ranges())
        total += owned
        trained += owned if is_trained else 0
    return Frozen(sorted(used), torn, trained, total)


def freeze_others(modules: Iterable[nn.Module], patterns: Sequence[str], ctx: ParallelContext) -> list[str]:
    """`freeze` on all ranks (train.trainable); returns what to tell the user. A collective over `ctx.world`.

    Raises ConfigError on every rank if a pattern matches no parameter of the model, or a part of a fused one, such as a
    layer's keys without its queries.
    """
    if not patterns:
        return []
    everywhere = [
        Frozen(**found) for found in comm.gather_json(asdict(freeze(modules, patterns)), ctx.world, ctx.device)
    ]
    _refuse(patterns, everywhere)
    # Replicas hold the same parameters.
    trained = sum(rank.trained for rank in everywhere) // ctx.grad.size
    total = sum(rank.total for rank in everywhere) // ctx.grad.size
    return [f"trains {trained:,} of {total:,} parameters: {' '.join(patterns)}; the others are frozen"]


def _refuse(patterns: Sequence[str], everywhere: Sequence[Frozen]) -> None:
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
