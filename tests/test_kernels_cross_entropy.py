"""Cross entropy by kernels and by chunks: against fp64, on slices of a vocabulary, in place, with the output layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_kernels import cross_entropy as kernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.data_parallel.accumulate import MainGradView
from megapar.declare import context
from megapar.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapar.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from tests.support.distributed import apart, rank_device, run_ranks
from tests.support.kernel_checks import DEVICE, compare, needs_triton, poisoned, relative_error
from tests.support.sweeps import slow_but

pytestmark = pytest.mark.gpu

ALONE = Axis("tp", 1, 0, (0,))
WAYS = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_targets(rows: int, vocab: int) -> Tensor:
    """First and last id, and others."""
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(2))
    targets[0], targets[-1] = 0, vocab - 1
    return targets.to(DEVICE)


def plain_loss(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """Loss of each token by plain torch, in fp64."""
    z = logits.double()
    return F.cross_entropy(z, targets, reduction="none") + z_loss * z.logsumexp(-1).square()


def op(rows: int, vocab: int, **options: Any) -> Callable[..., Tensor]:
    targets = draw_targets(rows, vocab)
    return lambda logits, impl: vocab_parallel_cross_entropy(logits, targets, vocab, 0, ALONE, impl=impl, **options)


# Kernels on one rank

SIZES = [(1, 3, 2), (4, 7, 7), (3, 127, 127), (5, 256, 129), (3, 1024, 1000), (3, 4097, 4096), (2, 9001, 8999)]
OPTIONS = [{}, {"inplace": True}, {"z_loss": 0.01}, {"z_loss": 0.01, "inplace": True}]


@needs_triton
@pytest.mark.parametrize(
    ("size", "dtype"),
    slow_but(
        [0, 3, 6, 7, 9, 15, 18],  # both types in one block and in several
        [(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16, torch.float16)],
    ),
    ids=str,
)
def test_kernels_equal_fp64(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Loss and gradient, with columns of padding and without, ending inside and at the end of a block (fault
    fused-cross-entropy-odd-sizes)."""
    rows, width, vocab = size
    for number, options in enumerate(OPTIONS):
        logits = 3 * draw(rows, width)
        layout = "strided" if number == 1 else "guarded"
        compare(op(rows, vocab, **options), [logits.requires_grad_()], dtype, layout=layout)


@needs_triton
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_logits_keep_their_loss(shift: float) -> None:
    """All are close to +-10,000, and log-sum-exp itself would be rounded to 1e-3 there (fault
    cross-entropy-extremes)."""
    logits = draw(5, 1000) + shift
    logits[:, 3] += 20
    compare(op(5, 1000), [logits.clone().requires_grad_()], torch.float32)
    compare(op(5, 1000), [(draw(5, 1000) * shift).requires_grad_()], torch.float32)


@needs_triton
def test_columns_may_lie_apart() -> None:
    transposed = draw(200, 6).to(DEVICE).float().t()
    for inplace in (False, True):
        results = []
        for impl in ("torch", "triton"):
            leaf = transposed.clone(memory_format=torch.preserve_format).requires_grad_()
            loss = vocab_parallel_cross_entropy(
                leaf * 1.0, draw_targets(6, 200), 200, 0, ALONE, impl=impl, inplace=inplace
            )
            results.append((loss, *torch.autograd.grad(loss.sum(), leaf)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_statistics_of_more_rows_than_a_cache_holds() -> None:
    """torch's way takes a few rows at a time on a CPU; the last time fewer."""
    z, target = draw(5, 20_000).to(DEVICE).float(), torch.arange(5, device=DEVICE)
    with poisoned():
        maximum, exp_sum, picked = kernel.statistics(z, target, 20_000)
    shifted = z.double() - z.double().amax(-1, keepdim=True)
    torch.testing.assert_close(maximum, z.amax(-1), rtol=0, atol=0)
    torch.testing.assert_close(exp_sum.double(), shifted.exp().sum(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(picked, z.diagonal(), rtol=0, atol=0)


@WAYS
def test_statistics_of_a_slice(impl: str) -> None:
    """Targets on other ranks give 0, padding is not looked at, and -inf is a logit like any other; slices with no
    column, with no finite one, and with no row have statistics, too."""
    z = draw(6, 300).to(DEVICE).float()
    z[:, 200:] = torch.tensor([float("nan"), float("inf"), 1e30, -1e30]).repeat(25).to(DEVICE)
    z[1, 5:150] = -float("inf")
    z[2, :200] = -float("inf")
    target = torch.tensor([-1, 0, 7, 199, 200, -100 - 64], device=DEVICE)
    exact = z[:, :200].double()
    with poisoned():
        maximum, exp_sum, picked = kernel.statistics(z, target, 200, impl=impl)
        nothing = kernel.statistics(z, target, 0, impl=impl)
        rowless = kernel.statistics(z[:0], target[:0], 200, impl=impl)
    least = torch.finfo(torch.float32).min
    torch.testing.assert_close(maximum.double(), exact.amax(-1).clamp(min=least), rtol=0, atol=0)
    torch.testing.assert_close(exp_sum.double(), (exact - maximum[:, None]).exp().sum(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(picked, torch.stack([z.new_zeros(()), z[1, 0], z[2, 7], z[3, 199], *z.new_zeros(2)]))
    assert (nothing[0] == least).all()
    assert not nothing[1:].any()
    assert rowless.shape == (3, 0)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_tiles(dtype: torch.dtype) -> None:
    """Two whole tiles of 4,096 columns and a part of one: targets in each, at their ends and far outside (2^32 is 0 in
    32 bits), -inf in all columns of a whole tile and in all columns of some lanes of the kernel, logits near the
    largest number."""
    columns, width = 8999, 9001
    ends = [0, 4095, 4096, 8191, 8192, columns - 1]
    target = torch.tensor([*ends, -1, columns, width, 2**32, 2**32 + 8192, -(2**32)], device=DEVICE)
    z = (3 * draw(len(target), width)).to(DEVICE, dtype)
    z[:, columns:] = float("nan")
    z[0, 4096:8192] = -float("inf")
    z[1, :4096] = -float("inf")
    z[7, 5:columns:1024] = -float("inf")
    z[8, :columns] = 2e38
    exact = z.double()
    with poisoned():
        found = kernel.statistics(z, target, columns, impl="triton").double()
        right = kernel.statistics(exact, target, columns)
        scale, grad_loss = (1.0 + draw(len(target), seed=seed).abs().to(DEVICE) for seed in (3, 4))
        rowwise = [x.float() for x in (found[0], scale, grad_loss)]
        grad = kernel.gradient(z, target, columns, *rowwise, impl="triton")
        exact_grad = kernel.gradient(exact, target, columns, *(x.double() for x in rowwise))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert not grad[:, columns:].any()


@WAYS
def test_padding_is_inert(impl: str) -> None:
    """Whatever it holds: the loss is the same, and its gradient is exactly zero (fault vocabulary-padding)."""
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for garbage in (float("nan"), float("inf"), 7.0):
            logits = draw(4, 5000).to(DEVICE, dtype)
            logits[:, 4099:] = garbage
            for inplace in (False, True):
                leaf = logits.clone().requires_grad_()
                targets = draw_targets(4, 4099)
                with poisoned():
                    loss = vocab_parallel_cross_entropy(
                        leaf * 1.0, targets, 4099, 0, ALONE, 0.01, impl=impl, inplace=inplace
                    )
                    (grad,) = torch.autograd.grad(loss.sum(), leaf)
                assert not grad[:, 4099:].any()
                results.append((loss.detach(), grad))
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_gradient_takes_the_logits_memory(impl: str, dtype: torch.dtype) -> None:
    """And autograd knows: a second backward, and an op needing the logits, raise instead of being wrong."""
    logits = draw(4, 3, 200).to(DEVICE, dtype).requires_grad_() * 1.0
    twice = logits * logits
    loss = vocab_parallel_cross_entropy(
        logits, draw_targets(12, 150).view(4, 3), 150, 0, ALONE, impl=impl, inplace=True
    )
    before = logits.detach().clone()
    (grad,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    assert not torch.equal(before, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(twice.sum(), logits)


@WAYS
def test_logits_are_left_alone(impl: str) -> None:
    """Unless the gradient may take their place; a second backward gives the same, and without a gradient nothing is
    kept (fault fused-cross-entropy-without-gradient)."""
    logits = draw(5, 200).to(DEVICE).float().requires_grad_()
    before = logits.detach().clone()
    targets = draw_targets(5, 150)
    loss = vocab_parallel_cross_entropy(logits, targets, 150, 0, ALONE, impl=impl)
    first, second = (torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(logits, before)
    with torch.no_grad():
        silent = vocab_parallel_cross_entropy(logits, targets, 150, 0, ALONE, impl=impl, inplace=True)
    plain = vocab_parallel_cross_entropy(logits.detach(), targets, 150, 0, ALONE, impl=impl, inplace=True)
    for other in (silent, plain):
        assert torch.equal(other, loss)
        assert other.grad_fn is None
    assert torch.equal(logits, before)


@WAYS
def test_no_tokens(impl: str) -> None:
    logits = draw(0, 200).to(DEVICE).float().requires_grad_()
    targets = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    loss = vocab_parallel_cross_entropy(logits, targets, 150, 0, ALONE, 0.1, impl=impl)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.shape == (0,)
    assert grad.shape == (0, 200)


@WAYS
def test_one_token_in_all_the_vocabulary(impl: str) -> None:
    logits = (1e4 * draw(3, 1)).to(DEVICE).float().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, logits.new_zeros(3, dtype=torch.long), 1, 0, ALONE, impl=impl)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not loss.any()
    assert grad.abs().max() < 1e-7


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="not run: needs a GPU, and minutes without one")
@pytest.mark.parametrize("vocab", [7, 131, 32003, 50257, 129920, 151936])
def test_real_vocabularies(vocab: int) -> None:
    """Fault fused-cross-entropy-odd-sizes."""
    for rows in (1, 3, 4097):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, vocab, device=DEVICE).to(dtype).requires_grad_()
            targets = draw_targets(rows, vocab)
            loss = vocab_parallel_cross_entropy(x, targets, vocab, 0, ALONE, impl="triton")
            exact = x.detach().double().requires_grad_()
            expected = F.cross_entropy(exact, targets, reduction="none")
            assert relative_error(loss, expected) < 1e-6
            right = torch.autograd.grad(expected.sum(), exact)
            found = torch.autograd.grad(loss.sum(), x)
            assert relative_error(found[0], right[0]) < (1e-6 if dtype == torch.float32 else 4e-3)


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="not run: needs a GPU with 16 GB")
def test_more_than_two_to_the_31_logits() -> None:
    """Fault tensors-beyond-32-bits: the last rows, with offsets of 64 bits."""
    rows, vocab = 16400, 131072
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device=DEVICE).normal_().requires_grad_()
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    last = x.detach()[-3:].double().requires_grad_()
    expected = F.cross_entropy(last, targets[-3:], reduction="none")
    (right,) = torch.autograd.grad(expected.sum(), last)
    loss = vocab_parallel_cross_entropy(x, targets, vocab, 0, ALONE, impl="triton", inplace=True)
    assert relative_error(loss[-3:], expected) < 1e-6
    (found,) = torch.autograd.grad(loss.sum(), x)
    assert relative_error(found[-3:], right) < 4e-3


# Ranks

VOCAB, PADDED, HIDDEN = 131, 256, 24
BOUNDARIES = torch.tensor([0, 63, 64, 127, 128, 130])  # labels beside every cut at tp 2 and 4
CASES = [("torch", 0.02), ("triton", 0.02), ("triton", 0.0)]


def problem() -> dict[str, Tensor]:
    """x [8, 3, h] and weight [PADDED, h] in fp64 (values exact in fp32), targets, and a weight of each loss."""
    targets = torch.randint(VOCAB, (8, 3), generator=torch.Generator().manual_seed(2))
    targets.view(-1)[: len(BOUNDARIES)] = BOUNDARIES
    x, weight = draw(8, 3, HIDDEN).float().double(), draw(PADDED, HIDDEN, seed=3).float().double()
    return {"x": x, "weight": weight, "targets": targets, "weights": 0.1 + draw(8, 3, seed=4).abs()}


def expected(z_loss: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses, gradients of logits, x and weight) of the whole problem in fp64."""
    p = problem()
    x, weight = p["x"].requires_grad_(), p["weight"].requires_grad_()
    logits = x @ weight.t()
    losses = plain_loss(logits[..., :VOCAB].reshape(-1, VOCAB), p["targets"].view(-1), z_loss).view(8, 3)
    return losses.detach(), *torch.autograd.grad((losses * p["weights"]).sum(), (logits, x, weight))


def slice_of(tp: Axis) -> tuple[int, slice]:
    """First id and physical rows of this rank."""
    rows = PADDED // tp.size
    return min(tp.rank * rows, VOCAB), slice(tp.rank * rows, (tp.rank + 1) * rows)


def entropy_on_ranks(size: int) -> list[tuple[Tensor, Tensor]]:
    device = rank_device(dist.get_rank())
    results = []
    tp = context.create(Grid(tp=size), device=device).tp
    start, rows = slice_of(tp)
    for impl, z_loss in CASES:
        p = {name: value.to(device) for name, value in problem().items()}
        leaf = (p["x"] @ p["weight"][rows].t()).float().requires_grad_()
        losses = vocab_parallel_cross_entropy(
            leaf * 1.0, p["targets"], VOCAB, start, tp, z_loss, impl=impl, inplace=True
        )
        (grad,) = torch.autograd.grad((losses * p["weights"]).sum(), leaf)
        results.append((losses.detach(), grad))
    return results


@needs_triton
@pytest.mark.gpus
@pytest.mark.parametrize("tp", slow_but([1], [2, 4]))
def test_vocabulary_cut_over_ranks(tp: int) -> None:
    """Faults cross-entropy-extremes, vocabulary-padding, with and without z-loss; at tp 4 the last rank has
    nothing but padding."""
    ranks = run_ranks(tp, entropy_on_ranks, tp)
    for number, (_, z_loss) in enumerate(CASES):
        losses, right, *_ = apart(expected, z_loss)
        gradient = torch.cat([rank[number][1] for rank in ranks], dim=-1)
        assert relative_error(gradient, right) < 1e-6
        assert not gradient[..., VOCAB:].any()
        for rank in ranks:
            assert relative_error(rank[number][0], losses) < 1e-6
            assert torch.equal(rank[number][0], ranks[0][number][0])


# With the output layer


def linear_on_rank(tp: Axis, device: torch.device, case: tuple, *, sequence_parallel: bool, main: bool) -> dict:
    impl, z_loss = case
    start, rows = slice_of(tp)
    p = {name: value.to(device) for name, value in problem().items()}
    x = p["x"].chunk(tp.size)[tp.rank] if sequence_parallel else p["x"]
    x, weight = x.float().requires_grad_(), p["weight"][rows].float().requires_grad_()
    added: list[Tensor] = []
    before = float("nan") if sequence_parallel else 1.0  # NaN is overwritten, 1 is added to
    if main:
        view = torch.full(weight.shape, before, device=device)
        main_grad = MainGradView(view, lambda: added.append(view.clone()))
        main_grad.is_stale = sequence_parallel
        weight.main_grad = main_grad  # type: ignore[attr-defined]
    losses = linear_cross_entropy(
        x, weight, p["targets"], VOCAB, start, tp, sequence_parallel=sequence_parallel, chunk_rows=7,
        z_loss=z_loss, impl=impl,
    )  # fmt: skip
    (losses * p["weights"]).sum().backward()
    if main:
        assert weight.grad is None
        assert len(added) == 1, "a backward must count as one addition"
        assert torch.equal(added[0], view), "the last addition must come last"
        assert not main_grad.is_stale
        weight_grad = view if sequence_parallel else view - before
    else:
        weight_grad = weight.grad
    return {"losses": losses.detach(), "x": x.grad, "weight": weight_grad}


def linear_on_ranks(size: int) -> list[dict[str, Tensor]]:
    device = rank_device(dist.get_rank())
    tp = context.create(Grid(tp=size), device=device).tp
    return [
        linear_on_rank(tp, device, case, sequence_parallel=sequence_parallel, main=main)
        for case in CASES
        for sequence_parallel in (False, True)
        for main in (False, True)
    ]


@needs_triton
@pytest.mark.gpus
@pytest.mark.parametrize("tp", slow_but([1], [1, 2, 4]))
def test_linear_cross_entropy_equals_torch(tp: int) -> None:
    """Losses and the gradients of x and of every row of the weight, by chunks of a size not dividing the tokens, with
    and without sequence parallelism and main gradient. The gradient buffer sees one addition."""
    ranks = run_ranks(tp, linear_on_ranks, tp)
    for number, (_, z_loss) in enumerate(CASES):
        losses, _, grad_x, grad_weight = apart(expected, z_loss)
        for way in range(4):
            found = [rank[4 * number + way] for rank in ranks]
            sequence_parallel = way >= 2
            assert relative_error(torch.cat([f["weight"] for f in found]), grad_weight) < 1e-6
            assert not torch.cat([f["weight"] for f in found])[VOCAB:].any()
            if sequence_parallel:
                assert relative_error(torch.cat([f["x"] for f in found]), grad_x) < 1e-6
            for f in found:
                assert relative_error(f["losses"], losses) < 1e-6
                assert sequence_parallel or relative_error(f["x"], grad_x) < 1e-6


class Largest(TorchDispatchMode):
    """The most elements returned by any op."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_linear_cross_entropy_holds_one_chunk_of_logits() -> None:
    x, weight = draw(40, 2, 8).float().requires_grad_(), draw(300, 8, seed=3).float().requires_grad_()
    with Largest() as largest:
        losses = linear_cross_entropy(x, weight, draw_targets(80, 300).cpu().view(40, 2), 300, 0, ALONE, chunk_rows=9)
        losses.sum().backward()
    assert largest.numel == 9 * 300


@WAYS
def test_linear_cross_entropy_in_bf16(impl: str) -> None:
    """No worse than torch's layer and loss in bf16; the weight's gradient is summed over chunks in fp32."""
    x, weight = (t.to(DEVICE, torch.bfloat16) for t in (draw(64, 1, 32), 0.2 * draw(200, 32, seed=3)))
    targets = draw_targets(64, 200).view(64, 1)

    def run(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        losses = loss(*leaves)
        return losses, *torch.autograd.grad(losses.sum(), leaves)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight).view(64, 200)
        return plain_loss(logits if logits.dtype == torch.float64 else logits.float(), targets.view(-1), 0)

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, 200, 0, ALONE, chunk_rows=5, impl=impl).view(-1)

    exact, theirs, ours = (run(*way) for way in ((plain, torch.float64), (plain, x.dtype), (chunked, x.dtype)))
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        assert relative_error(mine, right) <= 1.1 * relative_error(torchs, right) + 1e-6
        assert relative_error(mine, right) < 4e-3


def test_linear_cross_entropy_needs_one_gradient_or_none() -> None:
    """Of x or the weight alone, the same as of both; twice the same; none without a gradient; no chunk below a row."""
    x, weight, targets = draw(6, 2, 8).float(), draw(50, 8, seed=3).float(), draw_targets(12, 50).cpu().view(6, 2)

    def run(needs_x: bool, needs_weight: bool) -> tuple[Tensor, list[Tensor]]:
        leaves = x.clone().requires_grad_(needs_x), weight.clone().requires_grad_(needs_weight)
        losses = linear_cross_entropy(*leaves, targets, 50, 0, ALONE, chunk_rows=5)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        once, twice = (torch.autograd.grad(losses.sum(), wanted, retain_graph=True) if wanted else () for _ in "ab")
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
        return losses, list(once)

    losses, both = run(True, True)
    assert torch.equal(run(True, False)[1][0], both[0])
    assert torch.equal(run(False, True)[1][0], both[1])
    assert torch.equal(run(False, False)[0], losses)
    assert run(False, False)[0].grad_fn is None
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        linear_cross_entropy(x, weight, targets, 50, 0, ALONE, chunk_rows=0)
