"""Plans the memory of a layout without training: builds every kind of rank on the meta device, without processes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megapar import context, device
from megapar.batch import MicroBatch, PipelineStage
from megapar.config import Config, ParallelConfig
from megapar.context import ParallelContext
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.derive import num_microbatches
from megapar.errors import OutOfMemoryError, tell
from megapar.main_grad import WeightGradientQueue, main_grads
from megapar.messages import counted, layout_in_words
from megapar.params import spec_of
from megapar.pipeline.actions import Action
from megapar.pipeline.sharding_plan import Item, most_live
from megapar.pipeline.zero_bubble import Memory
from megapar.train import memory_report
from megapar.train.grid import with_grid
from megapar.train.kept import PUT_OFF, KeptBytes, Key
from megapar.train.memory_report import MemoryReport
from megapar.train.step import TrainState
from megapar.train.trainable import freeze, refuse
from megapar.train.trainer import assemble

META = torch.device("meta")
Build = Callable[[Config, ParallelContext], Mapping[int, PipelineStage]]


@dataclass(frozen=True)
class RankReport:
    """The memory that one rank needs, in bytes.

    `parameters` is a number of elements. `kept` is the most that the rank's forwards keep for their backwards at one
    time, in the order of its schedule, by name (`memory_report.by_name`). Workspaces of kernels and what the caching
    allocator holds come on top.
    """

    pp: int
    stages: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    kept: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> dict[str, int]:
        """The bytes as the report of train.memory_report shows them."""
        return memory_report.rows(self.weights, self.gradients, self.optimizer, dict(self.kept))

    @property
    def activations(self) -> int:
        return sum(size for _, size in self.kept)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def report(config: Config, build: Build) -> dict[RankReport, list[int]]:
    """Group the ranks by the memory that they need. Ranks that certainly need the same as a listed one are left out.

    Data-parallel replicas need the same memory, and so do context-parallel ranks, so only the first is built. If they
    hold different numbers of experts, the first of those that hold the same experts is built. Tensor ranks whose
    parameters have the same shapes need the same memory too, so it is counted for the first of them.
    """
    patterns = config.train.trainable
    if patterns:
        # In the whole model, a pattern that no parameter of any stage matches shows.
        alone = replace(config, parallel=ParallelConfig(dp=1, vpp=1))
        refuse(patterns, [freeze(build(alone, _context(alone, 0)).values(), patterns)])
    parallel = config.parallel
    ranks_by_report: dict[RankReport, list[int]] = {}
    by_shapes: dict[tuple[object, ...], RankReport] = {}
    for rank in range(parallel.tp * parallel.cp * parallel.pp * parallel.dp):
        ctx = _context(config, rank)
        experts_differ = config.model.moe.num_experts % ctx.ep.size > 0
        if not ctx.grad.first and not (experts_differ and ctx.expert_grad.first):
            continue
        shapes = _local_shapes(build(config, ctx))
        if shapes not in by_shapes:
            by_shapes[shapes] = report_rank(config, build, rank)
        ranks_by_report.setdefault(by_shapes[shapes], []).append(rank)
    return ranks_by_report


def _local_shapes(stages: Mapping[int, PipelineStage]) -> tuple[object, ...]:
    """For each parameter of each stage: its shape with padding, and the shapes of its parts of logical tensors."""
    return tuple(
        (number, param.shape, tuple(piece.local_shape for piece in spec_of(param).pieces))
        for number, stage in stages.items()
        for param in stage.parameters()
    )


def planned_device(config: Config) -> str:
    """The device that `launch.device` names, "cuda" or "cpu"; for auto, the one that this machine would choose."""
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if device.cuda_devices() else "cpu"


def _with_kernels_of_the_planned_device(config: Config) -> Config:
    """Set `kernels.backend` to what auto means on the planned device: on the meta device auto always means torch."""
    if config.kernels.backend != "auto" or planned_device(config) == "cpu":
        return config
    return replace(config, kernels=replace(config.kernels, backend="triton"))


def _context(config: Config, rank: int) -> ParallelContext:
    plan = with_grid(context.planned, config)
    return plan(rank, device=META)


def report_rank(config: Config, build: Build, rank: int) -> RankReport:
    """The memory of `rank`, with the activations that the planned device's kernels keep. Needs no process group."""
    config = _with_kernels_of_the_planned_device(config)
    ctx = _context(config, rank)
    stages = build(config, ctx)
    freeze(stages.values(), config.train.trainable)
    state = assemble(config, ctx, stages, memory_limit(config, build))
    kept = {number: _kept_bytes(number, stage, config) for number, stage in stages.items()}
    plan = state.pipeline.plan(num_microbatches(config), backward=True)
    gathered, collected = _most_of_units(state, plan)
    in_halves = {item.stage for item in plan if isinstance(item, Action) and item.kind == "I"}
    left = {number: _left_bytes(stages[number], config) for number in in_halves}
    # By id: a tied embedding is a parameter of two stages, but stands in memory once.
    params = {id(p): p for stage in stages.values() for p in stage.parameters()}.values()
    return RankReport(
        ctx.pp.rank,
        _titles(stages),
        sum(torch.Size(piece.local_shape).numel() for p in params for piece in spec_of(p).pieces),
        state.weights.flat.nbytes + gathered + memory_report.frozen_nbytes(stages.values()),
        state.grads.flat.nbytes + collected,
        state.optimizer.nbytes,
        tuple(memory_report.by_name(_at_peak(plan, kept, left), stages).items()),
    )


def _titles(stages: Mapping[int, PipelineStage]) -> str:
    """What the stages hold, in words. Of fine stages that follow each other, the first and the last."""
    runs: list[list[int]] = []
    for number, stage in stages.items():
        if runs and stage.fine_stages and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ends = [list(dict.fromkeys((stages[run[0]].title(), stages[run[-1]].title()))) for run in runs]
    return "; ".join(" to ".join(titles) for titles in ends)


def _most_of_units(state: TrainState, plan: Sequence[Item]) -> tuple[int, int]:
    """The most bytes that gathered weights, and gradients that are being collected, take at one time."""
    gathered = 0
    if isinstance(state.weights, UnitWeights):
        gathered = most_live(plan, state.weights.nbytes_of, "gather", "release")
    collected = 0
    if isinstance(state.grads, UnitGradients):
        collected = most_live(plan, state.grads.nbytes_of, "open", "add")
    return gathered, collected


def _kept_bytes(number: int, stage: PipelineStage, config: Config) -> dict[Key, int]:
    """Bytes that autograd keeps for the backward of one micro-batch through `stage`, by kind, without parameters."""
    kept = KeptBytes({number: stage})
    with kept.counting():
        _forward(stage, config)
    # What a forward has kept lives as long as its result. So it is most at the end, before the result is dropped.
    return dict(kept.at_peak)


def _left_bytes(stage: PipelineStage, config: Config) -> int:
    """Bytes that the I of one micro-batch through `stage` leaves to its W. The stage has its main gradients."""
    output = _forward(stage, config)
    queue = WeightGradientQueue()
    with queue.open(main_grads(stage)):
        if output.requires_grad:
            output.backward(torch.empty_like(output))
    return queue.nbytes


def _forward(stage: PipelineStage, config: Config) -> Tensor:
    """The output of a stage for one micro-batch."""
    shape = config.train.micro_batch_size, config.train.seq_length
    tokens = torch.zeros(shape, dtype=torch.int64, device=META)
    samples = MicroBatch.of_samples(tokens, tokens, torch.zeros(shape, device=META), tokens[:, 0])
    batch = samples.columns(torch.empty(shape[1] // config.parallel.cp, dtype=torch.int64, device=META))
    specs = stage.boundary(batch)
    inputs = [torch.empty(s.shape, dtype=s.dtype, device=META, requires_grad=True) for s in specs]
    x_sbh = None  # the first stage receives nothing
    if inputs:
        x_sbh = inputs[0]
    output: Tensor = stage(x_sbh, batch)
    return output


def kept_for_backward(forward: Callable[[], object], without: Iterable[Tensor]) -> int:
    """Run `forward()`; returns the bytes of the storages that autograd keeps for its backward pass.

    The storages of the tensors `without` are not counted. A storage that several tensors share is counted once.
    """
    known = {x.untyped_storage()._cdata for x in without}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def _at_peak(plan: Sequence[Item], kept: Mapping[int, Mapping[Key, int]], left: Mapping[int, int]) -> Counter[Key]:
    """What is kept for backwards when it is most.

    By stage, a forward keeps the bytes `kept` for its B or I, and an I leaves the bytes `left` to its W. With
    recomputation `left` may be more.
    """
    sizes = {stage: sum(by_kind.values()) for stage, by_kind in kept.items()}
    forwards: Counter[int] = Counter()  # micro-batches of each stage that wait for their B or I
    halves: Counter[int] = Counter()  # micro-batches of each stage that wait for their W
    at_peak = forwards, halves
    total = most = 0
    for action in plan:
        if not isinstance(action, Action):
            continue
        stage = action.stage
        if action.kind == "W":
            halves[stage] -= 1
            total -= left[stage]
            continue
        sign = 1 if action.kind == "F" else -1
        forwards[stage] += sign
        total += sign * sizes[stage]
        if action.kind == "I":
            halves[stage] += 1
            total += left[stage]
        if total > most:
            most = total
            at_peak = forwards.copy(), halves.copy()
    forwards, halves = at_peak
    found = Counter({key: forwards[stage] * size for stage in kept for key, size in kept[stage].items()})
    found.update({(stage, PUT_OFF): halves[stage] * size for stage, size in left.items()})
    return found


def memory_limit(config: Config, build: Build) -> Memory | None:
    """What parallel.schedule_memory_gb allows, and what each stage of the pipeline keeps. None if it is not given.

    The stages are those of the first replica and tensor rank, built on the meta device one pipeline rank after another.
    """
    parallel = config.parallel
    if not parallel.schedule_memory_gb:
        return None
    config = _with_kernels_of_the_planned_device(config)
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}
    num_stages = parallel.pp * parallel.vpp
    forward = [0] * num_stages
    inputs = [0] * num_stages
    for rank in context.rank_groups(sizes, ["pp"], parallel.order)[0]:
        ctx = _context(config, rank)
        stages = build(config, ctx)
        freeze(stages.values(), config.train.trainable)
        runtime = assemble(config, ctx, stages).pipeline
        # A schedule orders whole stages, also where the runtime splits them into fine ones.
        whole = [stage for stage, parts in enumerate(runtime.fine_stages) for _ in range(parts)]
        for number, stage in stages.items():
            forward[whole[number]] += sum(_kept_bytes(number, stage, config).values())
            inputs[whole[number]] += _left_bytes(stage, config)
    return Memory(parallel.schedule_memory_gb * 2**30, forward, inputs)


def show(config: Config, build: Build, parameters: str, flops_per_token: int, console: Console) -> None:
    """Print the arithmetic of the batch, and the memory of every kind of rank.

    `parameters` is the number of parameters, in words.
    """
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
        ranks_listed = "ranks"  # those of other replicas too, which hold other numbers of experts
    table = Table(ranks_listed, "pp", "stages", title="GiB on each rank")
    for name in ("parameters", "weights", "gradients", "optimizer", "activations", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for r, ranks in report(config, build).items():
        sizes = (r.weights, r.gradients, r.optimizer, r.activations, r.total)
        row = [" ".join(map(str, ranks)), str(r.pp), r.stages, f"{r.parameters:,}"]
        table.add_row(*row, *(f"{n / 2**30:,.3f}" for n in sizes))
    console.print(table)


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
    """A context around a run on `rank`. If memory runs out within it, raises OutOfMemoryError.

    The error says in one line what the rank needs and which options would help.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        reason = device.out_of_memory(error)
        if not reason:
            raise
        needs = None
        with suppress(MemoryError, RuntimeError):  # too large to be counted, or no memory is left to count with
            needs = report_rank(config, build, rank)
        if needs and config.train.memory_report:
            tell(memory_report.in_words(f"memory of rank {rank}", {"planned": needs.rows}))
        raise OutOfMemoryError(f"{_in_words(needs)} ({reason}); {_what_would_help(config)}") from error


def memory_report_of(config: Config, build: Build, rank: int) -> MemoryReport | None:
    """The report of `rank` that train.memory_report asks for, or None."""
    if not config.train.memory_report:
        return None
    return MemoryReport(report_rank(config, build, rank).rows)


def _in_words(needs: RankReport | None) -> str:
    """The memory that a rank needs by plan, in words. None if it could not be counted."""
    if needs is None:
        return "out of memory"
    parts = {
        "weights": needs.weights,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations,
    }
    listed = ", ".join(f"{name} {size / 2**30:,.3f}" for name, size in parts.items())
    return f"out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan ({listed}) and workspace"


def _what_would_help(config: Config) -> str:
    """Name the first three options that would save memory here. The cheap ones come first."""
    parallel = config.parallel
    train = config.train
    options = [
        ("smaller train.micro_batch_size", train.micro_batch_size, train.micro_batch_size > 1),
        ("train.recompute selective or full", train.recompute, train.recompute == "none"),
        ("train.recompute full", train.recompute, train.recompute == "selective"),
        ("optimizer.zero_stage 1", 0, config.optimizer.zero_stage == 0 and parallel.dp * parallel.cp > 1),
        (
            "optimizer.zero_stage 2 or 3",
            config.optimizer.zero_stage,
            config.optimizer.zero_stage == 1 and parallel.dp * parallel.cp > 1,
        ),
        ("kernels.loss_chunk 1024", config.kernels.loss_chunk, config.kernels.loss_chunk == 0),
        ("larger parallel.tp", parallel.tp, True),
        ("larger parallel.pp", parallel.pp, True),
        ("larger parallel.cp", parallel.cp, True),
        ("shorter train.seq_length", train.seq_length, True),
    ]
    apply = [f"{text} (now {now})" for text, now, applies in options if applies]
    return f"try {', '.join(apply[:2])} or {apply[2]}"
