"""What a newcomer adds without editing megapar: a way to cut parameters, and an optimizer with state of two dtypes.

They train as one process does, save, and load in another layout. More optimizers are in test_width_optimizers. A model
family is added in test_families. A schedule is added in tests/support/schedules.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapar.base.grid import Grid
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader, load
from megapar.checkpoint.save import save
from megapar.config.options import OptimizerConfig
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateTensor
from megapar.declare.params import ONES, ParamSpec, cut, make_piece, parameter
from megapar.optimizer.base import Optimizer
from megapar.optimizer.clip import grad_norm
from megapar.optimizer.optimizers import Optimizers
from megapar.optimizer.visits import UpdateArgs, UpdateShard
from tests.support.distributed import run_ranks

SAMPLES, STEPS, LR = 8, 3, 0.1
FACTS: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}


# A parameter that is cut on two dimensions over two axes, its gradient summed over a third


class Toy(nn.Module):
    """Matrices W, each element pulled to its sample's target: a loss of sum c (w - t)^2 / 2."""

    def __init__(self, ctx: ParallelContext):
        super().__init__()
        for name in ("one", "two"):
            piece = make_piece(name, (7, 90), {0: cut(7, ctx.tp), 1: cut(90, ctx.cp)})
            spec = ParamSpec((piece,), ONES, decay=True, grad_axis=ctx.dp, optimizer=f"{__name__}:Plain")
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


# An optimizer with state of two dtypes


class Plain(Optimizer):
    STATE = (StateTensor("momentum"), StateTensor("seen", torch.float64))

    def update(self, shard: UpdateShard, grad: Tensor, params: Any, step: UpdateArgs) -> None:
        shard.state["seen"] += grad.double().abs()
        shard.main.sub_(shard.state["momentum"].mul_(0.9).add_(grad), alpha=step.lr)


def train(ctx: ParallelContext, root: Path, resume: bool = False) -> dict[str, Any]:
    """STEPS steps, then a save; or from this save on as many more. Weights, gradient and norm of this rank."""
    toy = Toy(ctx)
    layout = FlatLayout([toy], 10**6, sharded=True)
    weights = FlatWeights(layout, ctx.device)
    gradients = Gradients(layout, ctx.device)
    optimizer = Optimizers(weights, gradients, ctx, OptimizerConfig())
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


def train_on_ranks(sizes: dict[str, int], root: Path, resume: bool = False) -> dict[str, Any]:
    return train(context.create(Grid(**sizes)), root, resume)  # type: ignore[arg-type]


def tensors(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


def test_it_trains_as_one_process_saves_and_loads_in_another_layout(tmp_path: Path) -> None:
    alone = train(context.single(), tmp_path / "one")
    ranks = run_ranks(8, train_on_ranks, {"tp": 2, "cp": 2, "dp": 2}, tmp_path / "many")
    same(tensors(ranks[0]["path"]), tensors(alone["path"]))
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    on = train(context.single(), tmp_path / "one", resume=True)
    again = run_ranks(3, train_on_ranks, {"tp": 1, "cp": 3, "dp": 1}, tmp_path / "many", True)
    same(tensors(again[0]["path"]), tensors(on["path"]))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        error = (found[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert error < 1e-6, f"{name}: relative error {error:.1e}"
