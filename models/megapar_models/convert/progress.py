"""The progress bar of conversions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from torch import Tensor


@contextmanager
def progress(total: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Show a progress bar. The function moves it by one tensor and returns its argument."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting tensors", total=total)

        def advance(values: Tensor) -> Tensor:
            bar.advance(task)
            return values

        yield advance
