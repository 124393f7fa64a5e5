"""Runs the training step of one rank in a world of any size, on this machine: its memory, messages and FLOPs.

It takes the flags and files of pretrain.py beside its own. --parallel.dp 0 takes what the world leaves. The code of the
step is that of a run. Tensors have shapes and no values, and messages are counted and not sent.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from megapar_models.build import StageBuilder, build_stages
from megapar_models.counts import size_and_flops
from megapar_models.registry import named_configs, validate
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megapar.config.derive import smallest_world, with_vocabulary
from megapar.config.files import load
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError
from megapar.expert_load import EVEN, ExpertLoad
from megapar.launch.grid import grid_of
from megapar.launch.reporting import open_streams, reported
from megapar.plan.choose_schedule import check_schedule
from megapar.plan.dry_run import planned_device
from megapar.plan.expert_loads import imbalanced, logged
from megapar.plan.simulate import Simulation, simulate
from megapar.system.atomic_files import write_json
from megapar.train.data import needs_tokenizer

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"


@dataclass
class Arguments:
    """Simulate the training step of one rank. All flags of pretrain.py are taken too (pretrain.py --help)."""

    world: int = 0
    """Ranks of the run; 0 means as many as the layout needs."""
    rank: int = 0
    """The rank whose step is run."""
    gpus_per_node: int = 8
    """Neighboring ranks on one node. Messages to other ranks go between nodes."""
    imbalance: float = 1.0
    """Of a mixture: this rank's experts get so many times their even share of the rows; 1 is an even load."""
    expert_rows: Path | None = None
    """Of a mixture: the folder expert_rows of a run with --train.memory_report, whose rows are taken instead."""
    json: Path | None = None
    """File for all numbers."""


def checked(args: Arguments, flags: list[str]) -> Config:
    """The config of pretrain.py's flags for the world. Raises ConfigError if it or the arguments cannot be."""
    given = load(flags, named_configs(CONFIGS)).config
    world = args.world or smallest_world(given.parallel)
    if world < 1:
        raise ConfigError(f"--world {args.world}: must be at least 1, or 0 for as many ranks as the layout needs")
    if args.gpus_per_node < 1:
        raise ConfigError(f"--gpus_per_node {args.gpus_per_node}: must be at least 1, such as 8")
    config = validate(given, world)
    if not 0 <= args.rank < world:
        raise ConfigError(f"--rank {args.rank}: the world of {counted(world, 'rank')} has the ranks 0 to {world - 1}")
    if needs_tokenizer(config):
        config = with_vocabulary(config, load_tokenizer(config.data.tokenizer).vocab_size)
    return check_schedule(given, config, build_stages)


def load_of(args: Arguments, config: Config) -> ExpertLoad:
    """The load of experts that the arguments ask for."""
    grid = grid_of(config)
    if args.expert_rows is None and args.imbalance == 1:
        return EVEN
    if not config.model.moe.num_experts:
        raise ConfigError(
            f"--imbalance, --expert_rows: model.family={config.model.family} has no experts; leave them out"
        )
    if args.expert_rows is None:
        _, ep_rank = grid.positions(args.rank)["ep"]
        return imbalanced(args.imbalance, config, ep_rank)
    if args.imbalance != 1:
        raise ConfigError(f"--imbalance {args.imbalance:g}: --expert_rows says the rows already; leave one out")
    return logged(args.expert_rows, grid, args.rank)


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


def to_json(found: Simulation, config: Config) -> dict[str, Any]:
    """What is written for --json."""
    _, needed = rows_of_model(config)
    traffic = {name: asdict(axis) | {"sent_inside_node": axis.sent_inside_node} for name, axis in found.traffic.items()}
    return {
        "rank": found.rank,
        "positions": {name: {"position": index, "size": size} for name, (index, size) in found.positions.items()},
        "memory_bytes": found.memory_bytes,
        "memory": dict(found.memory),
        "traffic": traffic,
        "flops": found.flops,
        "model_flops": needed,
    }


def main() -> None:
    open_streams()
    with reported():
        args, flags = tyro.cli(Arguments, description=__doc__, use_underscores=True, return_unknown_args=True)
        config = checked(args, flags)
        load_of_experts = load_of(args, config)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("simulating", total=None)
            found = simulate(
                config,
                StageBuilder(),
                args.rank,
                args.gpus_per_node,
                load_of_experts,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        print(show(found, config))
        if args.json:
            write_json(args.json, to_json(found, config))


if __name__ == "__main__":
    main()
