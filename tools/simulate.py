"""Runs the training step of one rank in a world of any size, on this machine: its memory, messages and FLOPs.

It takes the flags and files of pretrain.py beside its own. --parallel.dp 0 takes what the world leaves. The code of the
step is that of a run. Tensors have shapes and no values, and messages are counted and not sent.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from megapar_models.build import StageBuilder, build_stages
from megapar_models.counts import size_and_flops
from megapar_models.registry import FOR_OPTIONS, named_configs, validate
from megapar_tools.migrate.hints import hint
from megapar_tools.plan.choose import check_choices
from megapar_tools.plan.choose_schedule import planned_schedule
from megapar_tools.plan.expert_loads import imbalanced, logged
from megapar_tools.plan.hardware import load as load_hardware
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.simulate import Simulation, simulate
from megapar_tools.plan.stage_works import stages_of
from megapar_tools.plan.step_time import StepTime, step_time
from megapar_tools.plan.target import with_planned_kernels, with_planned_vocabulary
from megapar_tools.plan.work import AttentionWork, Kernel, Product, Started
from megapar_tools.trace.timeline import draw_over_each_other, write_chrome_trace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megapar.base.errors import ConfigError, storing
from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.config.derive import smallest_world
from megapar.config.files import load
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config
from megapar.launch.grid import grid_of
from megapar.launch.reporting import open_streams, reported
from megapar.system.atomic_files import write_json
from megapar.train.levers import planned_device
from megapar.train.run_plan import check_schedule

FORMATS = (".png", ".svg", ".json")
CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"


@dataclass
class Arguments:
    """Simulate the training step of one rank. All flags of pretrain.py are taken too (pretrain.py --help)."""

    world: Annotated[int, tyro.conf.arg(aliases=["--world_size", "--gpus"])] = 0
    """Ranks of the run; 0 means as many as the layout needs."""
    rank: int = 0
    """The rank whose step is run."""
    gpu: str = ""
    """A machine, such as h100-80g, or its TOML file: the time of the step is predicted for it. Empty: it is not."""
    gpus_per_node: int = 0
    """Neighboring ranks on one node. Messages to other ranks go between nodes. 0 means those of --gpu, or 8."""
    imbalance: float = 1.0
    """Of a mixture: this rank's experts get so many times their even share of the rows; 1 is an even load."""
    expert_rows: Path | None = None
    """Of a mixture: the folder expert_rows of a run with --train.memory_report, whose rows are taken instead."""
    json: Path | None = None
    """File for all numbers."""
    timeline: Path | None = None
    """With --gpu, a file for the predicted timeline of the pipeline: .png or .svg, or .json for ui.perfetto.dev."""


def checked(args: Arguments, flags: list[str], parts: Parts) -> Config:
    """The config of pretrain.py's flags for the world. Raises ConfigError if it or the arguments cannot be."""
    given = load(flags, named_configs(CONFIGS), FOR_OPTIONS, hint).config
    world = args.world or smallest_world(given.parallel)
    if world < 1:
        raise ConfigError(f"--world {args.world}: must be at least 1, or 0 for as many ranks as the layout needs")
    if args.gpus_per_node < 0:
        raise ConfigError(f"--gpus_per_node {args.gpus_per_node}: must be at least 1, or 0 for that of --gpu")
    if args.timeline and not args.gpu:
        raise ConfigError(f"--timeline {args.timeline}: its times come from --gpu; add it, such as --gpu h100-80g")
    if args.timeline and args.timeline.suffix not in FORMATS:
        raise ConfigError(f"--timeline {args.timeline}: the name must end in {', '.join(FORMATS)}")
    if args.gpu and given.launch.device == "auto":
        given = replace(given, launch=replace(given.launch, device="cuda"))
    config = validate(given, world)
    if not 0 <= args.rank < world:
        raise ConfigError(f"--rank {args.rank}: the world of {counted(world, 'rank')} has the ranks 0 to {world - 1}")
    config = with_planned_vocabulary(config)
    check_schedule(config)
    return check_choices(replace(planned_schedule(given, config, parts), gpu=args.gpu or "auto"), parts)


def load_of(args: Arguments, config: Config) -> ExpertLoad:
    """The load of experts that the arguments ask for."""
    grid = grid_of(config)
    if args.expert_rows is None and args.imbalance == 1:
        return EVEN
    if not config.model.num_experts:
        raise ConfigError(
            f"--imbalance, --expert_rows: model.family={config.model.family} has no experts; leave them out"
        )
    if args.expert_rows is None:
        _, ep_rank = grid.positions(args.rank)["ep"]
        return imbalanced(args.imbalance, config, ep_rank)
    if args.imbalance != 1:
        raise ConfigError(f"--imbalance {args.imbalance:g}: --expert_rows says the rows already; leave one out")
    return logged(args.expert_rows, grid, args.rank)


def predicted(args: Arguments, config: Config) -> StepTime | None:
    """The time of the step on --gpu, None without it."""
    if not args.gpu:
        return None
    parts = Parts(StageBuilder())
    return step_time(with_planned_kernels(config), parts, load_hardware(args.gpu, args.gpus_per_node), timeline=True)


def time_in_words(gpu: str, time: StepTime) -> str:
    """The predicted time, and what it consists of."""
    exposed = ", ".join(f"{axis} {seconds:.4g} s" for axis, seconds in time.exposed.items() if seconds)
    return (
        f"predicted on {gpu}: {time.seconds:.4g} s a step, {time.tokens_per_second_per_gpu:,.1f} tokens/s a GPU, "
        f"{time.mfu:.1%} MFU, {time.idle_share:.1%} idle\ncommunication exposed, on the mean rank: {exposed or 'none'}"
    )


def of_a_layer(config: Config, parts: Parts) -> str:
    """What one micro-batch does in a layer, in words: of the layers that are alike, those there are most of."""
    stages = stages_of(with_planned_kernels(config), parts)
    recording, _ = max((part for stage in stages for part in stage), key=lambda part: part[1])
    words = []
    for name, operations in (("forward", recording.forward), ("backward", recording.backward)):
        computed = [x for x in operations if isinstance(x, (Product, AttentionWork, Kernel))]
        moved = sum(x.moved_bytes for x in computed)
        sent = sum(isinstance(x, Started) for x in operations)
        words.append(
            f"{name} {len(computed)} operations, {moved / 1e9:,.2f} GB moved, {counted(sent, 'communication')}"
        )
    return f"a layer, one micro-batch (products of all experts are one operation): {'; '.join(words)}"


def draw(path: Path, gpu: str, time: StepTime) -> None:
    """Write the timeline of the pipeline in the format of the file's extension."""
    timelines = {f"predicted on {gpu}": time.events}
    with storing(path):
        if path.suffix == ".json":
            write_chrome_trace(timelines, path, 1.0)
        else:
            draw_over_each_other(timelines, path, "s")


def rows_of_model(config: Config) -> tuple[str, float]:
    """The size of the model in words, and the FLOPs that it needs in a step for one rank of the layout, on average."""
    words, flops_per_token = size_and_flops(config)
    parallel = config.parallel
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    return words, flops_per_token * config.train.global_batch_size * config.train.seq_length / world


def show(found: Simulation, config: Config) -> str:
    """What is printed."""
    parallel = config.parallel
    words, needed = rows_of_model(config)
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    places = ", ".join(f"{name} {index} of {size}" for name, (index, size) in found.positions.items())
    lines = [
        f"{words}; {counted(world, 'rank')} = {layout_in_words(parallel)}",
        f"rank {found.rank}: {places or 'alone'}; {found.stages}",
        f"planned for {planned_device(config)}",
    ]
    memory = Table("memory", "GiB", title_justify="left")
    memory.columns[1].justify = "right"
    for name, nbytes in [*found.memory.items(), ("all in the device's memory", found.memory_bytes)]:
        memory.add_row(name, f"{nbytes / 2**30:,.3f}")
    messages = Table("axis", "ranks", "nodes", "calls", "MiB inside the node", "MiB to other nodes")
    for column in messages.columns[4:]:
        column.justify = "right"
    for name, axis in found.traffic.items():
        calls = ", ".join(f"{operation} {number:,}" for operation, number in axis.calls.items())
        inside = f"{axis.sent_inside_node / 2**20:,.3f}"
        messages.add_row(
            name, f"{axis.ranks:,}", f"{axis.nodes:,}", calls, inside, f"{axis.sent_to_other_nodes / 2**20:,.3f}"
        )
    console = Console(width=120)
    with console.capture() as text:
        console.print(memory)
        if found.traffic:
            console.print(messages)
    share = f"{found.flops / 1e15:,.6g} PFLOP of products; the model needs {needed / 1e15:,.6g} a rank on average"
    return "\n".join([*lines, text.get().rstrip(), share])


def to_json(found: Simulation, config: Config, time: StepTime | None) -> dict[str, Any]:
    """What is written for --json."""
    _, needed = rows_of_model(config)
    traffic = {name: asdict(axis) | {"sent_inside_node": axis.sent_inside_node} for name, axis in found.traffic.items()}
    numbers = {
        "rank": found.rank,
        "positions": {name: {"position": index, "size": size} for name, (index, size) in found.positions.items()},
        "memory_bytes": found.memory_bytes,
        "memory": dict(found.memory),
        "traffic": traffic,
        "flops": found.flops,
        "model_flops": needed,
    }
    if time:
        numbers["step_seconds"] = time.seconds
        numbers["idle_share"] = time.idle_share
        numbers["exposed_seconds"] = dict(time.exposed)
        numbers["tokens_per_second_per_gpu"] = time.tokens_per_second_per_gpu
        numbers["mfu"] = time.mfu
    return numbers


def main() -> None:
    open_streams()
    with reported():
        args, flags = tyro.cli(Arguments, description=__doc__, use_underscores=True, return_unknown_args=True)
        parts = Parts(StageBuilder())
        config = checked(args, flags, parts)
        load_of_experts = load_of(args, config)
        time = predicted(args, config)
        per_node = args.gpus_per_node or 8
        if args.gpu:
            per_node = load_hardware(args.gpu, args.gpus_per_node).gpus_per_node
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("simulating", total=None)
            found = simulate(
                config,
                build_stages,
                parts,
                args.rank,
                per_node,
                load_of_experts,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        print(show(found, config))
        if time:
            print(of_a_layer(config, parts))
            print(time_in_words(args.gpu, time))
        if time and args.timeline:
            draw(args.timeline, args.gpu, time)
        if args.json:
            write_json(args.json, to_json(found, config, time))


if __name__ == "__main__":
    main()
