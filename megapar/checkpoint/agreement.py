"""Saving and loading succeed on all ranks or fail on all, with the same words."""

from collections.abc import Callable, Sequence
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
        failure, problem = error, in_one_line(error)
    shared = shared_error(comm.gather_json(problem, ctx.world, ctx.device), kind, doing)
    if shared:
        raise shared from failure
    return value


def in_one_line(error: Exception) -> str:
    """What an error of ours says; of any other its class as well."""
    text = str(error) if isinstance(error, MegaparError) else f"{type(error).__name__}: {error}"
    return " ".join(line.strip() for line in text.splitlines())


def shared_error(problems: Sequence[str | None], kind: type[MegaparError], doing: str) -> MegaparError | None:
    """What every rank should raise where `problems` befell the ranks, in rank order; None if none did."""
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return None
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f" (rank {failed[0]}{others})" if len(problems) > 1 else ""
    shared = kind(f"{doing}{where}: {problems[failed[0]]}")
    shared.everywhere = True
    return shared
