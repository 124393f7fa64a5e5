"""Bytes kept by autograd, counted in another way than `megapar.observe.kept` does."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def kept_for_backward(forward: Callable[[], object], without: Iterable[Tensor]) -> int:
    """Run `forward()`; returns the bytes of the storages kept by autograd for its backward pass.

    The storages of the tensors `without` are not counted. A storage of several tensors is counted once.
    """
    known = {x.untyped_storage()._cdata for x in without}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    return sum(storage.nbytes() for storage in kept.values())
