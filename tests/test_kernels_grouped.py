"""Products of all experts in one launch: the kernel of weight gradients against fp64, and all against the loop."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from megapar_kernels import grouped
from megapar_kernels.activations import swiglu
from megapar_kernels.grouped import RowGroups, add_weight_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.declare.context import single
from megapar.declare.params import Init
from megapar.declare.random import initialize
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.experts import Experts, _GroupedBias
from megapar.linear.low_rank import LoraRule
from megapar.linear.torch_products import TorchProducts
from tests.support.flat import flatten
from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, relative_error, strided
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

LOOP, ONE_LAUNCH = TorchProducts(), TorchProducts(grouped="triton")
# Rows of each group: empty ones at both ends and in between, all rows in one, one row, tiles of rows whole and cut.
SIZES = [(4, 0, 5), (0, 0, 9), (0, 0, 0), (1,), (64, 63, 65, 0), (0, 130, 1)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(totals: Tensor, grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = zip(grad.double().split(list(sizes)), x.double().split(list(sizes)), strict=True)
    return totals.double() + torch.stack([g.t() @ part for g, part in parts])


# Every size once, into tiles of a part, of several and of one, and both ways of writing.
CASES = list(product([(24, 16), (136, 264), (5, 7), (128, 128)], SIZES, [False, True]))
FEW = [*range(0, 12, 2), 5, 20, 21, 23, 25, 32, 46]


@pytest.mark.parametrize(
    ("outputs", "inputs", "sizes", "overwrite"), slow_but(FEW, [(*shape, *case) for shape, *case in CASES]), ids=str
)
def test_weight_gradients(outputs: int, inputs: int, sizes: tuple[int, ...], overwrite: bool) -> None:
    """Between guard bands. What is overwritten is NaN before; a group without rows adds nothing, and becomes zero."""
    grad, x = (Guarded(draw(sum(sizes), width, seed=width)) for width in (outputs, inputs))
    totals = Guarded(draw(len(sizes), outputs, inputs, seed=2, dtype=torch.float32))
    before = totals.tensor.clone()
    if overwrite:
        before.zero_()
        totals.tensor.fill_(float("nan"))
    groups = RowGroups.of(sizes, DEVICE)
    add_weight_gradients(totals.tensor, grad.tensor, x.tensor, groups.ends, overwrite=overwrite)
    assert relative_error(totals.tensor, exact(before, grad.tensor, x.tensor, sizes)) < 1e-6
    for guarded in (grad, x, totals):
        guarded.check()
    for size, total, old in zip(sizes, totals.tensor, before, strict=True):
        assert size or torch.equal(total, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_inputs_of_both_kinds(dtype: torch.dtype) -> None:
    grad, x = draw(9, 24, dtype=dtype), draw(9, 16, seed=1, dtype=dtype)
    totals = torch.zeros(3, 24, 16, device=DEVICE)
    groups = RowGroups.of((4, 0, 5), DEVICE)
    add_weight_gradients(totals, strided(grad), x.t().contiguous().t(), groups.ends)
    assert relative_error(totals, exact(torch.zeros_like(totals), grad, x, groups.sizes)) < 1e-6


def random_sizes(seed: int) -> list[int]:
    """Of 8 groups, some empty."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(8, (40 + seed,), generator=generator) * torch.randint(2, (40 + seed,), generator=generator)
    return torch.bincount(chosen, minlength=8).tolist()


@pytest.mark.parametrize("sizes", [*(random_sizes(seed) for seed in range(3)), [0] * 8, [33, *[0] * 7]], ids=str)
def test_one_launch_equals_the_loop(sizes: list[int]) -> None:
    """bf16 products of random groups, each against fp64: no farther from it than the loop's."""
    x, grad, weights = draw(sum(sizes), 16), draw(sum(sizes), 24, seed=1), draw(8, 24, 16, seed=2)
    groups = RowGroups.of(sizes, DEVICE)
    totals = [draw(8, 24, 16, seed=3, dtype=torch.float32) for _ in range(2)]
    results: list[list[Tensor]] = []
    for products, total in zip((LOOP, ONE_LAUNCH), totals, strict=True):
        y = products.grouped_forward(x, weights, groups)
        grad_x = products.grouped_input_gradient(grad, weights, groups)
        products.add_grouped_weight_gradient(total, grad, x, groups)
        results.append([y, grad_x, total])
    wide = weights.double()
    parts = list(zip(x.double().split(sizes), grad.double().split(sizes), wide, strict=True))
    right = [
        torch.cat([part @ w.t() for part, _, w in parts]),
        torch.cat([part @ w for _, part, w in parts]),
        exact(draw(8, 24, 16, seed=3, dtype=torch.float32), grad, x, sizes),
    ]
    for by_loop, in_one, expected, limit in zip(*results, right, (4e-3, 4e-3, 1e-6), strict=True):
        assert in_one.dtype == by_loop.dtype
        assert in_one.shape == by_loop.shape
        assert relative_error(in_one, expected) <= max(2 * relative_error(by_loop, expected), limit / 10) < 2 * limit


@pytest.mark.parametrize(("dtype", "inputs"), [(torch.float32, 16), (torch.float16, 16), (torch.bfloat16, 12)])
def test_the_loop_serves_what_the_grouped_kernels_do_not_take(
    dtype: torch.dtype, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other dtypes, and rows that are no multiple of 16 bytes."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    monkeypatch.setattr(grouped, "add_weight_gradients", None)
    x, grad, weights = draw(9, inputs, dtype=dtype), draw(9, 24, dtype=dtype), draw(3, 24, inputs, dtype=dtype)
    groups = RowGroups.of((4, 0, 5), DEVICE)
    totals = [torch.zeros(3, 24, inputs, device=DEVICE) for _ in range(2)]
    for products, total in zip((LOOP, ONE_LAUNCH), totals, strict=True):
        products.add_grouped_weight_gradient(total, grad, x, groups, overwrite=True)
    assert torch.equal(*totals)
    assert torch.equal(LOOP.grouped_forward(x, weights, groups), ONE_LAUNCH.grouped_forward(x, weights, groups))
    found = [products.grouped_input_gradient(grad, weights, groups) for products in (LOOP, ONE_LAUNCH)]
    assert torch.equal(*found)


class Products(TorchDispatchMode):
    """Counts torch's matrix products. Launches of our kernel are counted by `add`, in place of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        add_weight_gradients(*args, **kwargs)


def layer(products: TorchProducts, experts: int, adapted: Sequence[str] = (), bias: bool = False) -> Experts:
    init = Init("normal", 0.5)
    made = Experts(
        "layers.0.mlp.experts",
        experts,
        16,
        24,
        Sharding.of(single(DEVICE), torch.bfloat16),
        activation=partial(swiglu, impl="torch"),
        init=init,
        output_init=init,
        products=products,
        bias=bias,
        lora=LoraRule(8, 2.0) if adapted else None,
        adapted=adapted,
    )
    initialize([made], seed=1)
    return made


def trained(products: TorchProducts, sizes: Sequence[int], **options: Any) -> tuple[int, list[Tensor]]:
    """Products of a forward and a backward pass, then results, and gradients of rows, weights and each parameter."""
    experts = layer(products, len(sizes), **options)
    for matrix in experts.lora_b.values():
        matrix.data.copy_(draw(*matrix.shape, seed=5))
    flat = flatten([experts], single(DEVICE), zero_stage=0, bucket_mb=1)
    flat.start_step()
    rows = draw(sum(sizes), 16).requires_grad_()
    weights = draw(sum(sizes), 1, seed=7, dtype=torch.float32).requires_grad_()
    with Products() as counted, pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "add_weight_gradients", counted.add)
        y = experts(rows, weights, RowGroups.of(sizes, DEVICE))
        (y * draw(*y.shape, seed=6)).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    gradients = [param.main_grad.tensor for param in experts.parameters()]  # type: ignore[attr-defined]
    return counted.count, [y, rows.grad, weights.grad, *gradients]


@pytest.mark.parametrize(
    "options", [{}, {"adapted": ("gate", "up", "down"), "bias": True}], ids=["plain", "adapters and biases"]
)
def test_a_layer_of_experts(options: dict[str, Any]) -> None:
    """Results and every gradient in bf16, as near as bf16 is; an expert without rows has the gradient 0."""
    sizes = (4, 0, 7, 0, 21)
    _, by_loop = trained(LOOP, sizes, **options)
    _, in_one = trained(ONE_LAUNCH, sizes, **options)
    assert len(in_one) == len(by_loop) == (5 if not options else 13)
    for found, expected in zip(in_one, by_loop, strict=True):
        assert expected.any()
        assert relative_error(found, expected) < 8e-3
    downs = in_one[4].view(5, -1)
    assert not downs[[1, 3]].any()
    assert downs[[0, 2, 4]].any(dim=1).all()


def test_launches_of_a_layer() -> None:
    """16 experts, as each rank of ep 8 has of Qwen3-30B-A3B: 2 matrices, forward, gradients of rows and of weights.

    Biases take a product in each direction, and that of down one more for the weights of rows.
    """
    assert [trained(products, [2] * 16)[0] for products in (LOOP, ONE_LAUNCH)] == [96, 6]
    assert [trained(ONE_LAUNCH, [2] * experts, bias=True)[0] for experts in (16, 4)] == [11, 11]


def test_biases_of_experts_at_once() -> None:
    """Against fp64, with an expert without rows. Rows in bf16 are rounded once, and gradients are sums in fp32."""
    sizes = (4, 0, 7, 21)
    groups = RowGroups(4, RowGroups.of(sizes, DEVICE).ends, on_host=None)  # type: ignore[arg-type]  # is not asked
    rows, bias, grad = draw(32, 24, seed=1), draw(4 * 24, seed=2), draw(32, 24, seed=3)
    weights = draw(32, 1, seed=4, dtype=torch.float32)
    expert = torch.repeat_interleave(torch.tensor(sizes, device=DEVICE))
    for factors in (None, weights):
        given = [x.clone().requires_grad_() for x in (rows, bias, weights)]
        used = None if factors is None else given[2]
        y = _GroupedBias.apply(given[0] * 1, given[1], used, groups, True, True)
        y.backward(grad)
        wide = [x.double().requires_grad_() for x in (rows, bias, weights)]
        expected = wide[0] + wide[1].view(4, 24)[expert] * (1 if factors is None else wide[2])
        expected.backward(grad.double())
        assert relative_error(y, expected) < 2**-8
        assert torch.equal(given[0].grad, grad)
        assert relative_error(given[1].grad, wide[1].grad) < 2**-8
        if factors is not None:
            assert relative_error(given[2].grad, wide[2].grad) < 1e-6


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 40 GB")
def test_offsets_beyond_2_31() -> None:
    """Fault tensors-beyond-32-bits: rows and totals beyond 2^31 elements."""
    rows, outputs, inputs = 2**17 + 5, 2**14, 2**14
    grad = torch.zeros(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
    x = torch.zeros(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
    grad[-3:].normal_()
    x[-3:].normal_()
    totals = torch.zeros(9, outputs, inputs, device=DEVICE)
    sizes = (rows - 3, *[0] * 7, 3)
    add_weight_gradients(totals, grad, x, RowGroups.of(sizes, DEVICE).ends)
    assert totals.numel() > 2**31
    assert relative_error(totals[-1], grad[-3:].double().t() @ x[-3:].double()) < 1e-5
    assert not totals[0].any()


def test_one_group_is_a_product_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a rank with one expert: cuBLAS is faster than a launch for groups."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    monkeypatch.setattr(grouped, "add_weight_gradients", None)
    x, grad, weight = (torch.randn(shape).bfloat16() for shape in ((5, 16), (5, 24), (1, 24, 16)))
    totals = torch.full((1, 24, 16), torch.nan)
    groups = RowGroups.of((5,))
    assert torch.equal(ONE_LAUNCH.grouped_forward(x, weight, groups), x @ weight[0].t())
    assert torch.equal(ONE_LAUNCH.grouped_input_gradient(grad, weight, groups), grad @ weight[0])
    ONE_LAUNCH.add_grouped_weight_gradient(totals, grad, x, groups, overwrite=True)
    assert relative_error(totals[0], grad.double().t() @ x.double()) < 1e-6
