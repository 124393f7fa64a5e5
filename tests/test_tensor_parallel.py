"""Tensor and sequence parallelism on real ranks: regions, layers, cross entropy, whole models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_models.heads import deal_heads
from megapar_tools.verify import logical
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.params import Init
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapar.tensor_parallel.layers import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    VocabParallelEmbedding,
    _add_rows,
    _local_ids,
    vocabulary_cut,
)
from megapar.tensor_parallel.regions import copy_to_tp, reduce_from_tp, scatter_sum
from tests.support import close, reference_models, tiny_models
from tests.support.distributed import apart, rank_device, run_ranks
from tests.support.flat import flatten
from tests.support.sweeps import slow_but

CPU = torch.device("cpu")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64, device: torch.device = CPU) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)


def tensor_ranks(size: int) -> ParallelContext:
    """Of all ranks; on this rank's GPU if the test runs on GPUs."""
    return context.create(Grid(tp=size), device=rank_device(dist.get_rank()))


# Regions


@dataclass(frozen=True)
class Region:
    """`same_input`: every rank has the same x, so a gradient is the effect of moving all of them together.
    `same_output`: what comes after is the same on every rank, so the loss counts once; else it is the sum of the ranks'
    losses."""

    function: Callable[[Tensor, Axis], Tensor]
    same_input: bool
    same_output: bool


REGIONS = {
    "copy_to_tp": Region(copy_to_tp, True, False),
    "reduce_from_tp": Region(lambda x, tp: reduce_from_tp(1.0 * x, tp), False, True),  # it writes into its input
    "scatter_sum": Region(scatter_sum, False, False),
}


def derivative_errors(region: Region, ctx: ParallelContext) -> Iterator[float]:
    """Relative error of the derivative along three random directions, against central differences of the loss."""
    tp = ctx.tp
    mine = 0 if region.same_input else ctx.tp.rank
    x = draw(8, 2, 3, seed=mine, device=ctx.device)

    def loss_of_rank(x: Tensor) -> Tensor:
        y = region.function(x, tp)
        seed = 100 + (0 if region.same_output else tp.rank)
        return (y.sin() * draw(*y.shape, seed=seed, device=y.device)).sum()

    def loss(x: Tensor) -> Tensor:
        total = loss_of_rank(x).detach()
        return total if region.same_output else collectives.all_reduce(total, tp)

    leaf = x.clone().requires_grad_()
    loss_of_rank(leaf).backward()
    assert leaf.grad is not None
    for seed in (10, 20, 30):
        direction = draw(*x.shape, seed=seed + mine, device=ctx.device)
        expected = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
        found = (leaf.grad * direction).sum()
        if not region.same_input:
            found = collectives.all_reduce(found, tp)
        yield abs((found - expected) / expected).item()


def strided(x: Tensor) -> Tensor:
    """The same numbers, first and last dimension swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def forward_and_backward(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.requires_grad_()
    y = function(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


def strided_equals_contiguous(function: Callable[[Tensor], Tensor], x: Tensor, rtol: float) -> bool:
    """For strided inputs, strided gradients and gradients of one broadcast number; inputs are left alone."""
    grad = draw(*function(x).shape, seed=5, dtype=x.dtype, device=x.device)
    plain = forward_and_backward(function, x.clone(), grad)
    given = strided(x), strided(grad)
    turned = forward_and_backward(function, *given)
    ones = forward_and_backward(function, x.clone(), torch.ones_like(grad))
    spread = forward_and_backward(function, strided(x), grad.new_ones(()).expand(grad.shape))
    pairs = [*zip(plain, turned, strict=True), *zip(ones, spread, strict=True), (x, given[0]), (grad, given[1])]
    return all(torch.allclose(a, b, rtol=rtol, atol=rtol) for a, b in pairs)


def raw_collectives_refused(ctx: ParallelContext) -> list[bool]:
    operations: list[Callable[..., Any]] = [
        collectives.all_reduce,
        collectives.all_reduce_async,
        collectives.reduce_scatter,
    ]
    operations += [collectives.all_gather, collectives.all_gather_async, collectives.reduce_scatter_async]
    refused = []
    for operation in operations:
        try:
            operation(torch.ones(8, device=ctx.device, requires_grad=True) * 2, ctx.tp)
            refused.append(False)
        except RuntimeError as error:
            refused.append("tensor_parallel.regions" in str(error))
    return refused


def examine_regions(size: int) -> dict[str, Any]:
    ctx = tensor_ranks(size)
    tp = ctx.tp
    found: dict[str, Any] = {name: list(derivative_errors(region, ctx)) for name, region in REGIONS.items()}
    for name, region in REGIONS.items():
        x = draw(8, 2, 3, seed=0 if region.same_input else tp.rank, device=ctx.device)
        found[f"strided {name}"] = strided_equals_contiguous(lambda x, r=region: r.function(x, tp), x, rtol=0)
    found["raw"] = raw_collectives_refused(ctx)
    return found


@pytest.mark.gpus
@pytest.mark.parametrize("tp", [2, 4])
def test_regions(tp: int) -> None:
    """Derivatives against finite differences of losses differing by rank, collectives without a gradient refused (fault
    derivatives-of-collectives); strided tensors as good as contiguous ones (fault strided-tensors-in-collectives)."""
    for found in run_ranks(tp, examine_regions, tp):
        assert all(found["raw"])
        for name in REGIONS:
            assert max(found[name]) < 1e-7, name
            assert found[f"strided {name}"], name


# Layers

IDS = torch.arange(8 * 2).view(8, 2) * 26 % 131  # 0 to 130: some for every rank that holds any


def make_layers(sharding: Sharding) -> tuple[nn.Module, nn.Module, nn.Module]:
    init = Init("normal", 0.1)
    columns = [Columns.even("a", 8, sharding.tp), Columns.even("b", 12, sharding.tp)]
    column = ColumnParallelLinear(6, columns, sharding, init=init, bias=True)
    row = RowParallelLinear("c", 8, 6, sharding, init=init, bias=True)
    return column, row, VocabParallelEmbedding("e", 131, 6, sharding, init=init)


def tensors_of_layers() -> dict[str, Tensor]:
    shapes = {"a.weight": (8, 6), "b.weight": (12, 6), "a.bias": (8,), "b.bias": (12,)}
    shapes |= {"c.weight": (6, 8), "c.bias": (6,), "e.weight": (131, 6)}
    return {name: draw(*shape, seed=sum(name.encode())) for name, shape in shapes.items()}


def examine_layers(ctx: ParallelContext, sequence_parallel: bool) -> dict[str, Any]:
    """Outputs and gradients of each layer for losses weighing every element differently, and what must not matter."""
    tp, size = ctx.tp, ctx.tp.size
    layers = make_layers(Sharding(tp, ctx.grad, sequence_parallel, torch.float64, ctx.device))
    column, row, embedding = layers
    logical.fill(layers, tensors_of_layers())
    rows = slice(8 * tp.rank // size, 8 * (tp.rank + 1) // size) if sequence_parallel else slice(0, 8)
    wide = draw(8, 2, 8, seed=2, device=ctx.device).chunk(size, -1)[tp.rank].contiguous()
    x = draw(8, 2, 6, seed=1, device=ctx.device)[rows].clone().requires_grad_()
    x_row = wide.clone().requires_grad_()
    outputs = column(x), row(x_row), embedding(IDS.to(ctx.device))
    a_columns, b_columns = (draw(8, 2, n, seed=n, device=ctx.device).chunk(size, -1)[tp.rank] for n in (8, 12))
    weights = (
        torch.cat((a_columns, b_columns), -1),
        draw(8, 2, 6, seed=4, device=ctx.device)[rows],
        draw(8, 2, 6, seed=6, device=ctx.device)[rows],
    )
    for y, weight in zip(outputs, weights, strict=True):
        (y * weight).sum().backward()
    (frozen,) = torch.autograd.grad((column(x.detach()) * weights[0]).sum(), column.weight)
    assert column.weight.grad is not None
    return {
        "outputs": [y.detach() for y in outputs],
        "inputs": [x.grad, x_row.grad],
        "frozen input": torch.equal(frozen, column.weight.grad),
        "held": logical.held(layers, ctx, logical.gradients, unsummed=True),
        "strided": strided_equals_contiguous(column, x.detach(), 1e-12) and strided_equals_contiguous(row, wide, 1e-12),
    }


def examine_layers_with_and_without_sequence_parallel(size: int) -> list[dict[str, Any]]:
    ctx = tensor_ranks(size)
    return [examine_layers(ctx, sequence_parallel) for sequence_parallel in (False, True)]


def plain_layers() -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """(outputs a, b, c, e; gradients of the two inputs; gradients of tensors_of_layers) in plain PyTorch."""
    t = {name: tensor.requires_grad_() for name, tensor in tensors_of_layers().items()}
    x, x_row = draw(8, 2, 6, seed=1).requires_grad_(), draw(8, 2, 8, seed=2).requires_grad_()
    outputs = [
        x @ t["a.weight"].t() + t["a.bias"],
        x @ t["b.weight"].t() + t["b.bias"],
        x_row @ t["c.weight"].t() + t["c.bias"],
        t["e.weight"][IDS],
    ]
    for y, weight in zip(
        outputs, [draw(8, 2, n, seed=seed) for n, seed in ((8, 8), (12, 12), (6, 4), (6, 6))], strict=True
    ):
        (y * weight).sum().backward()
    gradients = {name: tensor.grad for name, tensor in t.items() if tensor.grad is not None}
    return [y.detach() for y in outputs], [v.grad for v in (x, x_row) if v.grad is not None], gradients


@pytest.mark.gpus
@pytest.mark.parametrize("tp", slow_but([0, 2], [1, 2, 4]))
def test_layers_equal_plain_linear_and_embedding(tp: int) -> None:
    """In fp64, with and without sequence parallelism; row biases count once. Strided tensors are as good as contiguous
    ones (fault strided-tensors-in-collectives), and a weight's gradient does not depend on whether the input needs
    one."""
    ranks = run_ranks(tp, examine_layers_with_and_without_sequence_parallel, tp)
    outputs, inputs, gradients = apart(plain_layers)
    for sequence_parallel in (False, True):
        for number, both in enumerate(ranks):
            rank = both[sequence_parallel]
            assert rank["strided"]
            assert rank["frozen input"]
            rows = slice(8 * number // tp, 8 * (number + 1) // tp) if sequence_parallel else slice(0, 8)
            a, b = (y.chunk(tp, -1)[number] for y in outputs[:2])
            expected = [torch.cat((a, b), -1), outputs[2][rows], outputs[3][rows], inputs[0][rows]]
            expected.append(inputs[1].chunk(tp, -1)[number])
            for found, right in zip([*rank["outputs"], *rank["inputs"]], expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        held = [both[sequence_parallel]["held"] for both in ranks]
        close.assert_close(logical.assemble(held), gradients, rtol=1e-12)


def axis_of(rank: int, size: int) -> Axis:
    return Axis("tp", size, rank, tuple(range(size)))


class _Called(TorchDispatchMode):
    """The operations called within the context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _OnGPU(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def test_the_gradient_of_an_embedding_has_one_order_of_additions_on_a_gpu() -> None:
    """There index_put_ sorts, and index_add_ adds by atomics. Neither reads a value. Both add the same."""
    # Every row is met several times, and ids of other ranks are among them.
    ids = torch.arange(-40, 160).repeat(3)
    grad = draw(len(ids), 8, seed=3)
    totals = []
    for kind, expected in ((Tensor, "index_add_"), (_OnGPU, "index_put_")):
        totals.append(torch.empty(128, 8, dtype=torch.float64))
        with _Called() as called:
            _add_rows(100, totals[-1].as_subclass(kind), grad, ids, True)
        assert {name for name in called.names if name.startswith("index_")} == {expected}
        assert "_local_scalar_dense" not in called.names
    assert torch.equal(*totals)
    local, _ = _local_ids(ids, 100)
    assert torch.bincount(local).max() <= 9, "zeros of other ranks' ids do not meet in one row"


def test_vocabulary_is_padded_alike_for_every_tp() -> None:
    """Fault vocabulary-padding: all ids are held once, in order; the physical rows of all ranks are the same multiple
    of 128."""
    for vocab in (1, 127, 128, 129, 131, 256, 257, 50257):
        for size in (1, 2, 3, 4, 8):
            cuts = [vocabulary_cut(vocab, axis_of(rank, size)) for rank in range(size)]
            assert [i for start, stop, _ in cuts for i in range(start, stop)] == list(range(vocab))
            assert all(stop - start <= rows for start, stop, rows in cuts)
            assert sum(rows for *_, rows in cuts) == (vocab + 127) // 128 * 128


def test_heads_are_dealt_whole_and_owned_once() -> None:
    """Fault kv-heads-fewer-than-tp: for all counts, each query head finds its key/value head on its rank, and each
    key/value head has one owner."""
    for heads in range(1, 25):
        for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
            for size in (n for n in range(1, heads + 1) if heads % n == 0):
                ranks = [deal_heads(heads, kv_heads, axis_of(rank, size)) for rank in range(size)]
                owned = [kv for r in ranks for kv in range(r.kv_own_start, r.kv_stop)]
                assert owned == list(range(kv_heads))
                for r in ranks:
                    right = [q * kv_heads // heads for q in range(r.q_start, r.q_stop)]
                    assert [r.kv_start + i for i in r.kv_heads] == right
                    assert r.shared == (sum(other.kv_stop - other.kv_start for other in ranks) > kv_heads)


# Cross entropy

VOCAB, PADDED = 131, 256
BOUNDARIES = torch.tensor([0, 63, 64, 127, 128, 130])  # labels beside every cut at tp 2 and 4


def logits_and_targets(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """([s, b, PADDED] logits, targets with every label of BOUNDARIES, weights). Two positions have all logits close to
    +scale and to -scale, for log-sum-exp would cancel there; columns of padding hold garbage."""
    logits = draw(9, 3, PADDED, seed=1, dtype=torch.float32) * scale
    logits[0], logits[1] = logits[0] / scale + scale, logits[1] / scale - scale
    logits[..., VOCAB:] = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 5.0]).repeat(25)
    targets = torch.randint(VOCAB, (9, 3), generator=torch.Generator().manual_seed(2))
    targets.view(-1)[: 2 * len(BOUNDARIES)] = BOUNDARIES.repeat(2)
    return logits, targets, 0.1 + torch.rand(9, 3, generator=torch.Generator().manual_seed(3))


def cross_entropy_on_ranks(size: int) -> list[tuple[Tensor, Tensor]]:
    """(losses, gradient of this rank's columns) for each scale."""
    ctx = tensor_ranks(size)
    results = []
    tp = ctx.tp
    for scale in (1.0, 1e4):
        logits, targets, weights = (x.to(ctx.device) for x in logits_and_targets(scale))
        start, _, rows = vocabulary_cut(VOCAB, tp)
        first = tp.rank * rows
        local = logits[..., first : first + rows].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(local, targets, VOCAB, start, tp)
        (losses * weights).sum().backward()
        assert local.grad is not None
        results.append((losses.detach(), local.grad))
    return results


def torchs_cross_entropy(scale: float) -> tuple[Tensor, Tensor]:
    """(losses, gradient of the logits of the vocabulary)"""
    logits, targets, weights = logits_and_targets(scale)
    true = logits[..., :VOCAB].clone().requires_grad_()
    losses = F.cross_entropy(true.view(-1, VOCAB), targets.view(-1), reduction="none").view(9, 3)
    (losses * weights).sum().backward()
    assert true.grad is not None
    return losses.detach(), true.grad


@pytest.mark.gpus
@pytest.mark.parametrize("tp", slow_but([0, 2], [1, 2, 4]))
def test_cross_entropy_equals_torch(tp: int) -> None:
    """Faults cross-entropy-extremes, vocabulary-padding; at tp 4 the last rank has nothing but padding."""
    ranks = run_ranks(tp, cross_entropy_on_ranks, tp)
    for number, scale in enumerate((1.0, 1e4)):
        losses, right = apart(torchs_cross_entropy, scale)
        gradient = torch.cat([rank[number][1] for rank in ranks], dim=-1)
        assert not gradient[..., VOCAB:].any()
        torch.testing.assert_close(gradient[..., :VOCAB], right, rtol=1e-6, atol=1e-6)
        for rank in ranks:
            torch.testing.assert_close(rank[number][0], losses, rtol=1e-6, atol=1e-6)


# Whole models

STRADDLING = {"num_attention_heads": 12, "num_key_value_heads": 3}  # on 4 ranks groups of query heads straddle ranks
MODELS = {
    "llama": tiny_models.model("llama"),
    "one key/value head": tiny_models.model("llama", num_key_value_heads=1, attention_bias=True),
    "two key/value heads": tiny_models.model("llama", num_key_value_heads=2, attention_bias=True, qk_norm=True),
    "straddling groups": tiny_models.model("llama", **STRADDLING, attention_bias=True, qk_norm=True),
    "tied": tiny_models.model("llama", **STRADDLING, tie_word_embeddings=True),
    "gpt": tiny_models.model("gpt", tie_word_embeddings=True),
}
DROPPING = tiny_models.model("gpt", hidden_dropout=0.3, attention_dropout=0.3)


def set_padding(stage: nn.Module, value: float) -> None:
    """Fill the vocabulary's padding rows: nothing may read them."""
    with torch.no_grad():
        for param in logical.unique_parameters([stage]):
            *_, (_, _, last) = param.spec.segments()  # type: ignore[attr-defined]
            param.view(-1)[last:] = value


def train_model(model: ModelConfig, tp: int, sequence_parallel: bool) -> dict[str, Any]:
    """Loss and gradients of four samples: at once and left in .grad, then two by two, summed by a gradient buffer."""
    ctx = context.create(Grid(tp=tp))
    config = tiny_models.config(model, tp, sequence_parallel)
    batches = [tiny_models.batch(config.model, seed) for seed in (0, 1)]
    stage = tiny_models.build(config, ctx)
    set_padding(stage, 7.0)
    loss = stage(None, tiny_models.joined(batches))
    loss.backward()
    found: dict[str, Any] = {"loss": loss.item()}
    found["unsummed"] = logical.held([stage], ctx, logical.gradients, unsummed=True)
    stage.zero_grad()
    buffer = flatten([stage], ctx, zero_stage=0, bucket_mb=0.05, overlap=True)
    for batch in batches:
        stage(None, batch).backward()
    buffer.gradients.finish()
    found["summed"] = logical.held([stage], ctx, logical.main_gradients)
    return found


def train_models(tp: int) -> dict[str, dict[str, Any]]:
    cases = {**MODELS, "dropout": DROPPING}
    return {f"{name}, {sp}": train_model(model, tp, sp) for name, model in cases.items() for sp in (False, True)}


def expected_of(model: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    """By plain PyTorch in fp64, or if it would need a mask by the model on one rank."""
    if getattr(model, "hidden_dropout", 0.0):
        alone = train_model(model, 1, False)
        return alone["loss"], logical.assemble([alone["unsummed"]])
    full = tiny_models.config(model).model
    batches = [tiny_models.batch(full, seed) for seed in (0, 1)]
    return reference_models.loss_and_gradients(full, tiny_models.random_tensors(full), batches)


@pytest.mark.parametrize("tp", slow_but([0], [2, 4]))
def test_tensor_parallel_models_equal_one_process(tp: int) -> None:
    """Loss and every gradient, of replicated parameters too (fault norm-gradients-under-sequence-parallelism; a mean
    over ranks would fail), of shared key/value heads and their biases (fault kv-heads-fewer-than-tp), of q/k norms with
    and without sequence parallelism (fault norms-shared-by-heads), with padding rows of garbage and a gradient of
    exactly zero for them (fault vocabulary-padding). `assemble` compares copies bitwise."""
    ranks = run_ranks(tp, train_models, tp)
    for name, model in {**MODELS, "dropout": DROPPING}.items():
        loss, gradients = expected_of(model)
        for sequence_parallel in (False, True):
            found = [rank[f"{name}, {sequence_parallel}"] for rank in ranks]
            assert len({f["loss"] for f in found}) == 1, "the loss differs by rank"
            assert found[0]["loss"] == pytest.approx(loss, rel=1e-6)
            for way in ("unsummed", "summed"):
                close.assert_close(logical.assemble([f[way] for f in found]), gradients)


def scatter_ten_rows() -> str:
    tp = context.create(Grid(tp=4)).tp
    with pytest.raises(ValueError, match="10") as refused:
        scatter_sum(torch.zeros(10, 2), tp)
    return str(refused.value)


def test_sequence_that_does_not_divide_is_refused() -> None:
    for message in run_ranks(4, scatter_ten_rows):
        assert "10" in message
        assert "4" in message
