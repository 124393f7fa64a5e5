"""What a newcomer adds without editing megapar: a way to cut parameters, and an optimizer.

Each trains as one process does, saves, and loads in another layout. A model family is added in test_family. A schedule
is added in tests/support/schedules.py.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapar import context
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader, load
from megapar.checkpoint.save import save
from megapar.config.options import OptimizerConfig
from megapar.context import Axis, ParallelContext
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.grid import Grid
from megapar.optimizer.base import Optimizer, Shard, StateTensor
from megapar.optimizer.clip import grad_norm
from megapar.params import ONES, ZEROS, ParamSpec, cut, make_piece, parameter
from tests.support.distributed import run_ranks

SAMPLES, STEPS, LR = 8, 3, 0.1
FACTS: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}


# A parameter that is cut on two dimensions over two axes, its gradient summed over a third


class Toy(nn.Module):
    """Matrices W, each element pulled to its sample's target: a loss of sum c (w - t)^2 / 2."""

    def __init__(self, ctx: ParallelContext, *, whole: bool = False, names: Iterable[str] = ("one", "two")):
        super().__init__()
        for name in names:
            piece = make_piece(name, (7, 90), {0: cut(7, ctx.tp), 1: cut(90, ctx.cp)})
            spec = ParamSpec((piece,), ONES, decay=True, replicas=ctx.dp, whole=whole)
            param = parameter(spec, piece.local_shape, dtype=torch.float32, device=ctx.device)
            self.register_parameter(name, param)
            param.data.copy_(draw(name, -1)[piece.held.slices])

    def loss(self, sample: int) -> Tensor:
        parts = []
        for name, param in self.named_parameters():
            held = param.spec.pieces[0].held.slices  # type: ignore[attr-defined]
            target, weight = draw(name, sample)[held], draw(name, 100 + sample)[held]
            parts.append((weight * (param - target).square()).sum() / 2)
        return torch.stack(parts).sum()


def draw(name: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * len(name) + ord(name[0]) + number)
    return torch.rand(7, 90, generator=generator)


# An optimizer that needs whole matrices: it divides each matrix's momentum by its norm


class Normalized(Optimizer):
    STATE = (StateTensor("momentum"),)

    def update(self, shard: Shard, grad: Tensor, params: Any, lr: float, clip: Any, found_inf: Any) -> None:
        momentum = shard.state["momentum"].mul_(0.9).add_(grad)
        for slot in self.layout.slots:
            if shard.start <= slot.start and slot.stop <= shard.stop:
                matrix = slice(slot.start - shard.start, slot.stop - shard.start)
                shard.main[matrix] -= lr * momentum[matrix] / momentum[matrix].norm()


class Plain(Optimizer):
    STATE = (StateTensor("momentum"), StateTensor("seen", torch.float64))

    def update(self, shard: Shard, grad: Tensor, params: Any, lr: float, clip: Any, found_inf: Any) -> None:
        shard.state["seen"] += grad.double().abs()
        shard.main.sub_(shard.state["momentum"].mul_(0.9).add_(grad), alpha=lr)


def train(ctx: ParallelContext, kind: type[Optimizer], root: Path, resume: bool = False) -> dict[str, Any]:
    """STEPS steps, then a save; or from that save on as many more. Weights, gradient and norm of this rank."""
    toy = Toy(ctx, whole=kind is Normalized, names=("one", "two", "three") if kind is Normalized else ("one", "two"))
    layout = FlatLayout([toy], 10**6, sharded=True)
    weights = FlatWeights(layout, ctx.device)
    gradients = Gradients(layout, ctx.device)
    optimizer = kind(weights, gradients, OptimizerConfig())
    first = STEPS if resume else 0
    if resume:
        load(root / f"step_{STEPS:08d}", slices=optimizer.slices(), ctx=ctx, model_config={})
        optimizer.refresh_params_from_main()
    norms = []
    for step in range(first, first + STEPS):
        gradients.zero()
        for sample in range(ctx.dp.rank, SAMPLES, ctx.dp.size):
            toy.loss(SAMPLES * step + sample).backward()
        gradients.finish()
        norms.append(grad_norm(gradients, ctx).item())
        optimizer.step(LR)
    path = save(root, slices=optimizer.slices(), ctx=ctx, replicated=False, step=first + STEPS, **FACTS)
    return {"norms": norms, "path": path}


def train_on_ranks(sizes: dict[str, int], kind: type[Optimizer], root: Path, resume: bool = False) -> dict[str, Any]:
    return train(context.create(Grid(**sizes)), kind, root, resume)  # type: ignore[arg-type]


def tensors(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


@pytest.mark.parametrize(
    ("kind", "sizes", "others"),
    [
        (Plain, {"tp": 2, "cp": 2, "dp": 2}, {"tp": 1, "cp": 3, "dp": 1}),
        (Normalized, {"dp": 2}, {"dp": 3}),
    ],
    ids=["cut over two axes", "whole matrices"],
)
def test_it_trains_as_one_process_saves_and_loads_in_another_layout(
    tmp_path: Path, kind: type[Optimizer], sizes: dict[str, int], others: dict[str, int]
) -> None:
    alone = train(context.single(), kind, tmp_path / "one")
    ranks = run_ranks(math.prod(sizes.values()), train_on_ranks, sizes, kind, tmp_path / "many")
    same(tensors(ranks[0]["path"]), tensors(alone["path"]))
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    on = train(context.single(), kind, tmp_path / "one", resume=True)
    again = run_ranks(math.prod(others.values()), train_on_ranks, others, kind, tmp_path / "many", True)
    same(tensors(again[0]["path"]), tensors(on["path"]))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        error = (found[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert error < 1e-6, f"{name}: relative error {error:.1e}"


def test_matrices_that_are_kept_whole_lie_in_one_shard_each() -> None:
    """On each of three replicas: shards hold whole matrices, and together all of them."""
    found = []
    for rank in range(3):
        ctx = context.single()
        toy = Toy(ctx)
        for param in toy.parameters():
            spec = param.spec  # type: ignore[attr-defined]
            param.spec = ParamSpec(spec.pieces, ZEROS, True, Axis("dp", 3, rank, (0, 1, 2)), whole=True)  # type: ignore[attr-defined]
        layout = FlatLayout([toy], 10**6, sharded=True)
        found += [s.name for s in layout.slots for a, b in layout.shards() if a <= s.start and s.stop <= b]
    assert sorted(found) == ["one", "two"]
