"""Sums each gradient over the micro-batches of a step, in one flat fp32 buffer."""

from collections.abc import Callable
from functools import partial

from megapar_kernels.dispatch import GradientQueue, main_grad_of
from torch import Tensor, nn

from megapar.data_parallel.layout import FlatLayout, Slot
from megapar.linear.main_grad import DeferredWeightGradient


class MainGradView:
    """A parameter's `main_grad` (`megapar_kernels.dispatch.MainGrad`). `tensor` is a view of the flat gradients."""

    def __init__(self, tensor: Tensor, on_added: Callable[[], None]):
        self.tensor = tensor
        self.queue: GradientQueue | None = None
        self.is_stale = False  # its values are those of the step before: the first gradient overwrites them
        self._on_added = on_added

    def note_added(self) -> None:
        self.is_stale = False
        self._on_added()

    def add(self, grad: Tensor) -> None:
        DeferredWeightGradient(self, grad, grad, _add).add_or_defer()

    def zero_if_stale(self) -> None:
        """Set `tensor` to zero if no gradient has been added in this step."""
        if self.is_stale:
            self.tensor.zero_()
            self.is_stale = False


def _add(total: Tensor, grad: Tensor, same: Tensor, overwrite: bool) -> None:
    """Add a gradient already computed by autograd."""
    if overwrite:
        total.copy_(grad)
    else:
        total.add_(grad)


def make_main_grads(layout: FlatLayout, flat: Tensor, on_added: Callable[[int], None]) -> list[MainGradView]:
    """Attach a `main_grad` to each parameter: a view of `flat`, the flat fp32 gradients of `layout`.

    Returns the main_grad of each slot. `on_added` is called with the index of the slot after each addition to it.
    """
    main_grads = []
    for index, slot in enumerate(layout.slots):
        main_grad = MainGradView(view_of_slot(flat, slot, 0), partial(on_added, index))
        attach(main_grad, slot.param)
        main_grads.append(main_grad)
    return main_grads


def view_of_slot(flat: Tensor, slot: Slot, offset: int) -> Tensor:
    """The view of a slot's parameter in `flat`, a 1-D buffer beginning at the element `offset` of the layout."""
    return flat[slot.start - offset : slot.stop - offset].view(slot.param.shape)


def zero_padding(flat: Tensor, slot: Slot, offset: int) -> None:
    """Set the padding behind a slot to zero, because it counts in norms. `offset` is as in `view_of_slot`."""
    flat[slot.stop - offset : slot.end - offset].zero_()


def attach(main_grad: MainGradView, param: nn.Parameter) -> None:
    """Make `main_grad` that of `param`. A gradient left by autograd in `.grad` is added to it too."""
    param.main_grad = main_grad  # type: ignore[attr-defined]
    param.register_post_accumulate_grad_hook(_move_grad)


def _move_grad(param: Tensor) -> None:
    """Add `.grad` to the main gradient and free it. autograd calls this after each accumulation into `.grad`."""
    main_grad = main_grad_of(param)
    assert main_grad is not None
    if param.grad is not None:  # None if the layer has added its gradient itself
        main_grad.add(param.grad)
        param.grad = None
