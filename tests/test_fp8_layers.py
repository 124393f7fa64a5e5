"""Layers in FP8 give the same bits in every layout, for equal inputs.

Inputs, weights and gradients are small whole numbers, so every sum is exact in fp32, in any order. Then results and
gradients in two layouts have the same bits exactly if all codes are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_kernels import quantize
from megapar_kernels.quantize import packed_width
from torch import Tensor

from megapar.activations.recompute import light, run
from megapar.base.grid import Grid
from megapar.declare import context
from megapar.declare.params import ZEROS
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.dispatch import combine, compute, plan_dispatch, send
from megapar.expert_parallel.experts import Experts
from megapar.expert_parallel.row_counts import place_of_expert
from megapar.linear.fp8_products import Fp8Products
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear
from tests.support.distributed import rank_device, run_ranks
from tests.support.sweeps import slow_but

HIDDEN, WIDE, LENGTH, SAMPLES = 256, 512, 24, 3
PRODUCTS = Fp8Products(torch.float32)
Found = dict[str, Any]


def whole(*shape: int, seed: int, limit: int = 3) -> Tensor:
    numbers = torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed))
    # Rows of different sizes, so that groups have different scales.
    return (numbers * 2 ** (torch.arange(shape[0]) % 3).view(-1, *[1] * (len(shape) - 1))).float()


def own_rows(x: Tensor, sharding: Sharding) -> Tensor:
    """This rank's positions of x [s, ...] under sequence parallelism, else all of them."""
    return x.chunk(sharding.tp.size)[sharding.tp.rank] if sharding.splits_sequence else x


def mlp(
    tp: int, options: dict[str, Any], recomputed: str, products: MatrixProducts = PRODUCTS, length: int = LENGTH
) -> Found:
    """down(relu(up x)) on a rank: the output, and the gradients of x and of both weights."""
    ctx = context.create(Grid(tp=tp), device=rank_device(dist.get_rank() if tp > 1 else 0))
    sharding = Sharding.of(ctx, torch.float32, **options)
    up = ColumnParallelLinear(
        HIDDEN, [Columns.even("up", WIDE, ctx.tp)], sharding, init=ZEROS, bias=True, products=products
    )
    down = RowParallelLinear("down", WIDE, HIDDEN, sharding, init=ZEROS, bias=False, products=products)
    held = slice(ctx.tp.rank * WIDE // tp, (ctx.tp.rank + 1) * WIDE // tp)
    with torch.no_grad():
        up.weight.copy_(whole(WIDE, HIDDEN, seed=1)[held])
        assert up.bias is not None
        up.bias.copy_(whole(WIDE, seed=2)[held])
        down.weight.copy_(whole(HIDDEN, WIDE, seed=3)[:, held])
    x = own_rows(whole(length, SAMPLES, HIDDEN, seed=4), sharding).requires_grad_()
    before = dict(ctx.tp.traffic.sent)
    with light(recomputed == "light"):
        y = run(recomputed == "full", lambda x_sbh: down(F.relu(up(x_sbh))), x)
        y.backward(own_rows(whole(length, SAMPLES, HIDDEN, seed=5), sharding))
    sent = {name: n - before.get(name, 0) for name, n in ctx.tp.traffic.sent.items()}
    gradients = {"x": x.grad, "up": up.weight.grad, "bias": up.bias.grad, "down": down.weight.grad}
    return {"y": y.detach(), "sent": sent, **gradients}


def joined(ranks: Sequence[Found], sequence_parallel: bool) -> Found:
    """What one process would have, of what the ranks have."""
    found = {
        name: torch.cat([rank[name] for rank in ranks], dim) for name, dim in (("up", 0), ("bias", 0), ("down", 1))
    }
    for name in ("y", "x"):
        found[name] = torch.cat([rank[name] for rank in ranks]) if sequence_parallel else ranks[-1][name]
    return found


def same_bits(found: Found, expected: Found) -> list[str]:
    """The names of what differs."""
    return [name for name, x in found.items() if name != "sent" and not torch.equal(x, expected[name])]


SEQUENCE = {"sequence_parallel": True}
CHUNKS = {"overlap_chunks": 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "sp": (2, SEQUENCE, "none"),
    "sp in chunks, light": (2, SEQUENCE | CHUNKS, "light"),
    "tp": (2, {}, "none"),
    "tp in chunks, full": (2, CHUNKS, "full"),
    "tp 4 with sp, full": (4, SEQUENCE, "full"),
    "one rank, light": (1, {}, "light"),
}
# With groups along positions, of a sample of more than one group. Codes are made of codes, so bits are equal here too.
REGROUPED = replace(PRODUCTS, regroups=True)


@pytest.mark.parametrize("name", slow_but([0, 1], LAYOUTS))
def test_an_mlp_has_the_bits_of_one_process(name: str) -> None:
    """Faults fp8-scale-of-a-shard and fp8-recompute-differs."""
    tp, options, recomputed = LAYOUTS[name]
    ranks = run_ranks(tp, mlp, tp, options, recomputed)
    assert not same_bits(joined(ranks, "sequence_parallel" in options), mlp(1, {}, "none"))


def test_groups_along_positions_are_of_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the sequence a rank holds. Whole numbers of one group along features fit in one along positions,
    so codes of codes are the numbers."""
    sizes = (REGROUPED, 160)
    restored = mlp(1, {}, "none", PRODUCTS, 160)
    seen: list[tuple[int, ...]] = []
    original = quantize.transposed_rows
    monkeypatch.setattr(quantize, "transposed_rows", lambda packed, *_: seen.append(packed.shape) or original(packed))
    assert not same_bits(mlp(1, {}, "none", *sizes), restored)
    assert [shape[:2] for shape in seen] == [(160, SAMPLES)] * 4
    assert not same_bits(joined(run_ranks(2, mlp, 2, SEQUENCE | CHUNKS, "none", *sizes), True), restored)


def test_sequence_parallel_ranks_gather_codes() -> None:
    """Fault fp8-dtype-in-messages: bytes travel, which every backend takes. x for up, once for the product and once for
    the weight gradient; and dy for down. Sums stay in fp32."""
    rows = LENGTH // 2 * SAMPLES
    for rank in run_ranks(2, mlp, 2, SEQUENCE, "none"):
        assert rank["sent"]["all_gather"] == 3 * rows * packed_width(HIDDEN)
        assert rank["sent"]["reduce_scatter"] == 2 * rows * HIDDEN * 4


# Experts

EXPERTS, TOP_K = 4, 2


@dataclass(frozen=True)
class Spread:
    """How experts are spread, and their rows cut into chunks."""

    ep: int = 1
    etp: int = 1
    chunks: int = 1
    recomputed: str = "none"
    products: MatrixProducts = PRODUCTS


def act(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Whole numbers of whole numbers: a product of gate and up would not be exact."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.relu(gate) + up) * weights


def tokens_of(rank: int, ranks: int) -> slice:
    """Those of a rank: uneven numbers, and of four ranks one has none."""
    bounds = {1: (0, LENGTH), 2: (0, 16, LENGTH), 4: (0, 16, 18, 18, LENGTH)}[ranks]
    return slice(bounds[rank], bounds[rank + 1])


def chosen_experts() -> Tensor:
    """int64 [tokens, k] of all ranks' tokens."""
    return torch.rand(LENGTH, EXPERTS, generator=torch.Generator().manual_seed(1)).topk(TOP_K).indices


def mixture(spread: Spread) -> Found:
    """Rows travel to experts and back: this rank's outputs and gradients, the latter by expert."""
    world = spread.ep * spread.etp
    ctx = context.create(
        Grid(dp=world, ep=spread.ep, etp=spread.etp), device=rank_device(dist.get_rank() if world > 1 else 0)
    )
    sharding = Sharding.of(ctx, torch.float32, expert_chunks=spread.chunks)
    experts = Experts(
        *("experts", EXPERTS, HIDDEN, WIDE, sharding),
        activation=act,
        init=ZEROS,
        output_init=ZEROS,
        products=spread.products,
    )
    held = slice(ctx.etp.rank * WIDE // spread.etp, (ctx.etp.rank + 1) * WIDE // spread.etp)
    numbers = experts.expert_numbers
    with torch.no_grad():
        gate_up = [whole(2, WIDE, HIDDEN, seed=10 + number)[:, held] for number in numbers]
        experts.gate_up.copy_(torch.stack(gate_up).view_as(experts.gate_up))
        down = [whole(HIDDEN, WIDE, seed=20 + number)[:, held] for number in numbers]
        experts.down.copy_(torch.stack(down).view_as(experts.down))
    tokens = tokens_of(ctx.dp.rank, world)
    x = whole(LENGTH, HIDDEN, seed=4)[tokens].requires_grad_()
    chosen = chosen_experts()[tokens]
    weights = torch.tensor([1.0, 0.5]).expand(len(x), TOP_K).clone().requires_grad_()
    place = place_of_expert(EXPERTS, ctx.ep, spread.chunks, ctx.device)
    plan = plan_dispatch(chosen, EXPERTS, ctx.ep, ctx.etp, chunks=spread.chunks, place_e=place)
    before = dict(ctx.ep.traffic.sent)
    with light(spread.recomputed == "light"):
        arriving = send(x, weights, plan, products=spread.products)
        y = combine(compute(experts, arriving, plan), plan, products=spread.products)
        y.backward(whole(LENGTH, HIDDEN, seed=5)[tokens])
    sent = {name: n - before.get(name, 0) for name, n in ctx.ep.traffic.sent.items()}
    assert experts.gate_up.grad is not None
    assert experts.down.grad is not None
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "gate_up": dict(zip(numbers, experts.gate_up.grad.view(len(numbers), 2, -1, HIDDEN), strict=True)),
        "down": dict(zip(numbers, experts.down.grad.view(len(numbers), HIDDEN, -1), strict=True)),
        "sent": sent,
        "rows": plan.rows,
    }


def joined_mixture(ranks: Sequence[Found], spread: Spread) -> Found:
    found = {name: torch.cat([rank[name] for rank in ranks]) for name in ("y", "x", "weights")}
    for name, dim in (("gate_up", 1), ("down", 1)):
        for number in range(EXPERTS):
            parts = [rank[name][number] for rank in ranks if number in rank[name]]
            found[f"{name} {number}"] = torch.cat(parts, dim)
    return found


SPREADS = {
    "ep": Spread(ep=2),
    "ep in chunks, light": Spread(ep=2, chunks=2, recomputed="light"),
    "etp": Spread(etp=2),
    "ep and etp": Spread(ep=2, etp=2),
    "one rank, light": Spread(recomputed="light"),
}


@pytest.mark.parametrize("name", slow_but([0, 2], SPREADS))
def test_experts_have_the_bits_of_one_process(name: str) -> None:
    """Faults fp8-experts-share-a-scale and fp8-scale-of-uneven-ranks: ranks have unequal numbers of tokens."""
    spread = SPREADS[name]
    ranks = run_ranks(spread.ep * spread.etp, mixture, spread)
    assert not same_bits(joined_mixture(ranks, spread), joined_mixture([mixture(Spread())], Spread()))


def test_rows_travel_to_experts_in_codes() -> None:
    """So do the gradients of their results. Results and the gradients of rows come back in the dtype of activations."""
    sent = {}
    for products in (PRODUCTS, TORCH_PRODUCTS):
        ranks = run_ranks(2, mixture, Spread(ep=2, products=products))
        sent[products] = sum(sum(rank["sent"].values()) for rank in ranks)
    owner = chosen_experts() // (EXPERTS // 2)
    crossing = sum(int((owner[tokens_of(rank, 2)] != rank).sum()) for rank in range(2))
    assert sent[TORCH_PRODUCTS] - sent[PRODUCTS] == 2 * crossing * (4 * HIDDEN - packed_width(HIDDEN))
