"""Executes the plan of one rank over its stages. This module knows no schedule by name, no model and no optimizer."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapar.activations.host_inputs import HostInputs
from megapar.base.errors import ConfigError
from megapar.comm.collectives import exchange
from megapar.comm.pending import Pending
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec, scaling_added_losses
from megapar.declare.context import ParallelContext
from megapar.linear.main_grad import WeightGradientQueue, main_grads
from megapar.pipeline.actions import Action, Kind
from megapar.pipeline.input_gradient import InputGradient, begin_all
from megapar.pipeline.lowering import MessageBatch, lower_one
from megapar.pipeline.refine import refine, runs_breadth_first, stages_of_runs
from megapar.pipeline.schedules import Schedule, find, make, placement
from megapar.pipeline.sharding_plan import Item, UnitAction, Units, first_microbatches, insert_unit_actions


def preload(pp: int) -> None:
    """Import what torch imports when a backward pass is first given a gradient, as on all stages but the last one.

    A launcher calls this before it forks its ranks. Otherwise every rank would spend half a second on it.
    """
    if pp > 1:
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


class PipelineRuntime:
    """The stages of this rank, and the order in which micro-batches go through them.

    `stages` maps stage numbers to modules. The schedule assigns each of the pp * vpp stages to a rank. A pipeline of
    one rank is no special case: it has no messages, and with one stage it is gradient accumulation.

    `fine_stages` is the number of fine stages of each of the pp * vpp stages (see `megapar.pipeline.refine`). `stages`
    are then fine stages, and so are those of `num_stages` and of actions. A unit is a bucket of parameters that ZeRO-2
    and 3 gather and reduce as one (`megapar.data_parallel.units`); `units` tells which ones each fine stage uses. It is
    None without them.

    Raises ValueError if `stages` are not those of this rank. Raises ConfigError if `schedule` cannot hold vpp stages on
    a rank.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        ctx: ParallelContext,
        schedule: str | Schedule,
        vpp: int,
        fine_stages: Sequence[int] = (),
        units: Units | None = None,
    ):
        self.stages = dict(stages)
        self.axis = ctx.pp
        self.device = ctx.device
        self.flight = ctx.flight
        self.meanwhile = ctx.expert_gradients
        self.schedule = find(schedule) if isinstance(schedule, str) else schedule
        self.vpp = vpp
        self.fine_stages = list(fine_stages) or [1] * (ctx.pp.size * vpp)
        self.num_stages = sum(self.fine_stages)
        self.units = units
        self._plans: dict[tuple[int, int, bool], Sequence[Item]] = {}
        self.after_action: list[Callable[[Action], None]] = []
        """Called after each action of a step."""
        # What each I of the running step has left to its W, by stage and micro-batch.
        self.deferred: dict[tuple[int, int], WeightGradientQueue] = {}
        self.host_inputs = HostInputs(self.device)
        """The inputs of layers in host memory (train.offload)."""
        make(self.schedule, self.axis.size, vpp, 1)  # raises now what the first step would raise
        place = placement(self.schedule, self.axis.size, vpp)
        place_of_fine = [rank for rank, number in zip(place, self.fine_stages, strict=True) for _ in range(number)]
        expected = [stage for stage, rank in enumerate(place_of_fine) if rank == self.axis.rank]
        if sorted(self.stages) != expected:
            raise ValueError(f"pp rank {self.axis.rank} needs stages {expected}, but was given {sorted(self.stages)}")

    def step(
        self,
        batches: Sequence[MicroBatch],
        scale: Tensor | float = 1.0,
        on_last_backward: Callable[[tuple[Kind, int] | None], None] = lambda last: None,
        max_microbatches: int = 0,
        added_scale: Tensor | None = None,
    ) -> list[Tensor]:
        """Run forward and backward of every micro-batch.

        Replicas may have different numbers of micro-batches. `max_microbatches` is the largest of them, or 0 if all
        have the same. With units, a replica with fewer takes part in the collectives of the others.

        Parameters accumulate the gradient of scale * (sum of the losses). Losses that stages add (`add_loss`) are
        multiplied by `added_scale`, or without it by `scale` too. Returns the losses, detached and without
        `scale`, in the order of `batches` on the rank of the last stage, and [] elsewhere.

        `on_last_backward` is called once, right before the last action that adds gradients of matrices: a B or a W. Its
        argument is the action's kind and stage, or None if there are no micro-batches. By then all other stages of this
        rank have their final gradients. Those of the last one become final while it runs.
        """
        scale = torch.as_tensor(scale, dtype=torch.float32, device=self.device)
        plan = self.plan(len(batches), max_microbatches, backward=True)
        adding = [(i, item) for i, item in enumerate(plan) if isinstance(item, Action) and item.kind in ("B", "W")]
        run = _Execution(self, plan, batches, scale)
        with scaling_added_losses(batches, scale if added_scale is None else added_scale):
            if not adding:  # no micro-batches; of units it still gathers and reduces what other replicas use
                run.execute(plan)
                on_last_backward(None)
                return run.finish()
            position, last = adding[-1]
            # A unit is reduced after a backward, and a W adds after the B before it: both need what that backward adds.
            leaves = self.units is None and all(item.kind == "B" for _, item in adding)
            with self.meanwhile.across_backwards() if leaves else nullcontext():
                run.execute(plan[:position])
            on_last_backward((last.kind, last.stage))
            run.execute(plan[position:])
            return run.finish()

    def deferred_nbytes(self) -> Counter[int]:
        """Bytes kept now by the deferred weight gradients, by stage."""
        found: Counter[int] = Counter()
        for (stage, _), queue in self.deferred.items():
            found[stage] += queue.nbytes
        return found

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], max_microbatches: int = 0) -> list[Tensor]:
        """Run the forwards alone. Returns the losses as `step` does. Modules stay in their mode, train or eval."""
        plan = self.plan(len(batches), max_microbatches, backward=False)
        run = _Execution(self, plan, batches, torch.zeros((), device=self.device))
        run.execute(plan)
        return run.finish()

    def prepare(self, numbers_of_microbatches: Iterable[tuple[int, int]]) -> None:
        """Make the plans of steps now: those of (micro-batches of this rank, most of any replica).

        A plan of thousands of actions takes up to a second. Made in a step, it would stall the step.
        """
        for number, max_microbatches in numbers_of_microbatches:
            self.plan(number, max_microbatches, backward=True)

    def plan(self, num_microbatches: int, max_microbatches: int = 0, *, backward: bool) -> Sequence[Item]:
        """The plan of this rank for so many micro-batches. `max_microbatches` is as in `step`."""
        if self.units is None:
            max_microbatches = num_microbatches  # without units no replica waits for another during a plan
        max_microbatches = max(max_microbatches, num_microbatches)
        if max_microbatches == 0:  # other replicas have all micro-batches
            return []
        key = num_microbatches, max_microbatches, backward
        if key not in self._plans:
            orders = make(self.schedule, self.axis.size, self.vpp, max_microbatches)
            kept = [[action for action in order if backward or action.kind == "F"] for order in orders]
            coarse = lower_one(kept, self.axis.size * self.vpp, self.axis.rank)
            breadth_first = runs_breadth_first(self.schedule.breadth_first, self.axis.size)
            plan: Sequence[Item]
            (plan,) = refine([coarse], self.fine_stages, breadth_first=breadth_first)
            if self.units is not None:
                runs = stages_of_runs(self.schedule.breadth_first, self.axis.size, self.fine_stages)
                plan = first_microbatches(insert_unit_actions(plan, self.units, runs), num_microbatches)
            self._plans[key] = plan
        return self._plans[key]


@dataclass
class _Saved:
    """What the backward of a stage needs from its forward: where gradients of inputs arrive, and the graph's edges.

    Neither inputs nor outputs are kept here. The inputs live only as long as the graph needs them, and so do outputs
    after they are sent. Setting their `.data` to something small would save the same memory, but is a use-after-free
    while a send is in flight.
    """

    inputs: list[InputGradient]  # of each input with a gradient
    edges: list[GradientEdge | None]  # of each output that gets a gradient, None if it needs none
    specs: tuple[TensorSpec, ...]  # of the same outputs, and so of their gradients


class _Execution:
    """One run of a plan: arrived tensors, tensors to send, and what forwards have saved for backward."""

    def __init__(self, runtime: PipelineRuntime, plan: Sequence[Item], batches: Sequence[MicroBatch], scale: Tensor):
        self._runtime = runtime
        self._takers = _takers(plan)
        self._batches = batches
        self._scale = scale
        self._arrived: dict[Action, tuple[tuple[Tensor, ...], Pending]] = {}
        self._departing: dict[Action, tuple[Tensor, ...]] = {}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._queues: dict[tuple[int, int], WeightGradientQueue] = {}
        runtime.deferred = self._queues
        runtime.meanwhile.drop()  # a step that failed may have left some
        in_halves = {item.stage for item in plan if isinstance(item, Action) and item.kind == "I"}
        self._main_grads = {stage: main_grads(runtime.stages[stage]) for stage in in_halves}
        self._losses: dict[int, Tensor] = {}
        self._sending = Pending()
        if torch.is_grad_enabled():  # an evaluation keeps nothing
            actions = [item for item in plan if isinstance(item, Action)]
            runtime.host_inputs.begin((x.stage, x.microbatch) for x in actions if x.kind in ("B", "I"))

    def execute(self, plan: Sequence[Item]) -> None:
        """Run the items of a plan, or of a part of it, in order."""
        for item in plan:
            if isinstance(item, MessageBatch):
                self._post(item)
            elif isinstance(item, UnitAction):
                assert self._runtime.units is not None
                self._runtime.units.run(item)
            else:
                self._run_action(item)
                for watcher in self._runtime.after_action:
                    watcher(item)

    def _run_action(self, action: Action) -> None:
        received, pending = self._arrived.pop(action, ((), Pending()))
        pending.wait()
        key = action.stage, action.microbatch
        flight, host_inputs = self._runtime.flight, self._runtime.host_inputs
        trains = torch.is_grad_enabled()
        if trains:  # else the phase stays "evaluate"
            flight.enter("forward" if action.kind == "F" else "backward")
        with flight.span(*action):
            if trains:
                host_inputs.fetch_next()
            match action.kind:
                case "F":
                    with host_inputs.forward(key) if trains else nullcontext():
                        self._forward(action, received)
                case "B":
                    self._backward(action, received)
                case "I":
                    # A whole backward, in which layers defer the gradients of their matrices.
                    self._queues[key] = WeightGradientQueue()
                    with self._queues[key].open(self._main_grads[action.stage]):
                        self._backward(action, received)
                case "W":
                    self._queues.pop(key).run()
            if action.kind in ("B", "I"):
                host_inputs.end_backward(key)

    def finish(self) -> list[Tensor]:
        """Wait for the last sends. Returns the losses in the order of micro-batches.

        Raises ConfigError if the schedule has an I without its W.
        """
        self._sending.wait()
        if self._queues:
            missing = " ".join(str(Action("W", *where)) for where in sorted(self._queues))
            error = ConfigError(
                f"parallel.schedule={self._runtime.schedule}: pipeline rank {self._runtime.axis.rank} never runs "
                f"{missing}, which adds the gradients of weights; each I needs a W after it"
            )
            error.everywhere = False  # the orders of other ranks may be whole
            raise error
        return [self._losses[m] for m in sorted(self._losses)]

    def _post(self, messages: MessageBatch) -> None:
        """Start `messages`. Allocates the tensors to receive."""
        # One batch with sends in flight at most, so that what was sent is freed (see lowering.MessageBatch).
        if messages.sends:
            self._sending.wait()
        sends = [(x, send.peer) for send in messages.sends for x in self._departing.pop(send.consumer)]
        buffers = [self._buffers(receive.consumer) for receive in messages.receives]
        receives = [(x, r.peer) for r, tensors in zip(messages.receives, buffers, strict=True) for x in tensors]
        pending = exchange(sends, receives, self._runtime.axis)
        for receive, tensors in zip(messages.receives, buffers, strict=True):
            self._arrived[receive.consumer] = tensors, pending
        if messages.sends:
            self._sending = pending

    def _buffers(self, action: Action) -> tuple[Tensor, ...]:
        """Allocate the tensors received by `action`."""
        if action.kind == "F":
            specs = self._runtime.stages[action.stage].boundary(self._batches[action.microbatch])
        else:
            specs = self._saved[action.stage, action.microbatch].specs
        return tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._runtime.device) for spec in specs)

    def _hand_over(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Pass the result of `action` to its consumer: on this rank at once, on another rank by a later `_post`."""
        forward = action.kind == "F"
        target = self._takers.get((forward, action.stage + (1 if forward else -1), action.microbatch))
        if target is None:
            return
        if target.stage in self._runtime.stages:
            self._arrived[target] = tensors, Pending()
        else:
            self._departing[target] = tuple(x.contiguous() for x in tensors)

    def _forward(self, action: Action, received: tuple[Tensor, ...]) -> None:
        stage, batch = self._runtime.stages[action.stage], self._batches[action.microbatch]
        gradients: list[InputGradient] = []
        if torch.is_grad_enabled() and received:
            gradients, received = begin_all(received, stage.boundary(batch))
        # Stages take one tensor, a tuple of several, or None on the first stage.
        x = received if len(received) > 1 else next(iter(received), None)
        result = stage(x, batch)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        is_last = action.stage == self._runtime.num_stages - 1
        if torch.is_grad_enabled():
            specs = (None if is_last else stage.leaving(batch)) or [TensorSpec((), y.dtype) for y in outputs]
            with_gradient = [y for y, spec in zip(outputs, specs, strict=True) if spec.has_gradient]
            if is_last:
                # The root of the backward pass, whose gradient is 1. To hand `scale` to torch as a gradient instead
                # would make it import its symbolic shapes and sympy, which takes every process half a second.
                with_gradient = [_ScaledGradient.apply(y, self._scale) for y in with_gradient]
            of_gradients = tuple(TensorSpec(tuple(y.shape), y.dtype) for y in with_gradient)
            saved = _Saved(gradients, [_edge(y) for y in with_gradient], of_gradients)
            self._saved[action.stage, action.microbatch] = saved
        if is_last:
            self._losses[action.microbatch] = outputs[0].detach()
        # Detached: the graph of a micro-batch ends at its stage, and `_backward` goes on from the edges.
        self._hand_over(action, tuple(y.detach() for y in outputs))

    def _backward(self, action: Action, received: tuple[Tensor, ...]) -> None:
        saved = self._saved.pop((action.stage, action.microbatch))
        gradients = (None,) if action.stage == self._runtime.num_stages - 1 else received
        roots = [(edge, grad) for edge, grad in zip(saved.edges, gradients, strict=True) if edge is not None]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        self._hand_over(action, tuple(x.take() for x in saved.inputs))


def _takers(plan: Sequence[Item]) -> dict[tuple[bool, int, int], Action]:
    """The action taking each result on this rank or on another one: (is forward, stage, micro-batch) to action.

    A gradient is taken by a B or by an I.
    """
    messages = [send.consumer for item in plan if isinstance(item, MessageBatch) for send in item.sends]
    actions = [item for item in plan if isinstance(item, Action) and item.kind != "W"]
    return {(action.kind == "F", action.stage, action.microbatch): action for action in (*messages, *actions)}


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        # An attribute, not saved for backward: a plan counts what is saved, and all micro-batches share this number.
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _edge(y: Tensor) -> GradientEdge | None:
    """The edge at which backward enters the graph of `y`. It does not keep the data of `y` alive.

    Returns None if `y` needs no gradient.
    """
    if not y.requires_grad:
        return None
    # The edge of a view. Unlike the node of a view, the node of an autograd.Function that is written in Python does not
    # keep the graph behind it alive.
    return get_gradient_edge(y.view_as(y))
