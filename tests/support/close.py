"""Two sets of tensors are the same but for rounding."""

import math
from collections.abc import Mapping

from torch import Tensor


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-5, of: str = ""
) -> None:
    """Names are the same, and every tensor differs from its namesake by a norm of at most `rtol` times the latter's.

    Norms below a thousandth of that of all tensors together count as so much: some gradients are zero but for rounding
    (gpt's key biases, because a softmax is blind to them). With `rtol` 0 every number is the same. Raises
    AssertionError with `of` and the name of every tensor in error.
    """
    assert set(actual) == set(expected), sorted(set(actual) ^ set(expected))
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    floor = 1e-3 * math.hypot(*norms.values())
    errors = {name: (actual[name].double() - tensor.double()).norm().item() for name, tensor in expected.items()}
    wrong = {
        name: f"{e:.3g} of {norms[name]:.3g}" for name, e in errors.items() if not e <= rtol * max(norms[name], floor)
    }
    assert not wrong, (of, wrong)
