"""Weight gradients that a rank computes while it waits for other ranks.

Experts append weight gradients to one queue of their rank (`ParallelContext.expert_gradients`). Exchanges
of rows (`megapar.expert_parallel.exchange`) and of their numbers (`megapar.expert_parallel.dispatch`) run the queue
before they wait. A rank whose experts have fewer rows than others' computes weight gradients while it waits for the
others, which leave theirs for later: for an earlier layer's backward, or for the next micro-batch's forward. Rows that
have arrived wait for the gradient of one expert at most. On a GPU all of a layer's are computed while its rows travel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd import Variable

from megapar.linear.main_grad import DeferredWeightGradient, WeightGradientQueue

_MOST_KEPT = 6
"""Three layers of experts without chunks have as many: of gate with up, and of down. Each keeps its rows and their
gradients in memory, also where a layer is recomputed. With 2 a step of ep 2 took 2% longer, with 8 as long."""


class Meanwhile(WeightGradientQueue):
    """The weight gradients of one axis. Those left at the end of a backward pass are computed there, or in the forward
    pass that follows (`across_backwards`)."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: Iterator[None] | None = None  # what is left of the first entry
        self._across_backwards = False

    @contextmanager
    def across_backwards(self) -> Iterator[None]:
        """A context in which a backward pass may leave gradients for the forward pass after it.

        Its end computes what is left. Until then main gradients may lack some.
        """
        self._across_backwards = True
        try:
            yield
        finally:
            self._across_backwards = False
        self.run()

    def append(self, entry: DeferredWeightGradient) -> None:
        super().append(entry)
        if len(self._entries) > _MOST_KEPT:
            self._begin()
            self._finish_begun()
        if not self._across_backwards:
            # By autograd, so that no caller of backward can forget them. FSDP ends its backward so too.
            Variable._execution_engine.queue_callback(self.run)

    def run_until(self, has_arrived: Callable[[], bool]) -> None:
        """Compute and add gradients, the oldest first, until `has_arrived` says so. It is asked before each part."""
        while self._entries and not has_arrived():
            begun = self._begin()
            if next(begun, self) is self:
                self._forget_first()

    def run(self) -> None:
        self._finish_begun()
        super().run()

    def _begin(self) -> Iterator[None]:
        """What is left of the first entry. It stays in the queue until all of it has been added."""
        if self._begun is None:
            self._begun = _added_in_parts(self._entries[0])
        return self._begun

    def _finish_begun(self) -> None:
        if self._begun is not None:
            for _ in self._begun:
                pass
            self._forget_first()

    def _forget_first(self) -> None:
        self._begun = None
        self._entries.popleft()

    def drop(self) -> None:
        """Forget those of a backward that failed."""
        self._begun = None
        self._entries.clear()


def _added_in_parts(entry: DeferredWeightGradient) -> Iterator[None]:
    """Add a gradient to its main gradient, and yield between the parts. Until the last nobody else may add to it."""
    if entry.add_in_parts is None:
        entry.enter_and_add()
        return
    product_input, entering = entry.enter(entry.x)
    entering.wait()
    main_grad = entry.main_grad
    yield from entry.add_in_parts(main_grad.tensor, entry.grad_y, product_input, main_grad.is_stale)
    main_grad.note_added()
