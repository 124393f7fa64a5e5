"""Which parameters a run trains. The others are frozen: no gradient, no optimizer state, saved like any other."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from megapar import comm
from megapar.context import ParallelContext
from megapar.errors import ConfigError
from megapar.params import spec_of


def freeze_others(modules: Iterable[nn.Module], patterns: Sequence[str], ctx: ParallelContext) -> list[str]:
    """Freeze each parameter of this rank's `modules` whose name matches none of `patterns` (train.trainable; empty:
    train all); returns what to tell the user. A collective over `ctx.world`.

    Patterns are those of a shell, such as `layers.1?.mlp.*`. Raises ConfigError on every rank if one matches no
    parameter of the model, or a part of a fused one, such as a layer's keys without its queries.
    """
    if not patterns:
        return []
    params = {id(param): param for module in modules for param in module.parameters()}.values()
    used: set[str] = set()
    torn: list[str] = []
    trained = 0
    total = 0
    for param in params:
        matching = [[p for p in patterns if fnmatchcase(piece.name, p)] for piece in spec_of(param).pieces]
        used.update(pattern for found in matching for pattern in found)
        is_trained = all(matching)
        if any(matching) and not is_trained:
            torn.append(spec_of(param).name)
        param.requires_grad_(is_trained)
        owned = sum(last - first for first, last in spec_of(param).owned_ranges())
        total += owned
        trained += owned if is_trained else 0
    everywhere = comm.gather_json([sorted(used), torn, trained, total], ctx.world, ctx.device)
    _refuse(patterns, {name for names, _, _, _ in everywhere for name in names}, [t for _, t, _, _ in everywhere])
    # Replicas hold the same parameters.
    counts = [sum(rank[i] for rank in everywhere) // ctx.grad.size for i in (2, 3)]
    return [f"trains {counts[0]:,} of {counts[1]:,} parameters: {' '.join(patterns)}; the others are frozen"]


def _refuse(patterns: Sequence[str], used: set[str], torn: Iterable[Sequence[str]]) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    parts = sorted({name for names in torn for name in names})
    error = None
    if unused:
        error = ConfigError(f"train.trainable {' '.join(unused)}: matches no parameter of the model")
    elif parts:
        error = ConfigError(
            f"train.trainable {' '.join(patterns)}: matches a part of {parts[0]}, which is one parameter: name all "
            "of its parts or none"
        )
    if error:
        error.everywhere = True
        raise error
