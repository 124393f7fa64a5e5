"""Saving and loading succeed on all ranks or fail on all, with the same words.

Work on files may take any time, and a collective that takes longer than launch.timeout_seconds ends the run. So no rank
works on files while others wait for it inside a collective: the work runs in a thread, and the ranks ask each other
again and again, each time in a short collective, whether all are done.
"""

import json
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import torch

from megapar import comm, device
from megapar.context import ParallelContext
from megapar.errors import MegaparError, NumericError

T = TypeVar("T")
Problem = list[str]  # the class of an error and what it says: JSON types, for other ranks

_PAUSE_SECONDS = 0.01  # between looks at what other ranks have come to


def on_all_ranks(action: Callable[[], T], ctx: ParallelContext, kind: type[MegaparError], doing: str) -> T:
    """Run `action` on every rank and return what it returned here. A collective over `ctx.world`.

    `action` runs in a thread and calls no collective; it may take longer than launch.timeout_seconds. Raises `kind` (or
    NumericError, where that is what happened) on every rank if it failed on any, naming the first such rank.
    """
    task = _Task(action, ctx.device)
    if ctx.world.size == 1:
        task.run()
    else:
        Thread(target=task.run, daemon=True).start()
        until_all(task.done, ctx)
    problem = None if task.error is None else relayed(task.error)
    shared = shared_error(comm.gather_json(problem, ctx.world, ctx.device), kind, doing)
    if shared:
        raise shared from task.error
    return task.value


class _Task(Generic[T]):
    """An action, and what came of it once `done` is set."""

    value: T

    def __init__(self, action: Callable[[], T], where: torch.device):
        self._action = action
        self._where = where
        self.error: Exception | None = None
        self.done = Event()

    def run(self) -> None:
        try:
            device.set_current(self._where)
            self.value = self._action()
        except Exception as error:  # whatever it is, the other ranks must hear of it: they would wait for ever
            self.error = error
        finally:
            self.done.set()


def any_rank(flag: bool, ctx: ParallelContext) -> bool:
    """Whether `flag` holds on some rank. A collective over `ctx.world`."""
    return bool(comm.all_reduce(torch.tensor([int(flag)], device=ctx.device), ctx.world, "max").item())


def until_all(done: Event, ctx: ParallelContext) -> None:
    """Wait until `done` is set on every rank, however long that takes. A collective over `ctx.world`."""
    while any_rank(not done.wait(_PAUSE_SECONDS), ctx):
        pass


def from_first(value: Any, ctx: ParallelContext) -> Any:
    """Rank 0's `value` (JSON types) on every rank. A collective over `ctx.world`.

    `gather_json` would hold one row for each rank; this holds one in all.
    """
    text = json.dumps(value).encode() if ctx.world.first else b""
    length = comm.all_reduce(torch.tensor([len(text)], device=ctx.device), ctx.world, "max")
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if ctx.world.first:
        payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    received = comm.all_reduce(payload.to(ctx.device), ctx.world, "max")
    return json.loads(received.cpu().numpy().tobytes())


def relayed(error: Exception) -> Problem:
    """What the other ranks must know of an error."""
    return [type(error).__name__, in_one_line(error)]


def in_one_line(error: Exception) -> str:
    """What an error of ours says; of any other its class as well."""
    text = str(error) if isinstance(error, MegaparError) else f"{type(error).__name__}: {error}"
    return " ".join(line.strip() for line in text.splitlines())


def shared_error(problems: Sequence[Problem | None], kind: type[MegaparError], doing: str) -> MegaparError | None:
    """Build one exception, the same on all ranks, from the problems of all ranks in their order (None: succeeded).

    Returns None if all succeeded. `kind` is the exception's class, `doing` says in words what failed.

    A value that is not finite stays a NumericError, because another exit code tells restarters not to try again.
    """
    failed = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if not failed:
        return None
    first, (name, text) = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f" (rank {first}{others})" if len(problems) > 1 else ""
    chosen = NumericError if name == NumericError.__name__ else kind
    shared = chosen(f"{doing}{where}: {text}")
    shared.everywhere = True
    return shared
