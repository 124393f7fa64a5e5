"""Between a layout's local parameters and their logical tensors.

Ranks call `held` and return its list; the parent calls `assemble` on all of them. `fill` is the inverse.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megapar.context import ParallelContext
from megapar.params import Piece, spec_of


@dataclass(frozen=True)
class Held:
    """One rank's part of a logical tensor. `partial`: the tensor is the sum of the ranks' parts of it, else these are
    equal. Ranks of an axis of replicas (`ParamSpec.grad_axis`) are `replica`s of each other."""

    piece: Piece
    values: Tensor
    partial: bool
    replica: int


def weights(param: nn.Parameter) -> Tensor:
    return param.detach()


def gradients(param: nn.Parameter) -> Tensor:
    """What autograd left in .grad."""
    assert param.grad is not None
    return param.grad


def main_gradients(param: nn.Parameter) -> Tensor | None:
    """What lies in the gradient buffer; nothing of a frozen parameter."""
    return param.main_grad.tensor if param.requires_grad else None  # type: ignore[attr-defined]


def unique_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(param): param for module in modules for param in module.parameters()}.values())


def held(
    modules: Iterable[nn.Module],
    ctx: ParallelContext,
    values: Callable[[nn.Parameter], Tensor | None] = weights,
    *,
    unsummed: bool = False,
) -> list[Held]:
    """This rank's part of every logical tensor, for `assemble`; `values` picks weights or gradients, or None of it.

    `unsummed`: the values are gradients before the sums over tp and over tied ends in their specs. Raises
    AssertionError if a padding row is not zero.
    """
    parts = []
    for param in unique_parameters(modules):
        if not param.numel():  # this rank holds none of the experts
            continue
        found = values(param)
        if found is None:
            continue
        spec = spec_of(param)
        flat = found.reshape(-1)
        last = 0
        for piece, first, last in spec.segments():
            partial = unsummed and any(axis.size > 1 for axis in piece.partial)
            parts.append(
                Held(
                    _without_axes(piece), flat[first:last].view(piece.local_shape).clone(), partial, spec.grad_axis.rank
                )
            )
        assert not flat[last:].any(), f"{spec.name}: padding is not zero"
    return parts


def _without_axes(piece: Piece) -> Piece:
    """To be sent to the test's process: process groups stay where they are."""
    return replace(piece, same_on=(), partial=())


def assemble(ranks: Sequence[Sequence[Held]]) -> dict[str, Tensor]:
    """Logical tensors by name, out of what every rank returned from `held`.

    Raises AssertionError unless, in every replica, owned ranges are disjoint and cover the tensor, copies are bitwise
    equal, and all replicas agree bitwise.
    """
    parts: dict[tuple[str, int], list[Held]] = {}
    for part in (part for rank in ranks for part in rank):
        parts.setdefault((part.piece.name, part.replica), []).append(part)
    tensors: dict[str, Tensor] = {}
    for (name, replica), found in parts.items():
        tensor = _assemble_one(name, found)
        if not torch.equal(tensors.setdefault(name, tensor), tensor):
            raise AssertionError(f"{name}: replica {replica} differs from the first")
    return tensors


def _assemble_one(name: str, found: Sequence[Held]) -> Tensor:
    shape = found[0].piece.shape
    partial = found[0].partial
    tensor = found[0].values.new_zeros(shape)
    owners = torch.zeros(shape, dtype=torch.int)
    written = torch.zeros(shape, dtype=torch.bool)
    for part in found:
        piece = part.piece
        assert (piece.shape, part.partial) == (shape, partial), f"{name}: ranks disagree on its spec"
        place = tensor[piece.held.slices]
        seen = written[piece.held.slices]
        if partial:
            place += part.values
        else:
            assert torch.equal(place[seen], part.values[seen]), f"{name}: copies differ"
            place.copy_(part.values)
        seen.fill_(True)
        if piece.owned is not None:
            owners[piece.owned.slices] += 1
    assert written.all(), f"{name}: some elements are held by no rank"
    assert (owners == 1).all(), f"{name}: owned ranges overlap or leave gaps"
    return tensor


@torch.no_grad()
def fill(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Set every local parameter to its part of the logical `tensors`, padding rows to zero."""
    for param in unique_parameters(modules):
        param.zero_()
        for piece, first, last in spec_of(param).segments():
            param.view(-1)[first:last].copy_(tensors[piece.name][piece.held.slices].reshape(-1))


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-5) -> None:
    """Names are the same, and every tensor differs from its namesake by a norm of at most `rtol` times the latter's.

    Norms below a thousandth of that of all tensors together count as so much: some gradients are zero but for rounding
    (gpt's key biases, because a softmax is blind to them). Raises AssertionError with the name of every tensor in
    error.
    """
    assert set(actual) == set(expected), sorted(set(actual) ^ set(expected))
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    floor = 1e-3 * math.hypot(*norms.values())
    errors = {name: (actual[name].double() - tensor.double()).norm().item() for name, tensor in expected.items()}
    wrong = {
        name: f"{e:.3g} of {norms[name]:.3g}" for name, e in errors.items() if not e <= rtol * max(norms[name], floor)
    }
    assert not wrong, wrong
