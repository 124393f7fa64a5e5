"""Saving and loading succeed on all ranks or fail on all, with the same words."""

from collections.abc import Callable
from typing import TypeVar

from megapar import comm
from megapar.context import ParallelContext
from megapar.errors import MegaparError

T = TypeVar("T")


def together(action: Callable[[], T], ctx: ParallelContext, kind: type[MegaparError], doing: str) -> T:
    """Run `action` on every rank and return what it returned here. A collective over `ctx.world`.

    Raises `kind` on every rank if it failed on any, naming the first such rank.
    """
    failure, problem = None, None
    try:
        value = action()
    except Exception as error:  # whatever it is, the other ranks must hear of it: they would wait for ever
        text = str(error) if isinstance(error, MegaparError) else f"{type(error).__name__}: {error}"
        failure, problem = error, " ".join(line.strip() for line in text.splitlines())
    problems = comm.gather_json(problem, ctx.world, ctx.device)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if failed:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        where = f" (rank {failed[0]}{others})" if ctx.world.size > 1 else ""
        shared = kind(f"{doing}{where}: {problems[failed[0]]}")
        shared.everywhere = True
        raise shared from failure
    return value
