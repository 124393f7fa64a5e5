"""Deferred weight gradients: a layer computes them, or adds them to its main gradient, later.

A parameter's main gradient is the fp32 sum of its gradients over micro-batches (`megapar_kernels.dispatch.MainGrad`). A
pipeline schedule may run a backward pass in two halves, I and W (`megapar.pipeline.actions.Action`). In I, layers
append deferred weight gradients to a `WeightGradientQueue`. In W, the queue adds them to the main gradients, one by one
in that order. It computes each matrix's just before adding it. Gradients of norms and biases cost little: I computes
them, and W adds them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from megapar_kernels.dispatch import MainGrad, main_grad_of
from torch import Tensor, nn

from megapar.comm.pending import NOTHING, Pending


def main_grads(module: nn.Module) -> list[MainGrad]:
    """The main gradients of a module's parameters, in their order. Parameters without one are left out."""
    found = [main_grad_of(param) for param in module.parameters()]
    return [main_grad for main_grad in found if main_grad is not None]


def _without_communication(x: Tensor) -> tuple[Tensor, Pending]:
    return x, NOTHING


class DeferredWeightGradient(NamedTuple):
    """A parameter's gradient, still to be added to its main gradient, and for a matrix still to be computed.

    `x` is the input of the layer, and `grad_y` the gradient of the matrix product's output. `enter(x)` starts the
    communication before the product, such as a gather over tensor-parallel ranks. It returns the input of the product.
    Read it after Pending.wait(). `add(total, grad_y, input, overwrite)` computes the gradient and adds it to `total`,
    fp32 of the parameter's shape. With `overwrite` the values of `total` count as zero.

    `add_in_parts`, if there is one, does as `add`, and yields between its parts.

    For a gradient computed by autograd, `grad_y` and `x` are both this gradient.
    """

    main_grad: MainGrad
    grad_y: Tensor
    x: Tensor
    add: Callable[[Tensor, Tensor, Tensor, bool], None]
    enter: Callable[[Tensor], tuple[Tensor, Pending]] = _without_communication
    add_in_parts: Callable[[Tensor, Tensor, Tensor, bool], Iterator[None]] | None = None

    def add_or_defer(self, meanwhile: "WeightGradientQueue | None" = None) -> None:
        """Append this gradient to the queue open on the main gradient. If there is none, append it to `meanwhile`, and
        without that add it now."""
        queue = meanwhile if self.main_grad.queue is None else self.main_grad.queue
        if queue is None:
            self.enter_and_add()
        else:
            queue.append(self)

    def enter_and_add(self) -> None:
        """Wait for the input of the product, and add this gradient to the main gradient."""
        product_input, entering = self.enter(self.x)
        entering.wait()
        self.add_now(product_input)

    def add_now(self, product_input: Tensor) -> None:
        """Add this gradient to the main gradient. `product_input` is what `enter` returned."""
        # `is_stale` is read here and not in I: between I and W another micro-batch may have added the first gradient.
        self.add(self.main_grad.tensor, self.grad_y, product_input, self.main_grad.is_stale)
        self.main_grad.note_added()


class WeightGradientQueue:
    """The weight gradients left by the I of one micro-batch on one stage to its W.

    `run` adds them in the order of a B. So if all W run in the order of their I, the sums have the same bits as with B.
    """

    def __init__(self) -> None:
        self._entries: deque[DeferredWeightGradient] = deque()

    @contextmanager
    def open(self, main_grads: Sequence[MainGrad]) -> Iterator[None]:
        """A context in which layers append the gradients of the parameters with these main gradients to this queue."""
        for main_grad in main_grads:
            main_grad.queue = self
        try:
            yield
        finally:
            for main_grad in main_grads:
                main_grad.queue = None

    def append(self, entry: DeferredWeightGradient) -> None:
        # The tensor that backward unpacks refers to its graph. Detached, it does not keep the graph in memory.
        self._entries.append(entry._replace(x=entry.x.detach()))

    @property
    def nbytes(self) -> int:
        """Bytes kept for `run`. A storage shared by several tensors is counted once."""
        return sum(self.nbytes_of_storages().values())

    def nbytes_of_storages(self) -> dict[int, int]:
        """The bytes of each storage kept for `run`, by the address of torch's object (`_cdata`)."""
        found: dict[int, int] = {}
        for entry in self._entries:
            for x in (entry.grad_y, entry.x):
                storage = x.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        return found

    def run(self) -> None:
        """Compute and add the gradients. The tensors of each are freed when it has been added."""
        begun = self._begin_next()
        while begun is not None:
            entry, product_input, entering = begun
            # The communication of the next gradient runs during the product of this one.
            begun = self._begin_next()
            entering.wait()
            entry.add_now(product_input)

    def _begin_next(self) -> tuple[DeferredWeightGradient, Tensor, Pending] | None:
        """Start the communication of the next weight gradient.

        Returns (weight gradient, input of its product, what to wait for before reading the input). None if none is
        left.
        """
        if not self._entries:
            return None
        entry = self._entries.popleft()
        product_input, entering = entry.enter(entry.x)
        return entry, product_input, entering


def is_deferred(main_grad: MainGrad | None) -> bool:
    """Whether the current backward pass defers the weight gradient of the parameter with this main gradient."""
    return main_grad is not None and main_grad.queue is not None
