"""What an optimizer keeps for each parameter besides the main weights (`StateTensor`), and a part of it (`StateSlice`).

A checkpoint is made of slices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megapar_kernels.rounding import join, split
from torch import Tensor

from megapar.declare.params import MAIN, ParamSpec


@dataclass(frozen=True)
class StateTensor:
    """A tensor kept by an optimizer for every parameter, with as many elements as the parameter.

    `initial` is the value of each element before the first update. Padding has it too. A checkpoint with a negative
    value of a `nonnegative` tensor is damaged.
    """

    name: str
    dtype: torch.dtype = torch.float32
    initial: float = 0.0
    nonnegative: bool = False


@dataclass(frozen=True)
class StateSlice:
    """Flat elements [start, stop) of a local parameter, and the optimizer state of these elements on this rank.

    `tensors` are 1-D. A checkpoint names each of them by its key, a dot and the name of the piece: main.norm.weight.
    `states` declares those besides the main weights, which `optimizer` keeps.

    With an int16 `remainder`, the main weights in `tensors` are the bf16 parameters, and the two together are fp32
    (`megapar_kernels.rounding.split`). So read and write them by `values` and `assign`.
    """

    param: Tensor
    spec: ParamSpec
    start: int
    stop: int
    tensors: Mapping[str, Tensor]
    states: Sequence[StateTensor] = ()
    optimizer: str = ""
    remainder: Tensor | None = None

    @property
    def main(self) -> Tensor:
        """The fp32 weights that the optimizer updates. Those with a remainder are copies."""
        return self.values(MAIN)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `values`."""
        if name == MAIN and self.remainder is not None:
            return torch.float32
        return self.tensors[name].dtype

    def values(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """The elements [first, last) of a tensor, counted from `start`: a view, or a copy of joined main weights."""
        part = slice(first, last)
        flat = self.tensors[name].detach()[part]
        if name == MAIN and self.remainder is not None:
            return join(flat, self.remainder[part])
        return flat

    def assign(self, name: str, first: int, values: Tensor) -> None:
        """Put 1-D `values` in the place of those from `first` on."""
        part = slice(first, first + values.numel())
        flat = self.tensors[name].detach()[part]
        if name == MAIN and self.remainder is not None:
            upper, lower = split(values.to(flat.device, torch.float32))
            flat.copy_(upper)
            self.remainder[part] = lower
        else:
            flat.copy_(values)

    def parts(self) -> Iterator[Tensor]:
        """Yield every tensor in memory."""
        yield from self.tensors.values()
        if self.remainder is not None:
            yield self.remainder
