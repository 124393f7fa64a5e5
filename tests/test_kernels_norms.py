"""RMSNorm and LayerNorm, alone and after the residual's addition: forward and backward kernels against fp64."""

from functools import partial

import pytest
import torch
from megapar_kernels import norms
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.declare import context
from megapar.declare.params import ONES, ParamSpec, parameter, shared_piece
from tests.support.flat import flatten
from tests.support.kernel_checks import DEVICE, TOLERANCE, compare, needs_triton, poisoned, relative_error, strided
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

EPS = 1e-5
NORMS = {"rms_norm": norms.rms_norm, "layer_norm": norms.layer_norm}
FUSED = {"add_rms_norm": norms.add_rms_norm, "add_layer_norm": norms.add_layer_norm}


def arguments(name: str, rows: int | tuple[int, ...], columns: int) -> list[Tensor | float]:
    """fp64 arguments of an op, with a mean not near zero; all tensors require a gradient."""
    generator = torch.Generator().manual_seed(columns)
    shape = (rows, columns) if isinstance(rows, int) else (*rows, columns)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5 for _ in range(1 + ("add" in name))]
    tensors += [
        1 + 0.2 * torch.randn(columns, generator=generator, dtype=torch.float64) for _ in range(1 + ("layer" in name))
    ]
    return [*(x.requires_grad_() for x in tensors), EPS]


# 64, 128 columns: several rows a tile; 4,097 rows: a program walks over tiles; 9,000: LayerNorm's backward is wide
SIZES = [(1, 5), (5, 7), (3, 127), (70, 129), (2, 1000), (3, 4096), (2, 9000), (300, 64), (131, 128), (4097, 8)]


@pytest.mark.parametrize("dtype", slow_but([1], [torch.float32, torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_norms_and_their_gradients_are_exact_to_rounding(name: str, dtype: torch.dtype) -> None:
    for rows, columns in SIZES if dtype == torch.float32 else SIZES[3:-1]:
        compare({**NORMS, **FUSED}[name], arguments(name, rows, columns), dtype)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "empty"])
@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_closed_form_of_a_cpu_equals_autograd_of_torchs_norm(name: str, layout: str) -> None:
    """In fp32 on a CPU `_Norm` runs torch's ops. The reference is torch's own norm in fp64."""
    rows = (0,) if layout == "empty" else (7, 33)
    *tensors, eps = arguments(name, rows, 129)
    exact = [t.detach().clone().requires_grad_() for t in tensors if isinstance(t, Tensor)]
    low = [(strided(t.float()) if layout == "strided" else t.float()).detach().requires_grad_() for t in exact]
    x = exact[0] + exact[1] if "add" in name else exact[0]
    weights = exact[2:] if "add" in name else exact[1:]
    norm = nn.functional.layer_norm if "layer" in name else nn.functional.rms_norm
    y = norm(x, (129,), *weights, eps=EPS)
    expected = (y, x) if "add" in name else (y,)
    with poisoned():
        got = {**NORMS, **FUSED}[name](*low, eps, impl="torch")
        got = got if isinstance(got, tuple) else (got,)
        assert got[0].grad_fn.name() == "_NormBackward"
        upstream = [torch.randn(z.shape) for z in got]
        grads = torch.autograd.grad(got, low, upstream)
    exact_grads = torch.autograd.grad(expected, exact, [g.double() for g in upstream])
    for ours, reference in zip((*got, *grads), (*expected, *exact_grads), strict=True):
        assert ours.shape == reference.shape
        assert relative_error(ours, reference) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_closed_form_of_a_cpu_keeps_what_the_kernels_keep(name: str) -> None:
    kept: dict[str, int] = {}
    for impl in ("torch", "triton"):
        device = DEVICE if impl == "triton" else torch.device("cpu")
        tensors = [t for t in arguments(name, 7, 129) if isinstance(t, Tensor)]
        inputs = [t.detach().float().to(device).requires_grad_() for t in tensors]
        storages: dict[int, int] = {}

        def keep(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = {**NORMS, **FUSED}[name](*inputs, EPS, impl=impl)
        kept[impl] = sum(storages.values())
        del outputs
    assert kept["torch"] == kept["triton"]


def test_one_column() -> None:
    """A large eps, lest RMSNorm of one number be its sign; LayerNorm of one number is its bias."""
    compare(norms.rms_norm, [*arguments("rms_norm", 500, 1)[:-1], 0.5], torch.float32)
    x, weight, bias = (t.detach().float().to(DEVICE).requires_grad_() for t in arguments("layer_norm", 5, 1)[:-1])
    y = norms.layer_norm(x, weight, bias, EPS, impl="triton")
    assert torch.equal(y, bias.expand(5, 1))
    grads = torch.autograd.grad(y.sum(), [x, weight, bias])
    assert [g.unique().tolist() for g in grads] == [[0.0], [0.0], [5.0]]


@pytest.mark.parametrize("name", slow_but([0, 3], [*NORMS, *FUSED]))
def test_rows_too_wide_for_registers_are_walked_in_blocks(name: str) -> None:
    """Forward beyond 32,768 columns, backward beyond 8,192."""
    op = {**NORMS, **FUSED}[name]
    for adds in (False, True):
        assert norms.forward_config(32768, adds) is not None
        assert norms.forward_config(32769, adds) is None
    compare(op, arguments(name, 19, 32900), torch.float32)
    compare(op, arguments(name, 2, 9000), torch.bfloat16)


@pytest.mark.parametrize("name", NORMS)
def test_a_weight_may_be_wider_than_its_input(name: str) -> None:
    """bf16 in and out, fp32 weight with an fp32 gradient."""
    weights = range(1, 3)
    for columns in (128, 1000):
        errors = compare(NORMS[name], arguments(name, 9, columns), torch.bfloat16, wide=weights)
        assert errors["gradient 1"] < 1e-6


def test_layer_norm_far_from_zero_keeps_its_digits() -> None:
    """Mean 1,000, deviation 1: squares less the squared mean would leave three digits of the variance."""
    for columns in (1000, 40000):
        x, *rest = arguments("layer_norm", 2, columns)
        assert isinstance(x, Tensor)
        far = (x.detach().float() + 1000).requires_grad_()
        weight, bias = (t.detach().float() for t in rest if isinstance(t, Tensor))
        exact = norms.layer_norm(far.double(), weight.double(), bias.double(), EPS)
        ours = norms.layer_norm(far.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), EPS, impl="triton").cpu()
        assert relative_error(ours, exact) < 1e-4


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_addition_is_the_addition_and_the_norm(name: str) -> None:
    """Bitwise, in bf16: outputs, and gradients if only one of the outputs is used."""
    for columns in (96, 33000):
        x, residual, *rest = (t.detach() if isinstance(t, Tensor) else t for t in arguments(name, (2, 3), columns))
        assert isinstance(x, Tensor)
        assert isinstance(residual, Tensor)
        x, residual = (t.bfloat16().to(DEVICE).requires_grad_() for t in (x, residual))
        parameters = [t.float().to(DEVICE).requires_grad_() if isinstance(t, Tensor) else t for t in rest]
        y, total = FUSED[name](x, residual, *parameters, impl="triton")
        alone = (x + residual).detach().requires_grad_()
        expected = NORMS[name.removeprefix("add_")](alone, *parameters, impl="triton")
        assert torch.equal(total, alone)
        assert torch.equal(y, expected)
        grad = torch.randn_like(y)
        leaves = [t for t in parameters if isinstance(t, Tensor)]
        of_both = torch.autograd.grad(y, [x, residual, *leaves], grad, retain_graph=True)
        of_norm = torch.autograd.grad(expected, [alone, alone, *leaves], grad)
        assert all(torch.equal(a, b) for a, b in zip(of_both, of_norm, strict=True))
        of_sum = torch.autograd.grad(total, [x, residual], grad)
        assert all(torch.equal(a, grad) for a in of_sum)


@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_inputs_may_have_any_strides_and_leading_dimensions(name: str) -> None:
    op = {**NORMS, **FUSED}[name]
    compare(op, arguments(name, (3, 2, 4), 96), torch.float32, layout="strided")
    compare(op, arguments(name, (), 96), torch.float32)


def heads_of_a_projection(positions: int, samples: int, apart: bool) -> Tensor:
    """Three heads of 20 columns in rows of 100. With `apart` the samples are not evenly apart."""
    rows = torch.randn(positions, 2 * samples, 100, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return rows[:, : samples if apart else None, 20:80].unflatten(-1, (3, 20)).requires_grad_()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_heads_of_a_projection_are_read_where_they_lie(name: str, apart: bool) -> None:
    """They are what is kept for the backward. Those that are not evenly apart are copied first. No bit changes."""
    x = heads_of_a_projection(5, 4, apart)
    parameters = [p.detach().float().to(DEVICE) for p in arguments(name, 1, 20)[1:-1]]  # type: ignore[union-attr]
    kept: list[int] = []
    found = []
    for source in (x, x.detach().contiguous().requires_grad_()):
        kept.clear()
        with (
            poisoned(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t),
        ):
            y = NORMS[name](source, *parameters, EPS, "triton")
        found.append([y, *torch.autograd.grad(y, source, torch.ones_like(y).cumsum(-1))])
        assert (source.data_ptr() in kept) == (source is not x or not apart)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_rows_may_be_none(name: str) -> None:
    x, *rest = (t.detach().float().to(DEVICE) if isinstance(t, Tensor) else t for t in arguments(name, 0, 64))
    assert isinstance(x, Tensor)
    leaves = [t.requires_grad_() for t in (x, *rest) if isinstance(t, Tensor)]
    y = {**NORMS, **FUSED}[name](x, *rest, impl="triton")
    grads = torch.autograd.grad(y if isinstance(y, Tensor) else y[0], leaves, torch.empty(0, 64, device=DEVICE))
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("name", [*NORMS, *FUSED])
def test_without_gradients_there_is_no_graph_and_a_second_backward_is_refused(name: str) -> None:
    values = [t.detach().float().to(DEVICE) if isinstance(t, Tensor) else t for t in arguments(name, 4, 64)]
    op = {**NORMS, **FUSED}[name]
    before = [t.clone() for t in values if isinstance(t, Tensor)]
    plain = op(*values, impl="triton")
    assert all(y.grad_fn is None for y in ([plain] if isinstance(plain, Tensor) else plain))
    values[0].requires_grad_()  # weights frozen
    y = op(*values, impl="triton")
    loss = (y if isinstance(y, Tensor) else y[0] + y[1]).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (t for t in values if isinstance(t, Tensor)), strict=True))


class Norm(nn.Module):
    """One of the norms with bf16 parameters, as a model declares them."""

    def __init__(self, name: str, columns: int):
        super().__init__()
        self.name = name
        generator = torch.Generator().manual_seed(columns)
        for kind in ("weight", "bias") if "layer" in name else ("weight",):
            spec = ParamSpec(
                (shared_piece(kind, (columns,), context.single().tp),),
                ONES,
                decay=False,
                grad_axis=context.single().grad,
            )
            param = parameter(spec, (columns,), dtype=torch.bfloat16, device=DEVICE)
            param.data.copy_(1 + 0.2 * torch.randn(columns, generator=generator))
            setattr(self, kind, param)

    def forward(self, *x: Tensor) -> Tensor:
        y = {**NORMS, **FUSED}[self.name](*x, *self.parameters(), EPS, impl="triton")
        return y if isinstance(y, Tensor) else y[0]


def exact_parameter_gradients(norm: Norm, batches: list[list[Tensor]], upstream: Tensor) -> list[Tensor]:
    """Of each parameter, by fp64 autograd: its gradient summed over the micro-batches. A fused norm's input sum is
    rounded to bf16, as the op says."""
    leaves = [p.detach().double().requires_grad_() for p in norm.parameters()]
    op = NORMS[norm.name.removeprefix("add_")]
    for batch in batches:
        op(sum(batch).double(), *leaves, EPS).backward(upstream.double())
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize(
    ("name", "recomputed"),
    slow_but([2, 5], [(name, recomputed) for name in (*NORMS, *FUSED) for recomputed in (False, True)]),
)
def test_parameters_of_training_get_their_gradients_in_fp32(name: str, recomputed: bool) -> None:
    """The main gradient of bf16 parameters is the exact sum over the micro-batches to fp32 accuracy. Rounded to bf16
    once a micro-batch it would be off by more than 1e-3, and added by the gradient buffer's hook as well by 1."""
    for rows, columns in ((37, 96), (5, 17000)):  # the second is wide: its weight's gradient is a kernel of its own
        norm = Norm(name, columns)
        buffer = flatten([norm], context.single(DEVICE), zero_stage=0, bucket_mb=1, overlap=False)
        draw = partial(torch.randn, (rows, columns), generator=torch.Generator().manual_seed(rows))
        batches = [[draw().bfloat16().to(DEVICE) for _ in range(1 + ("add" in name))] for _ in range(4)]
        upstream = draw().bfloat16().to(DEVICE)
        exact = exact_parameter_gradients(norm, batches, upstream)
        for batch in batches:
            leaves = [x.clone().requires_grad_() for x in batch]
            recompute.run(recomputed, norm, *leaves).backward(upstream)
            assert all(x.grad is not None for x in leaves)
        buffer.gradients.finish()
        for param, right in zip(norm.parameters(), exact, strict=True):
            assert param.grad is None
            assert relative_error(param.main_grad.tensor, right) < 1e-6  # type: ignore[attr-defined]
            assert relative_error(right.bfloat16(), right) > 1e-3


def test_frozen_parameters_get_no_gradient() -> None:
    """Neither in their main gradient nor from autograd."""
    norm = Norm("layer_norm", 96)
    buffer = flatten([norm], context.single(DEVICE), zero_stage=0, bucket_mb=1, overlap=False)
    norm.bias.requires_grad_(False)
    x = torch.randn(8, 96, device=DEVICE).bfloat16().requires_grad_()
    norm(x).sum().backward()
    buffer.gradients.finish()
    assert norm.weight.main_grad.tensor.any()  # type: ignore[union-attr]
    assert not norm.bias.main_grad.tensor.any()  # type: ignore[union-attr]
    assert norm.bias.grad is None


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"residual \(8,\) has not the shape"):
            norms.add_rms_norm(x, weight, weight, EPS, impl=impl)
        with pytest.raises(ValueError, match=r"weight \(4,\) does not fit"):
            norms.rms_norm(x, torch.ones(4), EPS, impl=impl)
        with pytest.raises(ValueError, match=r"bias \(1,\) does not fit"):
            norms.layer_norm(x, weight, torch.ones(1), EPS, impl=impl)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="2^31 elements need a GPU")
def test_offsets_beyond_two_to_the_31_are_reached() -> None:
    """Fault tensors-beyond-32-bits."""
    rows, columns = 2**31 // 16384 + 1, 16384
    x = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(columns, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = norms.rms_norm(x, weight, EPS, impl="triton")
    (grad,) = torch.autograd.grad(y, [x], y.detach())
    last = x.detach()[-1:].clone().requires_grad_()
    expected = norms.rms_norm(last, weight, EPS, impl="triton")
    assert torch.equal(y[-1:], expected)
    assert torch.equal(grad[-1:], torch.autograd.grad(expected, [last], expected.detach())[0])
