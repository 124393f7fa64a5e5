"""Rank 0 asks all ranks: it alone runs a program such as a harness, and the others answer with it.

The program may take any time between two requests, but a collective ends the run after launch.timeout_seconds. So the
ranks ask in short collectives whether there is a request. On rank 0 a thread does so. The program has the main thread,
because some of the harness's tasks set alarms.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread
from typing import Any

from megapar.declare.agreement import from_first
from megapar.declare.context import ParallelContext
from megapar.system import device
from megapar_models.generation import Sampling
from megapar_models.judging.judge import Continuation, Judge, Window

_PAUSE_SECONDS = 0.02  # that rank 0 waits for a request before it tells the others that there is none
_END: list[Any] = []

Answer = Callable[[str, Any], Any]
"""Answers a request of this kind, of JSON types. A collective with the same result on all ranks."""


def answer_with(judge: Judge) -> Answer:
    """What all ranks answer with: scores of windows, and continuations of prompts."""

    def answer(kind: str, request: Any) -> Any:
        if kind == "score":
            return judge.score([Window(ids, scored) for ids, scored in request])
        prompts, tokens, until, sampling = request
        return judge.continuations(prompts, Continuation(tokens, until, Sampling(**sampling)))

    return answer


@contextmanager
def leading(answer: Answer, ctx: ParallelContext) -> Iterator[Answer]:
    """Yield what rank 0 asks with. The other ranks call `follow` meanwhile."""
    if ctx.world.size == 1:
        yield answer
        return
    asked: Queue[list[Any]] = Queue()
    answered: Queue[Any] = Queue()
    thread = Thread(target=_serve, args=(answer, ctx, asked, answered), daemon=True)
    thread.start()

    def ask(kind: str, request: Any) -> Any:
        asked.put([kind, request])
        found = answered.get()
        if isinstance(found, BaseException):
            raise found
        return found

    try:
        yield ask
    finally:
        asked.put(_END)
        thread.join()


def follow(answer: Answer, ctx: ParallelContext) -> None:
    """Answer requests of rank 0, on each other rank, until there are no more."""
    while (request := from_first(None, ctx)) != _END:
        if request is not None:
            answer(*request)


def _serve(answer: Answer, ctx: ParallelContext, asked: "Queue[list[Any]]", answered: "Queue[Any]") -> None:
    """Rank 0's part of `follow`."""
    try:
        device.set_current(ctx.device)  # a new thread starts on GPU 0
        request = None
        while request != _END:
            try:
                request = asked.get(timeout=_PAUSE_SECONDS)
            except Empty:
                request = None
            from_first(request, ctx)
            if request:
                answered.put(answer(*request))
    # Of any class: the main thread waits for an answer.
    except BaseException as error:
        answered.put(error)
