"""Measures what a layer, the embedding and the head take here, for parallel.balance and parallel.schedule auto."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.config.files import RunConfig, load_earlier
from megapar.config.options import Config
from megapar.declare.batch import MicroBatch, PipelineStage, Targets, TensorSpec
from megapar.declare.context import ParallelContext, single
from megapar.declare.stage_set import Declared
from megapar.pipeline.partition import partition
from megapar.system import device
from megapar_tools.plan.parts import Builder

MEASURED = "measured at the first start"
"""The source that config.toml names for a measured value: nobody has typed it."""
_REPETITIONS = 5


def with_measured_partition(options: RunConfig, ctx: ParallelContext, builder: Builder) -> tuple[RunConfig, list[str]]:
    """Fill in parallel.partition if parallel.balance asks for measured costs and no partition is given. A collective.

    Rank 0 measures, or takes the partition of an earlier start from the run folder's config.toml: a resumed run keeps
    its stages. Returns the options with the partition, and lines about its origin.
    """
    parallel = options.derived.parallel
    if parallel.balance != "measured" or parallel.partition or parallel.pp * parallel.vpp == 1:
        return options, []
    found: tuple[list[int], str] = ([], "")
    if ctx.world.first:
        found = _earlier_partition(options.given) or _measured_partition(builder, options.derived, ctx.device)
    sizes, line = collectives.gather_json(found, ctx.world, ctx.device)[0]
    return options.with_parallel(MEASURED, partition=tuple(sizes)), [line]


def _earlier_partition(config: Config) -> tuple[list[int], str] | None:
    """Return the partition in the run folder's config.toml, if it was measured for the same model and layout.

    `config` has the options as the user gave them, because config.toml has them so too.
    """
    earlier = load_earlier(config)
    if earlier is None:
        return None
    sizes = earlier.parallel.partition
    # Replicas do not change what a stage costs.
    same_layout = replace(earlier.parallel, partition=(), dp=config.parallel.dp) == config.parallel
    if not sizes or earlier.model != config.model or not same_layout:
        return None
    return list(sizes), f"stages of {_in_words(sizes)} layers, as measured at the first start"


def _measured_partition(builder: Builder, config: Config, on: torch.device) -> tuple[list[int], str]:
    layers, first, last = measure(builder, config, on)
    sizes = [len(stage) for stage in _balanced(config, layers, first, last)]
    each = " or ".join(f"{1e3 * seconds:.3g}" for seconds in sorted(set(layers)))
    line = (
        f"stages of {_in_words(sizes)} layers: a layer takes {each} ms, the embedding {1e3 * first:.3g} ms, "
        f"norm, head and loss {1e3 * last:.3g} ms, forward and backward"
    )
    return sizes, line


def _balanced(config: Config, layers: Sequence[float], first: float, last: float) -> list[range]:
    """Cut the layers into stages of balanced cost: of each layer, of the embedding, and of norm, head and loss."""
    return partition(layers, first, last, config.parallel.pp * config.parallel.vpp)


def _in_words(sizes: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


Times = tuple[float, float, float]
"""Seconds of one micro-batch's forward, gradient of inputs, and gradient of weights (F, I and W of a schedule)."""


def measure(builder: Builder, config: Config, on: torch.device) -> tuple[list[float], float, float]:
    """Measure the seconds of one micro-batch's forward and backward: through each layer, through the embedding, and
    through norm, head and loss.

    Layers of a kind take the same time, so one of each kind is measured (`Builder.layer_kinds`). All matrices are whole
    on this rank alone: tensor parallelism divides the three times about alike.
    """
    parts = _Parts(builder, config, on)
    return parts.of_all(lambda layers, first, last: parts.seconds(layers, first=first, last=last))


def times_of_stages(builder: Builder, config: Config, on: torch.device) -> Callable[[Config], list[Times]]:
    """Measure as `measure` does, F, I and W apart. Returns a function from a config to the times of its stages.

    That config may differ from `config` in its stages alone.
    """
    parts = _Parts(builder, config, on)
    layers, first, last = parts.of_all(lambda layers, first, last: parts.times(layers, first=first, last=last))

    def of_stages(candidate: Config) -> list[Times]:
        stages = builder.stage_layers(candidate)
        if candidate.parallel.balance == "measured" and not candidate.parallel.partition:
            stages = _balanced(candidate, [sum(times) for times in layers], sum(first), sum(last))
        lists = [[layers[layer] for layer in stage] for stage in stages]
        lists[0].append(first)
        lists[-1].append(last)
        return [_sum(times) for times in lists]

    return of_stages


def _sum(times: list[Times]) -> Times:
    forward, inputs, weights = (sum(parts) for parts in zip(*times, strict=True))
    return forward, inputs, weights


T = TypeVar("T")


class _Parts:
    """The timed parts of a model, each as a stage of its own with random inputs."""

    def __init__(self, builder: Builder, config: Config, on: torch.device):
        self._model = config.model
        self._kinds = builder.layer_kinds(config)
        self._on = on
        self._make_stage = builder.maker(config, single(on))
        self._batch = _random_batch(config, builder.declared(config), on)

    def of_all(self, timed: Callable[[range, bool, bool], T]) -> tuple[list[T], T, T]:
        """Return timed(layers, first, last) of each layer, of the embedding, and of norm, head and loss."""
        end = self._model.num_hidden_layers
        of_kind = {kind: timed(range(kind, kind + 1), False, False) for kind in sorted(set(self._kinds))}
        return (
            [of_kind[kind] for kind in self._kinds],
            timed(range(0), True, False),
            timed(range(end, end), False, True),
        )

    def seconds(self, layers: range, *, first: bool, last: bool) -> float:
        """Return the seconds of forward and backward."""
        return self._seconds_of(self._stage(layers, first=first, last=last))

    def times(self, layers: range, *, first: bool, last: bool) -> Times:
        """Return the seconds of F, I and W. I is the backward through frozen weights, W the rest of the whole."""
        stage = self._stage(layers, first=first, last=last)
        forward = self._seconds_of(stage, backward=False)
        whole = self._seconds_of(stage) - forward
        inputs = 0.0  # no stage waits for the embedding, which has no input to have a gradient
        if not first:
            stage.requires_grad_(False)
            inputs = self._seconds_of(stage) - forward
        # Each is a difference of two measurements. Noise must not make one of them negative.
        inputs = min(max(inputs, 0.0), max(whole, 0.0))
        return forward, inputs, max(whole, 0.0) - inputs

    def _stage(self, layers: range, *, first: bool, last: bool) -> PipelineStage:
        stage = self._make_stage(layers, first=first, last=last)
        for param in stage.parameters():
            nn.init.normal_(param, std=self._model.initializer_range)
        return stage

    def _seconds_of(self, stage: PipelineStage, *, backward: bool = True) -> float:
        given = [_random(spec, self._on) for spec in stage.boundary(self._batch)]
        x = tuple(given) if len(given) > 1 else next(iter(given), None)

        def run() -> None:
            result = stage(x, self._batch)
            outputs = [y for y in ([result] if isinstance(result, Tensor) else result) if y.requires_grad]
            if backward:
                torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            for y in given:
                y.grad = None
            stage.zero_grad(set_to_none=True)

        return _seconds(run, self._on)


def _random(spec: TensorSpec, on: torch.device) -> Tensor:
    """A tensor that a stage is given. Integers are 0, which is a token or an index in every model."""
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=on)
    return torch.randn(spec.shape, device=on).to(spec.dtype).requires_grad_(spec.has_gradient)


def _random_batch(config: Config, declared: Declared, on: torch.device) -> MicroBatch:
    samples = config.train.micro_batch_size
    length = config.train.seq_length
    targets = declared.num_targets
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (samples, length + targets), generator=generator)
    weights = torch.ones(samples, length)
    next_tokens, *later = (Targets(tokens[:, ahead : ahead + length], weights) for ahead in range(1, targets + 1))
    batch = MicroBatch.of_samples(tokens[:, :length], *next_tokens, torch.arange(samples), later_targets=later)
    if declared.divided_by == "pairs":
        batch = batch.with_pairs()
    batch = batch.to(on)
    if targets > 1:  # losses of further tokens are computed in training alone
        batch.scope.grad_scale = torch.ones((), device=on)
    return batch


def _seconds(run: Callable[[], None], on: torch.device) -> float:
    """Return the least time of several runs: whatever else the machine does only adds to it."""
    times = []
    for _ in range(1 + _REPETITIONS):
        device.synchronize(on)
        start = time.perf_counter()
        run()
        device.synchronize(on)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one warms up
