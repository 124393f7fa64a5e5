"""Compares what a layout shows with what one process shows, parameter by parameter, beside the noise of rounding.

The rule: a difference may be as large as rounding explains. The noise of a parameter is how far it moves if one process
adds the same numbers in another order: other micro-batches, and matrix products in halves. A layout has still other
orders, and so the norm of a difference may be NOISES times the noise, or ROUNDINGS units of rounding of the dtype,
whichever is more. Units are taken of the tensor's norm, or of SMALLEST of the norm of all tensors together: some
gradients are zero but for rounding.

A token may have nearly the same scores for two experts. It may change its expert by rounding then. In each order other
tokens do. So all experts have the largest noise of any, relative to their norms.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.config.options import Config
from megapar.declare.sharding import model_dtype
from megapar_tools.verify.logical import Assembled
from megapar_tools.verify.run import Shown

NOISES = 5.0
ROUNDINGS = 20.0
SMALLEST = 1e-3


@dataclass(frozen=True)
class Difference:
    """The distance of one tensor of a layout, or of one number such as the loss, from its value in one process.

    `kind` is "initial weight", "gradient", "weight" or, of a number, "value". `step` counts from 1, and is 0 before the
    first.
    `difference`, `noise` and `allowed` are L2 norms. `norm` is what they compare with: the norm of the tensor in one
    process, or SMALLEST of all. `text` names another mistake, such as unequal copies.
    """

    name: str
    kind: str
    step: int
    difference: float
    noise: float
    allowed: float
    norm: float
    text: str = ""

    @property
    def passed(self) -> bool:
        return not self.text and self.difference <= self.allowed  # NaN is not

    @property
    def excess(self) -> float:
        """The difference as a multiple of what is allowed. What has a `text` counts as infinite."""
        if self.text or math.isnan(self.difference):
            return math.inf
        if self.difference == 0.0:
            return 0.0
        if self.allowed == 0.0:
            return math.inf
        return self.difference / self.allowed

    def sentence(self) -> str:
        """What is wrong, for people."""
        moment = self.kind
        if self.step:
            moment += f" of step {self.step}"
        if self.text:
            return f"{self.name}: {moment}: {self.text}"
        return (
            f"{self.name}: {moment} differs by {self.difference:.2g} of {self.norm:.2g}; noise is {self.noise:.1g}, "
            f"allowed {self.allowed:.1g}"
        )


def rounding(config: Config) -> float:
    """One unit of rounding, relative to the value: of the model's dtype, or of gradients on their way."""
    dtypes = (model_dtype(config.train.precision), model_dtype(config.optimizer.grad_reduce_dtype))
    return max(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def compare(layout: Shown, reference: Shown, others: Sequence[Shown], unit: float) -> list[Difference]:
    """Every difference of a layout from one process, in the order of the run.

    `others` are one process again, with its sums in other orders. `unit` comes from `rounding`.
    """
    found = list(_initial(layout.initial, reference.initial))
    for number, (step, expected) in enumerate(zip(layout.steps, reference.steps, strict=True)):
        orders = [other.steps[number] for other in others]
        for name, value in expected.scalars[0].items():
            noise = max(abs(order.scalars[0][name] - value) for order in orders)
            values = [rank.get(name, math.nan) for rank in step.scalars]
            difference = max((abs(other - value) for other in values), key=_nan_last)
            found.append(
                Difference(name, "value", number + 1, difference, noise, _allowed(noise, unit, abs(value)), abs(value))
            )
        gradients = [order.gradients.tensors for order in orders]
        weights = [order.weights.tensors for order in orders]
        found += _tensors(step.gradients, expected.gradients, gradients, unit, "gradient", number + 1)
        found += _tensors(step.weights, expected.weights, weights, unit, "weight", number + 1)
    return found


def _nan_last(value: float) -> float:
    if math.isnan(value):
        return math.inf
    return value


def _allowed(noise: float, unit: float, norm: float) -> float:
    return max(NOISES * noise, ROUNDINGS * unit * norm)


def _initial(layout: Assembled, reference: Assembled) -> Iterator[Difference]:
    """Initial weights are the same bit by bit."""
    for name, difference in distances(layout.tensors, reference.tensors).items():
        norm = _norm(reference.tensors.get(name))
        text = layout.problems.get(name, "") or _missing(name, layout.tensors, reference.tensors)
        yield Difference(name, "initial weight", 0, difference, 0.0, 0.0, norm, text)


def _tensors(
    layout: Assembled,
    reference: Assembled,
    orders: Sequence[Mapping[str, Tensor]],
    unit: float,
    kind: str,
    step: int,
) -> Iterator[Difference]:
    expected = reference.tensors
    norms = {name: _norm(tensor) for name, tensor in expected.items()}
    smallest = SMALLEST * math.hypot(*norms.values())
    norms = {name: max(norm, smallest) for name, norm in norms.items()}
    distances_of_orders = [distances(order, expected) for order in orders]
    noises = {name: max(found[name] for found in distances_of_orders) for name in expected}
    largest = max((noises[name] / norms[name] for name in reference.routed if norms[name]), default=0.0)
    for name in reference.routed:
        noises[name] = largest * norms[name]
    for name, difference in distances(layout.tensors, expected).items():
        norm = norms.get(name, 0.0)
        noise = noises.get(name, 0.0)
        text = layout.problems.get(name, "") or _missing(name, layout.tensors, expected)
        yield Difference(name, kind, step, difference, noise, _allowed(noise, unit, norm), norm, text)


def _missing(name: str, layout: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str:
    if name not in layout:
        return "the layout has none"
    if name not in reference:
        return "the layout has one, and one process has none"
    return ""


def _norm(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    return tensor.double().norm().item()


def distances(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of the difference of each two tensors of one name, in fp64, in the order of `expected`.

    It is infinite if one of them is missing, or has another shape.
    """
    found = {}
    for name in (*expected, *(name for name in actual if name not in expected)):
        left = actual.get(name)
        right = expected.get(name)
        if left is None or right is None or left.shape != right.shape:
            found[name] = math.inf
        else:
            found[name] = (left.double() - right.double()).norm().item()
    return found
