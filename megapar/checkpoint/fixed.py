"""Tensors of a checkpoint not updated by the optimizer: frozen parameters, and state kept in buffers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megapar.checkpoint.format import BUFFER, TRAINING_STATE
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import MAIN, ParamSpec, spec_of


def fixed_slices(
    modules: Iterable[nn.Module], *, to_save: bool = False, parameters: bool = True
) -> Iterator[StateSlice]:
    """Yield a slice for each frozen parameter of `modules`, and for each buffer with a ParamSpec as its `spec`.

    Each slice covers a whole local tensor, and each tensor occurs once. All replicas hold these tensors. Without
    `parameters` those are left out.
    A slice's tensor is a view, so a load can fill it. With `to_save`, weights are fp32, as a checkpoint stores them.
    Those of a 16-bit model are copies then.
    """
    seen: set[int] = set()
    for module in modules:
        for param in module.parameters() if parameters else ():
            # Modules may share a parameter, and a checkpoint stores each tensor once.
            if not param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                flat = param.detach().view(-1)
                if to_save:
                    flat = flat.to(torch.float32)
                yield _whole(param, spec_of(param), MAIN, flat)
        for buffer in module.buffers():
            spec = getattr(buffer, "spec", None)
            if spec is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                name = TRAINING_STATE if spec.training_state else BUFFER
                yield _whole(buffer, spec, name, buffer.view(-1))


def _whole(tensor: Tensor, spec: ParamSpec, name: str, flat: Tensor) -> StateSlice:
    return StateSlice(tensor, spec, 0, tensor.numel(), {name: flat})
