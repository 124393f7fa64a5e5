"""Where the gradient of a parameter is added: to an fp32 sum over micro-batches, now or later.

A pipeline schedule may run a backward pass in two halves, I and W (`megapar.pipeline.schedules.Action`). In I, layers
put off the gradients of matrices to a `WeightGradientQueue`. W runs this queue.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from megapar.comm import Pending


class MainGrad(Protocol):
    """The fp32 sum of a parameter's gradients over the micro-batches. It is the parameter's attribute `main_grad`.

    A layer that computes a weight gradient itself adds it to `tensor`, which has the shape of the parameter. After each
    addition it calls `note_added`. A parameter that is used several times gets several additions. The layer returns
    None to autograd, so that the gradient is not added a second time.

    The first addition of a step overwrites: while `is_stale` is True, `tensor` holds values of an earlier step, which
    count as zero. `note_added` makes it False.

    While `queue` is not None, a gradient is appended to it and not added (`WeightGradient.add_or_put_off`). That of a
    matrix is not even computed. Those of norms and biases, which cost little, are kept for W.

    Read the attribute in the forward pass. Under activation checkpointing, backward unpacks another tensor, which has
    no attributes.
    """

    tensor: Tensor
    is_stale: bool
    queue: "WeightGradientQueue | None"

    def note_added(self) -> None:
        """Note that a gradient has been added to `tensor`, or has overwritten it if it was stale."""

    def add(self, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape and any dtype, now or in W."""


def main_grad_of(param: Tensor) -> MainGrad | None:
    """The `main_grad` of `param`. None if it has none. Its gradient then goes to autograd's .grad."""
    return getattr(param, "main_grad", None)


def main_grads(module: nn.Module) -> list[MainGrad]:
    """The main gradients of a module's parameters. A parameter without one has no place in the list."""
    found = [main_grad_of(param) for param in module.parameters()]
    return [main_grad for main_grad in found if main_grad is not None]


def _without_communication(x: Tensor) -> tuple[Tensor, Pending]:
    return x, Pending()


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a parameter, which is still to be computed or added.

    `x` is the input of the layer, and `grad_y` the gradient of the product's output. `enter(x)` starts the
    communication before the product, and returns its input, which may be read after Pending.wait().
    `add(total, grad_y, input, overwrite)` computes the gradient and adds it to `total`, fp32 of the parameter's shape.
    With `overwrite` the values of `total` count as zero. A gradient that autograd has computed is both `grad_y` and
    `x`.
    """

    main_grad: MainGrad
    grad_y: Tensor
    x: Tensor
    add: Callable[[Tensor, Tensor, Tensor, bool], None]
    enter: Callable[[Tensor], tuple[Tensor, Pending]] = _without_communication

    def add_or_put_off(self) -> None:
        """Add it to the main gradient now, or append it to the queue that is open on the main gradient."""
        if self.main_grad.queue is None:
            entered, entering = self.enter(self.x)
            entering.wait()
            self.add_now(entered)
        else:
            self.main_grad.queue.append(self)

    def add_now(self, entered: Tensor) -> None:
        """Add it to the main gradient, given the input of the product."""
        # `is_stale` is read here and not in I: between I and W another micro-batch may have added the first gradient.
        self.add(self.main_grad.tensor, self.grad_y, entered, self.main_grad.is_stale)
        self.main_grad.note_added()


class WeightGradientQueue:
    """The weight gradients that the I of one micro-batch on one stage leaves to its W.

    `run` adds them in the order in which a backward pass in one piece would. So if the W of all micro-batches run in
    the order of their I, the sums have the same bits.
    """

    def __init__(self) -> None:
        self._entries: deque[WeightGradient] = deque()

    @contextmanager
    def open(self, main_grads: Sequence[MainGrad]) -> Iterator[None]:
        """Within this context, layers put off the gradients of the parameters of these main gradients to this queue."""
        for main_grad in main_grads:
            main_grad.queue = self
        try:
            yield
        finally:
            for main_grad in main_grads:
                main_grad.queue = None

    def append(self, entry: WeightGradient) -> None:
        # Detached: the tensor that backward unpacks still knows the graph behind it, which would stay in memory.
        self._entries.append(replace(entry, x=entry.x.detach()))

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for `run`. A storage that several tensors share is counted once."""
        storages = [x.untyped_storage() for entry in self._entries for x in (entry.grad_y, entry.x)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Compute and add the gradients. What each of them needs is freed when it has been added."""
        begun = self._begin_next()
        while begun is not None:
            entry, entered, entering = begun
            # The next input is gathered during this product.
            begun = self._begin_next()
            entering.wait()
            entry.add_now(entered)

    def _begin_next(self) -> tuple[WeightGradient, Tensor, Pending] | None:
        """Let the input of the next product enter. Returns (weight gradient, input of its product, what to wait for).

        Returns None if there is none left.
        """
        if not self._entries:
            return None
        entry = self._entries.popleft()
        entered, entering = entry.enter(entry.x)
        return entry, entered, entering


def is_put_off(main_grad: MainGrad | None) -> bool:
    """Whether the backward pass that runs puts off the weight gradients of this parameter."""
    return main_grad is not None and main_grad.queue is not None
