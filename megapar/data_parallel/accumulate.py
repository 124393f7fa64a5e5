"""Where a gradient is added: fp32 sums over the micro-batches of a step, in one flat buffer."""

from collections.abc import Callable
from functools import partial

import torch
from megapar_kernels import apex
from megapar_kernels.launch import Implementation, main_grad_of
from torch import Tensor

from megapar.data_parallel.layout import FlatLayout


class MainGrad:
    """Where a parameter's gradient is summed in fp32: a view of the flat gradients, set as `param.main_grad`.

    Layers that compute their weight gradient themselves add it here with `add_outer` or `add_rows`; for all others a
    hook calls `add`. `on_added` runs after each addition. `impl` is the implementation of `add_outer` on 16-bit inputs:
    torch or apex.
    """

    def __init__(self, view: Tensor, on_added: Callable[[], None], impl: Implementation = "torch"):
        self.view = view
        self._on_added = on_added
        self._impl = impl

    def add(self, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape and any dtype."""
        self.view.add_(grad)
        self._on_added()

    def add_outer(self, grad_2d: Tensor, x_2d: Tensor, *, more: bool = False) -> None:
        """Add grad_2d^T @ x_2d ([tokens, out] and [tokens, in] to [out, in]); `more` of the same addition follows."""
        if grad_2d.dtype == torch.float32:
            self.view.addmm_(grad_2d.t(), x_2d)
        elif self._impl == "apex":
            apex.add_outer(self.view, grad_2d, x_2d)
        elif grad_2d.is_cuda:
            torch.addmm(self.view, grad_2d.t(), x_2d, out_dtype=torch.float32, out=self.view)
        else:
            self.view.addmm_(grad_2d.t().float(), x_2d.float())
        if not more:
            self._on_added()

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add `rows` [n, in] to the rows numbered `ids` [n]; an id may occur often."""
        self.view.index_add_(0, ids, rows.float())
        self._on_added()


def accumulate(
    layout: FlatLayout, device: torch.device, on_added: Callable[[int], None], impl: Implementation = "torch"
) -> Tensor:
    """Make the flat fp32 gradients of `layout`, zero, and let each parameter add to its place in them.

    Every parameter gets `main_grad`; what autograd leaves in `.grad` is moved there. `on_added` is called with the
    number of a slot after each addition to it.
    """
    flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
    for index, slot in enumerate(layout.slots):
        view = flat[slot.start : slot.stop].view(slot.param.shape)
        slot.param.main_grad = MainGrad(view, partial(on_added, index), impl)  # type: ignore[attr-defined]
        slot.param.register_post_accumulate_grad_hook(_move_grad)
    return flat


def _move_grad(param: Tensor) -> None:
    main_grad = main_grad_of(param)
    assert main_grad is not None
    if param.grad is not None:  # None where the layer has added its gradient itself
        main_grad.add(param.grad)
        param.grad = None
