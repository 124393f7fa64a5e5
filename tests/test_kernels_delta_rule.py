"""The gated delta rule by our kernels, interpreted: beside the recurrence, token by token in fp64, by relative norm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_kernels import delta_fused, delta_kernels, first_use, fla
from megapar_kernels.backend import FUSED, Kernels, LinearAttention, select
from megapar_kernels.chunks import CHUNK
from megapar_kernels.delta_rule import NOTHING, delta_rule
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.base.precision import Precision
from megapar.config.options import KernelsConfig
from megapar.system.device import choose_kernels, kernels_of
from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, poisoned, relative_error, strided
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

NAMES = ("o", "the last state", "dq", "dk", "dv", "dg", "dbeta", "the gradient of the state")
# In 16 bits a number is rounded three to six times on its way: as an operand of each product.
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [s, b, n, e] and the last state, token by token."""
    outputs = []
    for t in range(len(q)):
        state = g[t].exp()[..., None] * state
        u = beta[t][..., None] * (v[t] - torch.einsum("bnde,bnd->bne", state, k[t]))
        state = state + k[t][..., None] * u[..., None, :]
        outputs.append(torch.einsum("bnde,bnd->bne", state, q[t]))
    return torch.stack(outputs), state


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs_of(
    shape: tuple[int, int, int], widths: tuple[int, int], decays: int, starts: tuple[int, ...], strength: float
) -> list[Tensor]:
    """q, k, v, g, beta and a state in fp64. Documents of all samples start at `starts`."""
    d, e = widths
    q, k = (torch.nn.functional.normalize(random(*shape, d, seed=i), dim=-1) for i in range(2))
    g = -strength * random(*shape, decays).abs()
    g[list(starts)] = NOTHING
    return [q, k, random(*shape, e), g, 1.6 * random(*shape).sigmoid(), random(*shape[1:], d, e)]


def check(
    shape: tuple[int, int, int] = (70, 1, 2),
    widths: tuple[int, int] = (6, 10),
    decays: int = 1,
    dtype: torch.dtype = torch.float32,
    v_dtype: torch.dtype | None = None,
    starts: tuple[int, ...] = (),
    strength: float = 0.5,
    state: bool = True,
    layout: str = "guarded",
    limit: float | None = None,
) -> None:
    """Check outputs and all gradients on poisoned memory. What kernels write has no guards; what they read has."""
    kinds = [dtype, dtype, v_dtype or dtype, *[torch.float32] * 3]
    inputs = inputs_of(shape, widths, decays, starts, strength)
    low = [x.to(kind).to(DEVICE) for x, kind in zip(inputs, kinds, strict=True)]
    if not state:
        low[-1].zero_()
    exact = [x.double().requires_grad_() for x in low]
    outputs = recurrence(*exact)
    grads = [
        random(*y.shape, seed=9).to(kind).to(DEVICE) for y, kind in zip(outputs, (kinds[2], torch.float32), strict=True)
    ]
    expected = [*outputs, *torch.autograd.grad(outputs, exact, [x.double() for x in grads])]
    placed = [(strided(x) if layout == "strided" else Guarded(x).tensor).requires_grad_() for x in low]
    if not state:
        placed.pop()
    assert delta_fused.serves("triton", *placed[:3], CHUNK)
    with poisoned():
        found = delta_rule(*placed, impl="triton")
        gradients = torch.autograd.grad(
            found, placed, [strided(grads[0]) if layout == "strided" else grads[0], grads[1]]
        )
    values = [*found, *gradients]
    for name, mine, right in zip(NAMES[: len(values)], values, expected[: len(values)], strict=True):
        error = relative_error(mine, right)
        assert error < (limit or LIMITS[dtype]), (name, error)
    assert [x.dtype for x in values] == [kinds[2], torch.float32, *kinds[: len(placed)]]


HALF = torch.bfloat16
# Decays of a chunk that sum to -2,000 are wrong by 1e-4 of themselves (`delta_kernels`).
CASES: dict[str, dict[str, Any]] = {
    "documents, a decay for each channel": {"shape": (70, 2, 1), "decays": 6, "starts": (3, 20, 21, 64)},
    "bf16 by head": {"dtype": HALF, "layout": "strided", "starts": (0, 30)},
    "bf16 by channel, without a state": {"shape": (66, 1, 1), "dtype": HALF, "decays": 6, "state": False},
    "documents by head": {"shape": (70, 2, 1), "starts": (0, 5, 20, 21, 64)},
    "strong decays by head": {"strength": 30.0, "limit": 1e-4},
    "strong decays by channel": {"strength": 30.0, "decays": 6, "limit": 1e-4},
    "beyond what fp32 has": {"strength": 300.0, "decays": 6, "limit": 1e-4},
    "no decay": {"strength": 0.0, "shape": (130, 1, 1)},
    "one token": {"shape": (1, 2, 1), "decays": 6},
    "a whole chunk": {"shape": (64, 1, 1)},
    "four chunks": {"shape": (200, 1, 1), "decays": 6, "starts": (100,)},
    "several tiles of channels": {"shape": (70, 1, 1), "widths": (80, 130), "decays": 80, "layout": "strided"},
    "several tiles of channels by head": {"shape": (70, 1, 1), "widths": (130, 80)},
    "bf16, width 128": {"shape": (130, 1, 1), "widths": (128, 128), "decays": 128, "dtype": HALF},
    "bf16, width 256": {"shape": (70, 1, 1), "widths": (256, 40), "dtype": HALF},
    "fp16": {"dtype": torch.float16, "widths": (16, 16), "decays": 16},
    "values of fp32 beside keys of bf16": {"dtype": HALF, "v_dtype": torch.float32, "widths": (16, 40)},
}


@pytest.mark.parametrize("name", slow_but(range(3), CASES))
def test_it_is_the_recurrence(name: str) -> None:
    check(**CASES[name])


def over_three(maps: Tensor, states: Tensor, backwards: bool) -> Tensor:
    """Pass states over three runs of one sample."""
    state, found = torch.zeros_like(states[0]), torch.empty_like(states)
    for run in (2, 1, 0) if backwards else (0, 1, 2):
        found[run] = state
        state = maps[run] @ state + states[run]
    return found


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("decays", slow_but([1], [1, 6]))
def test_runs_that_pass_states_are_one_sample(decays: int, impl: Any) -> None:
    """With a start in the second run, and at the start of the third."""
    *inputs, _ = inputs_of((3 * 70, 1, 2), (6, 10), decays, (100, 140) if decays == 6 else (), 0.1)
    do = random(210, 1, 2, 10)

    def outputs_and_gradients(kind: torch.dtype, runs: bool) -> list[Tensor]:
        given = [x.to(kind).to(DEVICE).requires_grad_() for x in inputs]
        if runs:
            cut = [torch.cat(x.chunk(3), dim=1) for x in given]
            o = torch.cat(delta_rule(*cut, impl=impl, across=over_three)[0].chunk(3, dim=1))
        else:
            o = delta_rule(*given)[0]
        return [o, *torch.autograd.grad(o, given, do.to(kind).to(DEVICE))]

    found, exact = outputs_and_gradients(torch.float32, True), outputs_and_gradients(torch.float64, False)
    for name, mine, right in zip((NAMES[0], *NAMES[2:7]), found, exact, strict=True):
        assert relative_error(mine, right) < LIMITS[torch.float32], name


def test_what_the_kernels_do_not_serve_is_torchs() -> None:
    q, k, v, g, beta, state = inputs_of((3, 1, 1), (4, 4), 1, (), 0.5)
    assert not delta_fused.serves("triton", q, k, v, CHUNK)  # fp64
    low = [x.float() for x in (q, k, v)]
    assert delta_fused.serves("triton", *low, CHUNK) == (DEVICE.type == "cpu")
    assert not delta_fused.serves("triton", *low, 1)
    assert not delta_fused.serves("torch", *low, CHUNK)
    wide = [torch.zeros(3, 1, 1, 300)] * 2
    assert not delta_fused.serves("triton", *wide, low[2], CHUNK)
    found = delta_rule(q, k, v, g, beta, state, impl="triton")
    for mine, right in zip(found, recurrence(q, k, v, g, beta, state), strict=True):
        assert relative_error(mine, right) < 1e-12


def test_a_plan_sees_what_a_gpu_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs alone, and not one state: on the meta device, where kernels stand for those of a GPU."""
    monkeypatch.setattr(delta_fused, "interpreting", lambda: False)
    monkeypatch.setattr("megapar_kernels.dispatch.interpreting", lambda: False)
    low = [x.to("meta") for x in inputs_of((70, 2, 1), (16, 24), 16, (), 0.5)]
    inputs = [x.to(torch.bfloat16 if i < 3 else torch.float32).requires_grad_() for i, x in enumerate(low)]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o, last = delta_rule(*inputs, impl="triton")
    assert [x.shape for x in kept] == [x.shape for x in inputs]
    gradients = torch.autograd.grad([o, last], inputs, [torch.empty_like(o), torch.empty_like(last)])
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]


def test_a_kernel_that_is_wrong_is_refused_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = DEVICE, torch.float32 if DEVICE.type == "cpu" else HALF
    first_use.check_delta_rule(*sizes, (6, 10), 1)
    states = delta_kernels.states_kernel

    class Broken:
        """Runs the kernel, and then leaves the state in front of the second chunk at zero."""

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **named: Any) -> None:
                states[grid](*args, **named)
                args[6][:, 1] = 0.0

            return launch

    monkeypatch.setattr(delta_kernels, "states_kernel", Broken())
    told = (
        r"^kernels.linear_attention=triton: the delta rule with widths 6 and 10 in torch.float32: the norm of output 0 "
    )
    told += r"is [\d.]+, by torch [\d.]+, and the difference .* kernels.linear_attention=torch takes torch's form$"
    with pytest.raises(ValueError, match=told.replace("float32", str(sizes[1])[6:])):
        first_use.check_delta_rule(*sizes, (6, 10), 1)


def test_the_convolution_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = DEVICE, torch.float32
    first_use.check_short_conv(*sizes, 4)
    right = first_use.short_conv

    def wrong(*args: Any, impl: Any) -> Tensor:
        return right(*args, impl=impl) * (1.001 if impl == "triton" else 1.0)

    monkeypatch.setattr(first_use, "short_conv", wrong)
    with pytest.raises(
        ValueError, match=r"the short convolution of width 4 in torch\.float32: the norm of output 0 is"
    ):
        first_use.check_short_conv(*sizes, 4)


CPU, GPU, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


def test_auto_is_what_the_backend_means() -> None:
    assert choose_kernels("auto", CPU).linear_attention == "torch"
    assert choose_kernels("triton", META).linear_attention == FUSED.linear_attention == "triton"
    assert choose_kernels("triton", META, linear_attention="torch") == replace(
        choose_kernels("triton", META), linear_attention="torch"
    )
    assert select("torch", GPU, linear_attention="triton") == Kernels(linear_attention="triton")


def test_what_cannot_compute_linear_attention_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^kernels.linear_attention=fla: needs a GPU, and this rank runs on cpu, or"):
        choose_kernels("auto", CPU, linear_attention="fla")
    with pytest.raises(
        ValueError, match=r"^kernels.linear_attention=fla: flash-linear-attention is not installed; pip"
    ):
        select("auto", GPU, linear_attention="fla")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fla.triton, "__version__", "3.7.0")
    with pytest.raises(ValueError, match=r"refuses Triton 3.7.0 on Hopper .*, or choose auto or torch$"):
        select("auto", GPU, linear_attention="fla")
    for version in ("3.3.1", "3.7.1", "3.9.0"):
        monkeypatch.setattr(fla.triton, "__version__", version)
        assert select("auto", GPU, linear_attention="fla").linear_attention == "fla"
    monkeypatch.setattr("megapar_kernels.backend.interpreting", lambda: False)
    with pytest.raises(ConfigError, match=r"^kernels.linear_attention=triton: needs a GPU, and this rank runs on cpu"):
        choose_kernels("auto", CPU, linear_attention="triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose_kernels("auto", GPU).linear_attention == "torch"
    with pytest.raises(ConfigError, match=r"no tiles for a GPU of compute capability 8.9; choose auto or torch$"):
        choose_kernels("auto", GPU, linear_attention="triton")


@pytest.mark.parametrize("asked", ["triton", "fla"])
def test_kernels_of_16_bits_are_refused_in_a_run_of_fp32(
    asked: LinearAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapar_kernels.fla.unusable", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    told = rf"^kernels.linear_attention={asked}, train.precision=fp32: .* bf16 or fp16, or .* auto or torch$"
    with pytest.raises(ConfigError, match=told):
        kernels_of(KernelsConfig(linear_attention=asked), GPU, "fp32")
    halves: tuple[Precision, ...] = ("bf16", "fp16")
    for precision in halves:
        assert kernels_of(KernelsConfig(linear_attention=asked), GPU, precision).linear_attention == asked
    assert kernels_of(KernelsConfig(), GPU, "fp32").linear_attention == "triton"
    assert kernels_of(KernelsConfig(linear_attention="triton"), META, "fp32").linear_attention == "triton"
