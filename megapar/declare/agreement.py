"""File work with one outcome for all ranks: success, or failure with the same message.

File work may take any time, but a collective ends the run if it takes longer than launch.timeout_seconds. So no rank
does file work while other ranks wait for it inside a collective. The work runs in a thread instead. Meanwhile the ranks
ask each other in short collectives whether all of them are done.
"""

import json
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import torch

from megapar.base.errors import MegaparError, NumericError
from megapar.comm import collectives
from megapar.declare.context import ParallelContext
from megapar.system import device

T = TypeVar("T")
Problem = list[str]  # [class name of an error, its message]: JSON types, so that other ranks can read it

_PAUSE_SECONDS = 0.01  # that a rank waits for its own work before it asks the other ranks again


def on_all_ranks(action: Callable[[], T], ctx: ParallelContext, kind: type[MegaparError], doing: str) -> T:
    """Run `action` on every rank and return this rank's result. A collective over `ctx.world`.

    `action` runs in a thread and calls no collective. It may take longer than launch.timeout_seconds. `doing` says in
    words what failed. If `action` fails on any rank, every rank raises `kind`, and the message names the first of these
    ranks. If the error of any rank was a NumericError, every rank raises that NumericError instead. A single rank runs
    `action` in this thread, where a signal may interrupt it: KeyboardInterrupt passes.
    """
    task = _Task(action, ctx.device)
    if ctx.world.size == 1:
        task.run()
        if isinstance(task.error, KeyboardInterrupt):
            raise task.error  # a signal to this thread, whatever the action was doing
    else:
        # A daemon thread: a process that is interrupted ends without waiting for a slow disk.
        Thread(target=task.run, daemon=True).start()
        until_all(task.done, ctx)
    problem = None if task.error is None else relayed(task.error)
    shared = shared_error(collectives.gather_json(problem, ctx.world, ctx.device), kind, doing)
    if shared:
        raise shared from task.error
    return task.value


class _Task(Generic[T]):
    """An action and its result: `value` or `error`. Read them only after `done` is set."""

    value: T

    def __init__(self, action: Callable[[], T], target_device: torch.device):
        self._action = action
        self._device = target_device
        self.error: BaseException | None = None
        self.done = Event()

    def run(self) -> None:
        try:
            # A new thread starts on GPU 0, whatever GPU this rank uses.
            device.set_current(self._device)
            self.value = self._action()
        # Of any class, a panic of Rust and sys.exit too: the other ranks would wait for ever if they were not told.
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


def any_rank(flag: bool, ctx: ParallelContext) -> bool:
    """Whether `flag` is true on at least one rank. A collective over `ctx.world`."""
    flags = torch.tensor([int(flag)], device=ctx.device)
    return bool(collectives.to_host(collectives.all_reduce(flags, ctx.world, "max"), ctx.world).item())


def until_all(done: Event, ctx: ParallelContext) -> None:
    """Wait until `done` is set on every rank, without a time limit. A collective over `ctx.world`."""
    while any_rank(not done.wait(_PAUSE_SECONDS), ctx):
        pass


def from_first(value: Any, ctx: ParallelContext) -> Any:
    """Return rank 0's `value` (JSON types) on every rank. A collective over `ctx.world`.

    If only rank 0 has a value, use this instead of `gather_json`, which allocates one row for each rank.
    """
    if ctx.world.size == 1:
        return value
    # The other ranks contribute zeros, so the element-wise maximum is what rank 0 sent.
    text = json.dumps(value).encode() if ctx.world.first else b""
    length = collectives.all_reduce(torch.tensor([len(text)], device=ctx.device), ctx.world, "max")
    payload = torch.zeros(int(collectives.to_host(length, ctx.world)), dtype=torch.uint8)
    if ctx.world.first:
        payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    received = collectives.all_reduce(payload.to(ctx.device), ctx.world, "max")
    return json.loads(collectives.to_host(received, ctx.world).numpy().tobytes())


def relayed(error: BaseException) -> Problem:
    """The part of an error for the other ranks: its class and its message."""
    return [type(error).__name__, in_one_line(error)]


def in_one_line(error: BaseException) -> str:
    """The message of an error on one line. Its class comes first, unless it is a MegaparError."""
    text = str(error)
    if not isinstance(error, MegaparError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(line.strip() for line in text.splitlines())


def shared_error(problems: Sequence[Problem | None], kind: type[MegaparError], doing: str) -> MegaparError | None:
    """Build one exception, the same on all ranks, from the problems of all ranks.

    `problems` are in rank order, None for a rank without one. `kind` is the class of the exception. `doing` says in
    words what failed. A NumericError of any rank comes before other errors. Returns None if all ranks succeeded.
    """
    failed = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if not failed:
        return None
    # A NumericError keeps its class: a run does not go on after it, nor is the run started again.
    numeric = NumericError.__name__
    first, (name, text) = next((item for item in failed if item[1][0] == numeric), failed[0])
    rank_text = ""
    if len(problems) > 1:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        rank_text = f" (rank {first}{others})"
    error_class = NumericError if name == numeric else kind
    shared = error_class(f"{doing}{rank_text}: {text}")
    shared.everywhere = True
    return shared
