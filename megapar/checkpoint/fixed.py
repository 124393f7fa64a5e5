"""What a checkpoint holds besides what the optimizer updates: frozen parameters, and buffers that are state."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megapar.checkpoint.format import BUFFER, MAIN
from megapar.params import ParamSpec, StateSlice, spec_of


def fixed_slices(modules: Iterable[nn.Module], *, to_save: bool = False) -> Iterator[StateSlice]:
    """The frozen parameters of `modules`, and their buffers that carry a ParamSpec, each whole and once.

    All replicas hold them. A slice's tensors are views, to be filled by a load. `to_save`: weights are fp32, as a
    checkpoint stores them, so those of a 16-bit model are copies.
    """
    seen: set[int] = set()
    for module in modules:
        for param in module.parameters():
            if not param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                flat = param.detach().view(-1)
                yield _whole(param, spec_of(param), MAIN, flat.to(torch.float32) if to_save else flat)
        for buffer in module.buffers():
            spec = getattr(buffer, "spec", None)
            if spec is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield _whole(buffer, spec, BUFFER, buffer.view(-1))


def _whole(tensor: Tensor, spec: ParamSpec, name: str, flat: Tensor) -> StateSlice:
    return StateSlice(tensor, spec, 0, tensor.numel(), {name: flat})
