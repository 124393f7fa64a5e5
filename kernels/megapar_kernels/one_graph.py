"""Functions of tensors, each compiled by torch.compile as one graph (`kernels.compile`).

Elementwise ops are compiled, and sums over rows or columns. Matrix products, attention and collectives stay outside:
torch.compile does not fuse a product with what is around it, and on the way ranks communicate and main gradients are
added. Forward and backward are graphs of their own, so no graph has a break, and what is kept for backward is the same.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["OneGraph"]

R = TypeVar("R")


class OneGraph(Generic[R]):
    """`function`, compiled at its first call for each combination of shapes and dtypes.

    `function` must return new tensors, none of its arguments. What torch cannot compile as one graph raises its error,
    and so does a ninth combination (torch._dynamo.config.recompile_limit): nothing falls back to torch's ops. On the
    meta device nothing is compiled. No gradient flows through it.
    """

    def __init__(self, function: Callable[..., R]):
        self.function = function
        self._compiled: Callable[..., R] | None = None

    def __call__(self, *args: Any) -> R:
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return self.function(*args)
        if self._compiled is None:
            # Not when the module is imported: this imports the compiler, which takes seconds. With one thread inductor
            # compiles in this process. Its pool of processes would be one for each rank, and outlive a killed rank.
            one_process: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}
            self._compiled = torch.compile(self.function, fullgraph=True, dynamic=False, options=one_process)
        # Detached, because a tensor with gradient and one without would each be compiled for.
        return self._compiled(*(x.detach() if isinstance(x, Tensor) else x for x in args))
