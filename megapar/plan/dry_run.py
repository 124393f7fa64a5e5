"""Plans the memory of a layout without training: builds every kind of rank on the meta device, in one process."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megapar import context, device
from megapar.batch import MicroBatch, PipelineStage, Targets
from megapar.config.derive import num_microbatches
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config, ParallelConfig
from megapar.context import ParallelContext
from megapar.errors import OutOfMemoryError
from megapar.grid import rank_groups
from megapar.launch.grid import grid_of
from megapar.launch.reporting import tell
from megapar.main_grad import WeightGradientQueue, main_grads
from megapar.optimizer import table
from megapar.params import spec_of
from megapar.pipeline.actions import Action
from megapar.pipeline.sharding_plan import Item, most_live
from megapar.pipeline.zero_bubble import Memory
from megapar.stage_set import StageSet
from megapar.system import limits
from megapar.train import memory_report
from megapar.train.kept import DEFERRED, KeptBytes, Key
from megapar.train.memory_report import MemoryReport
from megapar.train.state import TrainState
from megapar.train.trainable import freeze, refuse
from megapar.train.trainer import assemble

META = torch.device("meta")
Build = Callable[[Config, ParallelContext], StageSet[PipelineStage]]
"""Builds the stages of one rank."""


@dataclass(frozen=True)
class RankReport:
    """The memory needed by one rank, in bytes.

    `pp` is the rank's position on axis pp, and `stages` says in words what it holds. `parameters` is a number of
    elements. `kept` is the most kept for backward passes at one time of the rank's schedule, by name
    (`memory_report.by_name`). `optimizer_on_host` is in host memory beside the device's, and in no total. Not counted
    are workspaces of kernels, and free memory held by the caching allocator.
    """

    pp: int
    stages: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    kept: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> dict[str, int]:
        """The bytes by the names in the report of train.memory_report."""
        rows = memory_report.rows(self.weights, self.gradients, self.optimizer, dict(self.kept))
        return rows | memory_report.on_host(self.optimizer_on_host)

    @property
    def activations(self) -> int:
        """The bytes kept for backward passes."""
        return sum(size for _, size in self.kept)

    @property
    def total(self) -> int:
        """All bytes in the device's memory."""
        return self.weights + self.gradients + self.optimizer + self.activations


def report(config: Config, build: Build) -> dict[RankReport, list[int]]:
    """The reports of the ranks, each with the ranks it is for.

    Data-parallel replicas need the same memory, and so do context-parallel ranks. So only the first of them is listed.
    If they hold different numbers of experts, the first of those with the same experts is listed. Tensor ranks with
    parameters of the same shapes need the same memory too. All of them are listed. To save time, only the first of them
    is planned.

    Raises ConfigError if train.trainable does not fit the model's parameters, or if an option is set that no optimizer
    reads.
    """
    patterns = config.train.trainable
    if patterns:
        # A rank has only a part of the parameters. To find patterns that match none at all, the whole model is built.
        alone = replace(config, parallel=ParallelConfig(dp=1, vpp=1))
        refuse(patterns, [freeze(build(alone, context.planned(grid_of(alone), 0, device=META)).values(), patterns)])
    parallel = config.parallel
    report_of_shapes: dict[tuple[object, ...], RankReport] = {}
    ranks_of_report: dict[RankReport, list[int]] = {}
    optimizers: set[str] = set()
    for rank in range(parallel.tp * parallel.cp * parallel.pp * parallel.dp):
        ctx = context.planned(grid_of(config), rank, device=META)
        experts_differ = config.model.moe.num_experts % ctx.ep.size > 0
        first_with_its_experts = experts_differ and ctx.expert_grad.first
        if not ctx.grad.first and not first_with_its_experts:
            continue
        stages = build(config, ctx)
        freeze(stages.values(), patterns)
        optimizers.update(table.names_of(stages.values()))
        shapes = _local_shapes(stages)
        if shapes not in report_of_shapes:
            report_of_shapes[shapes] = report_rank(config, build, rank)
        ranks_of_report.setdefault(report_of_shapes[shapes], []).append(rank)
    table.check(config.optimizer, optimizers)
    return ranks_of_report


def _local_shapes(stages: Mapping[int, PipelineStage]) -> tuple[object, ...]:
    """For each parameter: its stage, its shape with padding, and the shapes of its parts of logical tensors."""
    found = []
    for number, stage in stages.items():
        for param in stage.parameters():
            pieces = tuple(piece.local_shape for piece in spec_of(param).pieces)
            found.append((number, param.shape, pieces))
    return tuple(found)


def planned_device(config: Config) -> str:
    """The device named by `launch.device`, "cuda" or "cpu". For auto, the one this machine would choose."""
    if config.launch.device != "auto":
        return config.launch.device
    if device.cuda_devices():
        return "cuda"
    return "cpu"


def _with_kernels_of_the_planned_device(config: Config) -> Config:
    """Set `kernels.backend` to what auto means on the planned device. On the meta device auto would mean torch."""
    if config.kernels.backend != "auto" or planned_device(config) == "cpu":
        return config
    return replace(config, kernels=replace(config.kernels, backend="triton"))


def report_rank(config: Config, build: Build, rank: int) -> RankReport:
    """The memory needed by `rank`. Activations are those kept by the planned device's kernels."""
    config = _with_kernels_of_the_planned_device(config)
    ctx = context.planned(grid_of(config), rank, device=META)
    stages = build(config, ctx)
    freeze(stages.values(), config.train.trainable)
    state = assemble(config, ctx, stages, memory_limit(config, build))
    plan = state.pipeline.plan(num_microbatches(config), backward=True)
    gathered, collected = _most_of_units(state, plan)
    kept = {number: _kept_bytes(number, stages, config) for number in stages}
    in_halves = {item.stage for item in plan if isinstance(item, Action) and item.kind == "I"}
    deferred = {number: _deferred_bytes(number, stages, config) for number in in_halves}
    at_peak = _at_peak(plan, kept, deferred)
    optimizer, optimizer_on_host = memory_report.optimizer_nbytes(state, planned_device(config))
    return RankReport(
        pp=ctx.pp.rank,
        stages=_titles(stages),
        parameters=_num_parameters(stages),
        weights=state.weights.flat.nbytes + gathered + memory_report.frozen_nbytes(stages.values()),
        gradients=state.grads.flat.nbytes + collected,
        optimizer=optimizer,
        optimizer_on_host=optimizer_on_host,
        kept=tuple(memory_report.by_name(at_peak, stages).items()),
    )


def _num_parameters(stages: Mapping[int, PipelineStage]) -> int:
    """The number of elements of this rank's parameters, without padding."""
    # By id, because a tied embedding is a parameter of two stages, but stands in memory once.
    params = {id(param): param for stage in stages.values() for param in stage.parameters()}
    return sum(math.prod(piece.local_shape) for param in params.values() for piece in spec_of(param).pieces)


def _titles(stages: StageSet[PipelineStage]) -> str:
    """What the stages hold, in words. Of consecutive fine stages, only the first and the last are named."""
    runs: list[list[int]] = []
    for number in stages:
        if runs and stages.fine_stages and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = []
    for run in runs:
        first = stages[run[0]].title()
        last = stages[run[-1]].title()
        names.append(first if first == last else f"{first} to {last}")
    return "; ".join(names)


def _most_of_units(state: TrainState, plan: Sequence[Item]) -> tuple[int, int]:
    """The most bytes of gathered weights at one time, and the most of collected gradients.

    Both are 0 without ZeRO-2 and 3.
    """
    gathered = most_live(plan, state.weights.nbytes_of, "gather", "release")
    collected = most_live(plan, state.grads.nbytes_of, "open", "add")
    return gathered, collected


def _kept_bytes(number: int, stages: StageSet[PipelineStage], config: Config) -> dict[Key, int]:
    """Bytes kept by autograd for the backward of one micro-batch through a stage, by stage and kind."""
    kept = KeptBytes({number: stages[number]})
    with kept.counting():
        _forward(number, stages, config)
    # The most is kept at the end of the forward. By now its result is freed, and with it all that was kept.
    return dict(kept.at_peak)


def _deferred_bytes(number: int, stages: StageSet[PipelineStage], config: Config) -> int:
    """Bytes kept by the I of one micro-batch through a stage for its W.

    The parameters must have their main gradients (`assemble`).
    """
    output = _forward(number, stages, config)
    queue = WeightGradientQueue()
    with queue.open(main_grads(stages[number])):
        if output.requires_grad:
            output.backward(torch.empty_like(output))
    return queue.nbytes


def _forward(number: int, stages: StageSet[PipelineStage], config: Config) -> Tensor:
    """The output of a stage for one micro-batch, on the meta device."""
    samples = config.train.micro_batch_size
    length = config.train.seq_length
    tokens_bs = torch.zeros((samples, length), dtype=torch.int64, device=META)
    weights_bs = torch.zeros((samples, length), device=META)
    later = [Targets(tokens_bs, weights_bs)] * (stages.declared.num_targets - 1)
    whole = MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, sample_ids_b=tokens_bs[:, 0], later_targets=later)
    positions_s = torch.empty(length // config.parallel.cp, dtype=torch.int64, device=META)
    batch = whole.columns(positions_s)
    x_sbh = None  # the first stage receives nothing
    specs = stages[number].boundary(batch)
    if specs:
        x_sbh = torch.empty(specs[0].shape, dtype=specs[0].dtype, device=META, requires_grad=True)
    output: Tensor = stages[number](x_sbh, batch)
    return output


def _at_peak(plan: Sequence[Item], kept: Mapping[int, Mapping[Key, int]], deferred: Mapping[int, int]) -> Counter[Key]:
    """The bytes kept for backward passes, by stage and kind, when their sum is largest during the plan.

    For one micro-batch of a stage, `kept` has the bytes kept from F to its B or I, and `deferred` those kept from I to
    W. With recomputation `deferred` may be more.
    """
    live: Counter[Key] = Counter()
    peak = 0
    at_peak: Counter[Key] = Counter()
    for action in plan:
        if not isinstance(action, Action):
            continue
        match action.kind:
            case "F":
                live.update(kept[action.stage])
            case "B":
                live.subtract(kept[action.stage])
            case "I":
                live.subtract(kept[action.stage])
                live[action.stage, DEFERRED] += deferred[action.stage]
            case "W":
                live[action.stage, DEFERRED] -= deferred[action.stage]
        total = live.total()
        if total > peak:
            peak = total
            at_peak = live.copy()
    return at_peak


def memory_limit(config: Config, build: Build) -> Memory | None:
    """What parallel.schedule_memory_gb allows, and what each stage of the pipeline keeps. None if it is not given.

    The stages are built on the meta device, one pipeline rank after the other, as on the first replica and tensor rank.
    """
    parallel = config.parallel
    if not parallel.schedule_memory_gb:
        return None
    config = _with_kernels_of_the_planned_device(config)
    grid = grid_of(config)
    num_stages = parallel.pp * parallel.vpp
    forward = [0] * num_stages
    inputs = [0] * num_stages
    for rank in rank_groups(grid.sizes, ["pp"], grid.order)[0]:
        ctx = context.planned(grid, rank, device=META)
        stages = build(config, ctx)
        freeze(stages.values(), config.train.trainable)
        runtime = assemble(config, ctx, stages).pipeline
        # A schedule orders the stages of the pipeline, but with ZeRO-2 and 3 `stages` are fine stages, so their bytes
        # are added up.
        stage_of = [stage for stage, parts in enumerate(runtime.fine_stages) for _ in range(parts)]
        for number in stages:
            forward[stage_of[number]] += sum(_kept_bytes(number, stages, config).values())
            inputs[stage_of[number]] += _deferred_bytes(number, stages, config)
    return Memory(parallel.schedule_memory_gb * 2**30, forward, inputs)


def show(config: Config, build: Build, parameters: str, flops_per_token: int) -> None:
    """Print the sizes of the layout and of the batch, and the memory of each kind of rank.

    `parameters` is the number of parameters, in words.
    """
    console = Console(width=140)
    # As text, because rich ends the process with 1 if the reader has gone.
    with console.capture() as text:
        _write(config, build, parameters, flops_per_token, console)
    print(text.get(), end="")


def _write(config: Config, build: Build, parameters: str, flops_per_token: int, console: Console) -> None:
    """Write what `show` prints."""
    parallel = config.parallel
    train = config.train
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    tokens = train.global_batch_size * train.seq_length
    vocabulary = config.model.vocab_size
    console.print(
        f"{parameters}; "
        f"{counted(world, 'rank')} = {layout_in_words(parallel)}, "
        f"{counted(parallel.vpp, 'stage')} a rank, {parallel.schedule}\n"
        f"a step: {counted(train.global_batch_size, 'sample')} x {train.seq_length} tokens = {tokens:,} tokens, "
        f"{counted(num_microbatches(config), 'micro-batch', 'micro-batches')} of {train.micro_batch_size} a replica, "
        f"{flops_per_token * tokens / 1e15:,.3g} PFLOP; {counted(train.steps, 'step')} = "
        f"{train.samples() * train.seq_length:,} tokens\n"
        f"vocabulary {vocabulary:,} -> {-(-vocabulary // 128) * 128:,} rows, padded to a multiple of 128",
        highlight=False,
    )
    console.print(_planned_in_words(config), highlight=False)
    if parallel.balance == "measured" and not parallel.partition and parallel.pp * parallel.vpp > 1:
        console.print(
            "stages balanced by FLOPs here: with parallel.balance=measured a run measures when it first starts"
        )
    # Replicas and context-parallel ranks need the same memory, so `report` lists the first of them.
    ranks_listed = "ranks of replica 0" if parallel.cp == 1 else "ranks of replica 0, cp 0"
    if config.model.moe.num_experts % parallel.ep:
        # Ranks of other replicas are listed too, because they hold other numbers of experts.
        ranks_listed = "ranks"
    rows = Table(ranks_listed, "pp", "stages", title="GiB on each rank")
    for name in ("parameters", "weights", "gradients", "optimizer", "activations", "total"):
        rows.add_column(name, justify="right", no_wrap=True)
    reports = report(config, build)
    for r, ranks in reports.items():
        sizes = (r.weights, r.gradients, r.optimizer, r.activations, r.total)
        row = [" ".join(map(str, ranks)), str(r.pp), r.stages, f"{r.parameters:,}"]
        rows.add_row(*row, *(f"{n / 2**30:,.3f}" for n in sizes))
    console.print(rows)
    on_host = max(r.optimizer_on_host for r in reports)
    if on_host:
        console.print(f"and optimizer state in host memory, {on_host / 2**30:,.3f} GiB a rank at most", highlight=False)


def _planned_in_words(config: Config) -> str:
    name = {"cuda": "GPUs", "cpu": "CPUs"}[planned_device(config)]
    if config.launch.device != "auto":
        return f"planned for {name}"
    # The plan may be made on a laptop for a cluster, so the message names the flag for the other device.
    other = "--launch.device cpu plans for CPUs" if name == "GPUs" else "--launch.device cuda plans for GPUs"
    return f"planned for {name}, which launch.device auto chooses on this machine; {other}"


# When memory runs out


@contextmanager
def explaining_out_of_memory(config: Config, build: Build, rank: int) -> Iterator[None]:
    """A context around a run on `rank`. If memory or files run out within it, raises OutOfMemoryError.

    The error says in one line what the rank needs and which options would help, or which limit was reached.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        limit = limits.reached(error)
        if limit:
            raise OutOfMemoryError(limit) from error
        reason = device.out_of_memory(error)
        if not reason:
            raise
        needs = None
        # The plan fails too if the sizes are too large for torch, or if no memory is left to plan with. The error is
        # then raised without the bytes.
        with suppress(MemoryError, RuntimeError, OSError):
            needs = report_rank(config, build, rank)
        if needs and config.train.memory_report:
            tell(memory_report.in_words(f"memory of rank {rank}", {"planned": needs.rows}))
        raise OutOfMemoryError(f"{_in_words(needs)} ({reason}); {_what_would_help(config)}") from error


def memory_report_of(config: Config, build: Build, rank: int) -> MemoryReport | None:
    """The report of `rank` for train.memory_report, or None."""
    if not config.train.memory_report:
        return None
    return MemoryReport(report_rank(config, build, rank).rows)


def _in_words(needs: RankReport | None) -> str:
    """The memory a rank needs by plan, in words. `needs` is None if it could not be planned."""
    if needs is None:
        return "out of memory"
    sizes = {
        "weights": needs.weights,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations,
    }
    listed = ", ".join(f"{name} {size / 2**30:,.3f}" for name, size in sizes.items())
    return f"out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan ({listed}) and workspace"


def _what_would_help(config: Config) -> str:
    """Name the first three options to save memory here. The least costly come first."""
    parallel = config.parallel
    train = config.train
    zero_stage = config.optimizer.zero_stage
    several_replicas = parallel.dp * parallel.cp > 1  # ZeRO shards over them
    # What to try, the value now, and whether it applies.
    options = [
        ("smaller train.micro_batch_size", train.micro_batch_size, train.micro_batch_size > 1),
        ("train.recompute selective or full", train.recompute, train.recompute == "none"),
        ("train.recompute full", train.recompute, train.recompute == "selective"),
        ("optimizer.zero_stage 1", zero_stage, zero_stage == 0 and several_replicas),
        ("optimizer.zero_stage 2 or 3", zero_stage, zero_stage == 1 and several_replicas),
        ("kernels.loss_chunk 1024", config.kernels.loss_chunk, config.kernels.loss_chunk == 0),
        ("larger parallel.tp", parallel.tp, True),
        ("larger parallel.pp", parallel.pp, True),
        ("larger parallel.cp", parallel.cp, True),
        ("shorter train.seq_length", train.seq_length, True),
    ]
    first, second, third, *_ = [f"{text} (now {now})" for text, now, applies in options if applies]
    return f"try {first}, {second} or {third}"
