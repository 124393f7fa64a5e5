"""Trains a layout for some steps on real ranks of this machine, and collects what every rank shows."""

import json
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megapar.base.errors import MegaparError
from megapar.comm.flight import Board
from megapar.config.options import Config
from megapar.declare.batch import PipelineStage
from megapar.declare.context import ParallelContext
from megapar.declare.params import Box, Piece
from megapar.declare.stage_set import StageSet
from megapar.launch.local import preload, start_local_ranks
from megapar.launch.rank_process import job
from megapar.launch.reporting import Ended
from megapar.launch.signals import HANDLED
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TorchProducts
from megapar.optimizer.optimizers import Optimizers
from megapar.step.state import StepResult, TrainState
from megapar.step.step import train_step
from megapar.system.environment import Environment
from megapar.train.trainer import initializes_by_unit, start
from megapar_tools.verify.batches import micro_batches
from megapar_tools.verify.logical import Assembled, Held, assembled, held_gradients, held_state, held_weights

BuildStages = Callable[..., StageSet[PipelineStage]]
"""`megapar_models.build.build_stages`: this room knows no model."""
Around = Callable[[int], AbstractContextManager[None]]
"""A context for the work of a rank, by the rank's number. A planted fault is one."""


@dataclass(frozen=True)
class RankStep:
    """What one rank shows of a step. `scalars` are the loss, the gradient norm, and the other losses by name.

    Gradients are those before clipping, without the loss scale. Beside weights stands what else training changes
    (`held_state`).
    """

    scalars: dict[str, float]
    gradients: list[Held]
    weights: list[Held]


@dataclass(frozen=True)
class RankShown:
    """What one rank shows of a run."""

    initial: list[Held]
    steps: list[RankStep] = field(default_factory=list)


@dataclass(frozen=True)
class VerifiedStep:
    """What all ranks show of a step together. `scalars` are those of each rank."""

    scalars: Sequence[dict[str, float]]
    gradients: Assembled
    weights: Assembled


@dataclass(frozen=True)
class Shown:
    """What all ranks show of a run together."""

    initial: Assembled
    steps: Sequence[VerifiedStep]


@dataclass(frozen=True)
class Order:
    """An order of the sums of one process.

    The step is run in micro-batches of `micro_batch_size` samples, with `reverse` the last one first. Each matrix
    product is the sum of `parts` products, as on so many tensor ranks.
    """

    micro_batch_size: int
    reverse: bool = False
    parts: int = 1


class GradientsSeen:
    """An optimizer in front of another one. It keeps the reduced gradients of a step, as they are before clipping.

    Some updates leave gradients clipped and some do not, depending on the implementation and on sizes.
    """

    def __init__(self, state: TrainState):
        self._state = state
        self._optimizer = state.optimizer
        self.gradients: list[Held] = []

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.gradients = held_gradients(self._state)
        self._optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def see_gradients(state: TrainState) -> GradientsSeen:
    """Put a `GradientsSeen` in front of the optimizer of `state`."""
    seen = GradientsSeen(state)
    state.optimizer = cast(Optimizers, seen)
    return seen


def train_steps(
    config: Config, ctx: ParallelContext, build_stages: BuildStages, num_targets: int, steps: int, order: Order
) -> RankShown:
    """Train `steps` steps of `config` on this rank, and return what it has to show. A collective over all ranks."""
    state, _ = start(config, ctx, build_stages(config, ctx, allocate=not initializes_by_unit(config)))
    packed = config.data.documents == "apart"
    shown = RankShown(held_weights(state) + held_state(state))
    seen = see_gradients(state)
    for number in range(steps):
        pairs = state.stages.declared.divided_by == "pairs"
        batches = micro_batches(config, ctx, number, num_targets, packed=packed, pairs=pairs)
        if order.reverse:
            batches.reverse()
        result = train_step(state, batches)
        while result.overflowed:  # the next step has a smaller loss scale, and the same samples
            result = train_step(state, batches)
        scale = result.loss_scale.scale
        gradients = [replace(part, values=part.values / scale) for part in seen.gradients]
        shown.steps.append(RankStep(_scalars(result), gradients, held_weights(state) + held_state(state)))
    return shown


def _scalars(result: StepResult) -> dict[str, float]:
    losses = {f"loss {name}": value for name, value in result.losses.items()}
    return {"loss": result.loss, "gradient norm": result.grad_norm, **losses}


class RankError(MegaparError):
    """A layout did not run to its end. `exit_code` comes from its first failed rank."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The launcher takes the handlers of signals for as long as its ranks run."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            if handler is not None:  # of a handler that Python has not installed it knows nothing
                signal.signal(number, handler)


def on_ranks(
    config: Config,
    build_stages: BuildStages,
    num_targets: int,
    steps: int,
    orders: Sequence[Order],
    around: Around = lambda rank: nullcontext(),
) -> list[Shown]:
    """Train `config` once in each of `orders`, on as many forked ranks as its layout has; returns what they show.

    `around` is a context for the work of each rank. Raises RankError if a rank fails. The rank's own error is printed
    then. Raises Ended after Ctrl-C.
    """
    parallel = config.parallel
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    torch.set_num_threads(1)  # a fork among the threads of OpenMP hangs at its first parallel region
    preload(config)
    with tempfile.TemporaryDirectory(prefix="megapar-verify-") as folder, _signals_restored():
        run = partial(_rank, config, build_stages, num_targets, steps, orders, around, folder)
        code = start_local_ranks(run, world, folder)
        if code > 128:
            raise Ended(code)  # by a signal, and the launcher has said so
        if code:
            raise RankError(_error_in(folder), code)
        # Nothing is unpickled but these types.
        with torch.serialization.safe_globals([RankShown, RankStep, Held, Piece, Box]):
            ranks = [torch.load(f"{folder}/rank_{rank}.pt", weights_only=True) for rank in range(world)]
    return [_together([rank[number] for rank in ranks]) for number in range(len(orders))]


def _error_in(folder: str) -> str:
    """The error written to the folder of a run by the launcher."""
    path = Path(folder) / "error.json"
    if not path.is_file():
        return "a rank failed"
    record = json.loads(path.read_text())
    return f"{record['class']}: {record['message']}"


def _rank(
    config: Config,
    build_stages: BuildStages,
    num_targets: int,
    steps: int,
    orders: Sequence[Order],
    around: Around,
    folder: str,
    env: Environment,
    board: Board,
) -> None:
    """The work of one rank: train in each order, and save what it shows."""
    config = replace(config, run_dir=folder)
    with job(config, env, board) as (ctx, _):
        shown = []
        with around(env.rank):
            for order in orders:
                train = replace(config.train, micro_batch_size=order.micro_batch_size)
                with products_in_parts(order.parts):
                    shown.append(
                        train_steps(replace(config, train=train), ctx, build_stages, num_targets, steps, order)
                    )
        torch.save(shown, f"{folder}/rank_{env.rank}.pt")


def _together(ranks: Sequence[RankShown]) -> Shown:
    steps = []
    for number in range(len(ranks[0].steps)):
        found = [rank.steps[number] for rank in ranks]
        gradients = assembled([step.gradients for step in found])
        steps.append(
            VerifiedStep([step.scalars for step in found], gradients, assembled([step.weights for step in found]))
        )
    return Shown(assembled([rank.initial for rank in ranks]), steps)


@contextmanager
def products_in_parts(parts: int) -> Iterator[None]:
    """A context to compute each product of linear layers as the sum of so many products of fewer terms.

    The mathematics is the same. The rounding is as if the layer were cut over tensor ranks.
    """
    if parts == 1:  # the products as they are
        yield
        return

    def forward(self: MatrixProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _sum(a @ b.t() for a, b in zip(x.tensor_split(parts, -1), weight.tensor_split(parts, 1), strict=True))
        if bias is None:
            return y
        return y + bias

    def input_gradient(self: MatrixProducts, grad_y: Tensor, weight: Tensor) -> Tensor:
        return _sum(a @ b for a, b in zip(grad_y.tensor_split(parts, -1), weight.tensor_split(parts, 0), strict=True))

    replacements: dict[str, Callable[..., Tensor]] = {
        "forward": forward,
        "input_gradient": input_gradient,
        "forward_into": lambda self, out, x, weight: out.copy_(forward(self, x, weight, None)),
        "input_gradient_into": lambda self, out, grad, weight: out.copy_(input_gradient(self, grad, weight)),
    }
    # Both: a number format of one's own stands on MatrixProducts alone.
    originals = {(kind, name): kind.__dict__[name] for kind in (MatrixProducts, TorchProducts) for name in replacements}
    for kind, name in originals:
        setattr(kind, name, replacements[name])
    try:
        yield
    finally:
        for (kind, name), original in originals.items():
            setattr(kind, name, original)


def _sum(products: Iterable[Tensor]) -> Tensor:
    """The sum in the dtype of the products, from the first on."""
    return reduce(torch.add, products)
