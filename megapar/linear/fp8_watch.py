"""What FP8 loses in a watched step, by product (`log.fp8_every`): shares of numbers, and the noise of a sample.

Numbers are counted where they are converted: both of their forms are at hand there alone. Sums stay on the device.
Ranks add them up along with the gradient norm, and the host reads them with the loss.

    counted      numbers that are not zero: all, and those with a code of zero, a denormal code, and the largest code
    of           inputs x, the weight, and gradients of outputs, each once: a recomputed pass counts nothing
    sample       rows of x in the first micro-batch of a rank that has rows, times the rank's weight
    its noise    the product of the codes minus that of the unconverted numbers

No number is clipped: scales are chosen by the largest magnitude of a group. So the largest code, 448, is no fault.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from megapar_kernels.quantize import Quantized, restore_blocks
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.linear.products import MatrixProducts, as_2d

TENSORS = ("x", "weight", "gradient")
"""What is converted: inputs, the weight, and gradients of outputs."""

SHARES = ("flushed", "denormal", "largest")
"""Of the numbers of a tensor that are not zero: those with a code of zero, a denormal code, and the largest code."""

SAMPLED_ROWS = 128
"""Rows of x in a sampled product."""

_COUNTS = 1 + len(SHARES)
_COLUMNS = len(TENSORS) * _COUNTS + 2  # the last two are the squares of a sampled product, and of its noise
_BLOCK = 1 << 24  # numbers of a tensor that are counted at once: what is computed of them takes a few bytes each
_DIGITS = 4
_MAGNITUDE, _LARGEST, _NORMAL = 0x7F, 0x7E, 0x08  # bits of a code without its sign, 448, and the least normal number


class Products(Protocol):
    """What a sampled product is computed by."""

    @property
    def plain(self) -> MatrixProducts: ...

    def forward(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor: ...


class ProductWatch:
    """Counts the numbers of one product of this rank in watched steps. Between them each method does nothing.

    `names` are the matrices of the product, such as q, k and v of a layer.
    """

    def __init__(self, names: Sequence[str]):
        self.name = _joined(names)
        self._sums: Tensor | None = None  # fp64 [_COLUMNS], in a watched step
        self._sample: tuple[Tensor, Tensor] | None = None  # rows of x, and their codes, until the weight is at hand
        self._has_sampled = False
        self._weights: set[tuple[int, torch.Size]] = set()  # parts of the weight that are counted already

    def begin(self, device: torch.device) -> None:
        """Begin to count."""
        self._sums = torch.zeros(_COLUMNS, dtype=torch.float64, device=device)
        self._has_sampled = False
        self._weights.clear()

    def end(self) -> Tensor:
        """Return the sums since `begin`, fp64, and count no more."""
        sums = self._sums
        assert sums is not None, "ProductWatch.end() came before begin()"
        self._sums = self._sample = None
        return sums

    @torch.no_grad()
    def note_input(self, x: Tensor, codes: Tensor) -> None:
        """Count x [..., i] with its codes, packed rows. A sample of its rows waits for the weight."""
        if self._sums is None or recompute.is_again():
            return
        self._add("x", x, codes[..., : x.shape[-1]])
        if not self._has_sampled and x.numel():
            self._has_sampled = True
            every = max(1, x[..., 0].numel() // SAMPLED_ROWS)
            rows, of_codes = (as_2d(part)[::every][:SAMPLED_ROWS].clone() for part in (x, codes))
            self._sample = rows, of_codes

    @torch.no_grad()
    def note_gradient(self, grad_y: Tensor, codes: Tensor) -> None:
        """Count the gradient [..., o] of the product's output with its codes, packed rows."""
        if self._sums is not None:
            self._add("gradient", grad_y, codes[..., : grad_y.shape[-1]])

    @torch.no_grad()
    def note_weight(self, products: Products, weight: Tensor | None, converted: Quantized) -> None:
        """Count a weight [o, i], or one of experts [e, o, i], the first time, and multiply the sampled rows by it.

        Of experts the rows meet the first one of this rank. Where ZeRO-3 has gathered codes alone, `weight` is None:
        nothing is counted, and the noise of a product is that of its input.
        """
        if self._sums is None:
            return
        if weight is not None:
            part = int(weight.storage_offset()), weight.shape
            if part not in self._weights:
                self._weights.add(part)
                self._add("weight", weight, converted.codes)
        if self._sample is not None:
            (x, codes), self._sample = self._sample, None
            is_matrix = converted.codes.dim() == 2
            matrix_codes = converted if is_matrix else converted[0]
            if weight is None:
                weight, is_matrix = restore_blocks(matrix_codes, x.dtype), True
            matrix = weight if is_matrix else weight[0]
            exact = products.plain.forward(x, matrix, None).double()
            noise = products.forward(codes, matrix_codes, None).double() - exact
            self._sums[-2:] += torch.stack([exact.square().sum(), noise.square().sum()])

    def _add(self, tensor: str, numbers: Tensor, codes: Tensor) -> None:
        assert self._sums is not None
        first = TENSORS.index(tensor) * _COUNTS
        self._sums[first : first + _COUNTS] += _counts(numbers, codes)


def _joined(names: Sequence[str]) -> str:
    """The name of a product, such as layers.0.attention.q|k|v."""
    of_layer = names[0].rpartition(".")[0]
    return f"{of_layer}." + "|".join(name.rpartition(".")[2] for name in names)


def _counts(numbers: Tensor, codes: Tensor) -> Tensor:
    """How many numbers [..., i] are not zero, and of these how many have codes of SHARES: int64 [_COUNTS]."""
    total = torch.zeros(_COUNTS, dtype=torch.int64, device=numbers.device)
    step = max(1, _BLOCK // numbers.shape[-1])
    for x, c in zip(as_2d(numbers).split(step), as_2d(codes).split(step), strict=True):
        magnitude = c.view(torch.uint8) & _MAGNITUDE
        is_number, is_zero = x != 0, magnitude == 0
        found = is_number, is_number & is_zero, ~is_zero & (magnitude < _NORMAL), magnitude == _LARGEST
        total += torch.stack([each.sum() for each in found])
    return total


def watches_of(stages: Iterable[nn.Module]) -> list[ProductWatch]:
    """Return the watches of all products of `stages`, in their order. Layers have products as attributes."""
    modules = (module for stage in stages for module in stage.modules())
    found = (getattr(value, "watch", None) for module in modules for value in vars(module).values())
    return [watch for watch in found if isinstance(watch, ProductWatch)]


class StepWatch:
    """The watched products of this rank's `stages` in one step. `names` are those of all ranks, in one order."""

    def __init__(self, stages: Iterable[nn.Module], names: Sequence[str], device: torch.device):
        self._table = torch.zeros(len(names), _COLUMNS, dtype=torch.float64, device=device)
        self._row = {name: row for row, name in enumerate(names)}
        self._watches = watches_of(stages)
        for watch in self._watches:
            watch.begin(device)

    def end(self) -> Tensor:
        """Return this rank's sums, fp64 1-D: the sum over all ranks is what `rates` takes. Nothing is counted on."""
        for watch in self._watches:
            self._table[self._row[watch.name]] += watch.end()
        return self._table.flatten()


def rates(sums: Tensor) -> Tensor:
    """Return what a step tells of each product, fp32 1-D, from the sums over all ranks: its shares, and its decibels.

    Replicas of a tensor are counted by each of the ranks that have it, and leave its shares as they are.
    """
    table = sums.view(-1, _COLUMNS)
    counts = table[:, :-2].unflatten(1, (len(TENSORS), _COUNTS))
    shares = counts[..., 1:] / counts[..., :1]
    decibels = 10.0 * (table[:, -2] / table[:, -1]).log10()
    return torch.cat([shares.flatten(1), decibels[:, None]], dim=1).float().flatten()


def by_product(names: Sequence[str], numbers: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the `rates` of each product by its name, as a line of metrics.jsonl has them. None is what nobody knows.

    That is a share of no numbers, and decibels without noise.
    """
    values = [float(f"{x:.{_DIGITS}g}") if math.isfinite(x) else None for x in numbers]
    columns = len(TENSORS) * len(SHARES) + 1
    found: dict[str, dict[str, Any]] = {}
    for row, name in enumerate(names):
        *shares, decibels = values[row * columns : (row + 1) * columns]
        found[name] = {"decibels": decibels}
        for index, tensor in enumerate(TENSORS):
            of_tensor = shares[index * len(SHARES) : (index + 1) * len(SHARES)]
            found[name][tensor] = dict(zip(SHARES, of_tensor, strict=True))
    return found
