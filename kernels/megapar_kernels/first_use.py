"""Kernels of linear attention beside torch's forms on a small problem: a compiler that gets them wrong is seen at once.

Triton 3.4 to 3.7.0 computed the gated delta rule of other kernels wrongly on Hopper, without an error.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapar_kernels.delta_rule import NOTHING, delta_rule
from megapar_kernels.dispatch import Implementation
from megapar_kernels.short_conv import short_conv

LENGTH, START = 100, 37
"""Positions of the problem, two chunks, and the first of its second document."""
LIMITS = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}
"""The relative norm of a difference: three to ten times what rounding makes."""

Form = Callable[[Implementation, list[Tensor]], Sequence[Tensor]]


def agree(what: str, form: Form, inputs: dict[str, Tensor], limit: float, impl: Implementation = "triton") -> None:
    """Compare all outputs and gradients of `form` by kernels with those by torch.

    Raises ValueError with one line if the norm of a difference is above `limit` of torch's norm, or a NaN is found.
    """
    found = [_values(form, which, inputs) for which in (impl, "torch")]
    for name, right in found[1].items():
        mine = found[0][name]
        error = float((mine - right).norm() / right.norm())
        if not error <= limit:
            raise ValueError(
                f"kernels.linear_attention={impl}: {what}: the norm of {name} is {float(mine.norm()):.6g}, by torch "
                f"{float(right.norm()):.6g}, and the difference {error:.2g} of that (at most {limit:g} is rounding); "
                "this Triton or GPU computes it wrongly, kernels.linear_attention=torch takes torch's form"
            )


def _values(form: Form, impl: Implementation, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs, and the gradients of all inputs, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
    with torch.enable_grad():
        outputs = list(form(impl, leaves))
        grads = [torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in outputs]
        gradients = torch.autograd.grad(outputs, leaves, grads)
    names = [f"output {number}" for number in range(len(outputs))] + [f"the gradient of {name}" for name in inputs]
    return {name: x.detach().double() for name, x in zip(names, (*outputs, *gradients), strict=True)}


def check_delta_rule(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], decays: int, impl: Implementation = "triton"
) -> None:
    """Compare the gated delta rule with `widths` (d, e) and `decays` (1 or d) of a head. Raises ValueError."""
    d, e = widths
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, kind)

    q, k, v = (random(LENGTH, 1, 2, width, kind=dtype) * width**-0.5 for width in (d, d, e))
    g = -random(LENGTH, 1, 2, decays).abs()
    g[START] = NOTHING
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": random(LENGTH, 1, 2).sigmoid(), "the state": random(1, 2, d, e)}

    def form(which: Implementation, x: list[Tensor]) -> Sequence[Tensor]:
        q, k, v, g, beta, state = x
        return delta_rule(q, k, v, g, beta, state, impl=which)

    agree(f"the delta rule with widths {d} and {e} in {dtype}", form, inputs, LIMITS[dtype], impl)


def check_short_conv(device: torch.device, dtype: torch.dtype, width: int, impl: Implementation = "triton") -> None:
    """Compare the short convolution of this width, on enough channels for its kernels. Raises ValueError."""
    draw = torch.Generator().manual_seed(5)
    channels = 64 if device.type == "cpu" else 1 << 14
    place = torch.cat([torch.arange(START), torch.arange(LENGTH - START)]).to(device)[:, None]
    x, before = (torch.randn(rows, 1, channels, generator=draw).to(device, dtype) for rows in (LENGTH, width - 1))
    inputs = {
        "x": x,
        "the weight": torch.randn(channels, 1, width, generator=draw).to(device),
        "what is before": before,
    }

    def form(which: Implementation, x: list[Tensor]) -> Sequence[Tensor]:
        return [short_conv(x[0], x[1], None, x[2] if width > 1 else None, place + width, impl=which)]

    if width == 1:
        del inputs["what is before"]
    agree(f"the short convolution of width {width} in {dtype}", form, inputs, LIMITS[dtype], impl)
