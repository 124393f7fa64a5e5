"""Functions of tensors, each compiled by torch.compile as one graph (`kernels.compile`).

Elementwise ops are compiled, and sums over rows or columns. Matrix products, attention and collectives stay outside:
torch.compile does not fuse a product with what is around it, and on the way ranks communicate and main gradients are
added. Forward and backward are graphs of their own, so no graph has a break, and what is kept for backward is the same.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["NoGraphError", "OneGraph", "in_one_line"]

R = TypeVar("R")


class NoGraphError(RuntimeError):
    """torch.compile has not made one graph of a function. The message is one line, and torch's error is the cause."""


class OneGraph(Generic[R]):
    """`function`, compiled at its first call for each combination of shapes and dtypes.

    `function` must return new tensors, none of its arguments. What torch cannot compile as one graph raises
    NoGraphError, and so does a ninth combination (torch._dynamo.config.recompile_limit): nothing falls back to torch's
    ops. On the meta device nothing is compiled. No gradient flows through it.
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
        try:
            # Detached, because a tensor with gradient and one without would each be compiled for.
            return self._compiled(*(x.detach() if isinstance(x, Tensor) else x for x in args))
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise self._no_graph(error.__cause__ or error) from error  # its own text has no reason
        except torch._dynamo.exc.TorchDynamoException as error:
            raise self._no_graph(error) from error

    def _no_graph(self, error: BaseException) -> NoGraphError:
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return NoGraphError(
            f"kernels.compile=true: torch.compile cannot make one graph of {name}: {in_one_line(str(error))}; "
            "kernels.compile=false trains with torch's ops"
        )


def in_one_line(text: str) -> str:
    """The reason in a text of torch: its first paragraph, without hints."""
    paragraph = text.strip().partition("\n\n")[0]
    lines = [line.strip() for line in paragraph.splitlines()]
    kept = " ".join(line for line in lines if not line.startswith("Hint:"))
    return kept.replace(" Explanation:", ":", 1).rstrip(".")
