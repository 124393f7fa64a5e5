"""Pretrain a transformer: python pretrain_scripts/pretrain.py --config C.toml [--section.key value ...].

Under torchrun or Slurm, or with local ranks of its own by --launch.nproc N."""

import sys
from functools import partial
from pathlib import Path

from megapar_models.balance import times_of_stages, with_measured_partition
from megapar_models.build import StageBuilder, build_stages
from megapar_models.counts import size_and_flops
from megapar_models.registry import FOR_OPTIONS, named_configs, num_targets, sample_kind, validate

from megapar.base.errors import Preempted
from megapar.comm.flight import Board
from megapar.config.derive import smallest_world
from megapar.config.elastic import fitted
from megapar.config.files import Resolved, load, to_toml
from megapar.config.options import Config
from megapar.dashboard.page import ReportAtEnd
from megapar.launch.rank_process import join, leave, rank_process, refuse_start
from megapar.launch.reporting import exits_refused, open_streams, reported
from megapar.launch.restarts import keep_running
from megapar.migrate.hints import hint
from megapar.observe.report import write_run_header
from megapar.plan import choose_memory, dry_run, memory, out_of_memory, predicted
from megapar.plan.choose_schedule import check_schedule, with_chosen_schedule
from megapar.plan.parts import Parts
from megapar.system import environment, limits
from megapar.train.checkpoints import lock_run_dir
from megapar.train.data import go_on, identity, open_loaders, with_vocabulary_of_tokenizer
from megapar.train.trainer import Run, initializes_by_unit, start, train


def check(resolved: Resolved, world_size: int) -> Config:
    """Check the configuration for `world_size` ranks; returns it with derived values filled in."""
    config = with_vocabulary_of_tokenizer(validate(resolved.config, world_size))
    return choose_memory.check_choices(check_schedule(resolved.config, config, parts := Parts(StageBuilder())), parts)


def run(resolved: Resolved, config: Config, env: environment.Environment, board: Board | None = None) -> None:
    """Train on one rank. Ranks of the local launcher log what they do on `board`."""
    valid, parts = partial(validate, world_size=env.world_size), Parts(StageBuilder())
    explained = out_of_memory.Explanation(config, resolved.config, valid, parts, env.rank, board is not None)
    with explained.around(), rank_process(config, env, board) as process, explained.around():  # the outer: its threads
        ctx = join(config, env, process)
        resolved, config = with_chosen_schedule(resolved, config, ctx, times_of_stages, parts)
        resolved, config, balance = with_measured_partition(resolved, config, ctx)
        data, held_out = open_loaders(config, ctx, num_targets(config), sample_kind(config))
        limit = memory.memory_limit(config, parts)
        on_host = memory.host_bytes_of_inputs(config, parts, env.rank)
        with lock_run_dir(run_dir := Path(config.run_dir), ctx):
            process.claim_run_dir(run_dir)
            stages = build_stages(config, ctx, allocate=not initializes_by_unit(config))
            state, notes = start(config, ctx, stages, identity(data, held_out), limit, env, on_host)
            go_on(state, data, held_out)
            size, flops = size_and_flops(config)
            write_run_header(config, ctx, size, [*balance, *notes], to_toml(resolved, config))
            process.arm()  # last: until here there is nothing to save, so a request to stop ends the run
            report = dry_run.memory_report_of(config, parts, env.rank)
            time = predicted.prediction_of(config, parts, ctx)
            stopped = train(Run(state, data, held_out, run_dir, flops, process.asked_to_stop, report, time, process))
        leave(ctx)
        if stopped:
            raise Preempted(stopped)


def prepare(resolved: Resolved, world_size: int) -> partial[None]:
    """The program of a rank of `world_size` ranks. They may be fewer than the options ask for (launch.min_dp)."""
    resolved = fitted(resolved, world_size)
    return partial(run, resolved, check(resolved, world_size))


def plan(resolved: Resolved) -> None:
    """Print what each rank of the layout would hold. It does not matter how this process was started."""
    world = resolved.config.launch.nproc or smallest_world(resolved.config.parallel)
    config = check(resolved, world)
    dry_run.show(config, Parts(StageBuilder()), *size_and_flops(config))
    predicted.show_verdict(resolved.config, config, Parts(StageBuilder()), partial(validate, world_size=world))


def main() -> int:
    open_streams()
    limits.raise_open_files()
    # Ranks have not met yet, so one process prints an error for all of them.
    speaker = 0 if environment.first_to_speak() else 1
    presets = named_configs(Path(__file__).parent / "configs")
    with reported(speaker):
        resolved = load(sys.argv[1:], presets, FOR_OPTIONS, hint)  # --help ends here
    with ReportAtEnd() as report, reported(speaker), exits_refused():
        if resolved.config.dry_run:
            plan(resolved)
            return 0
        env = environment.read()
        refuse_start(resolved.config)
        world = env.world_size if env.launched else max(resolved.config.launch.nproc, 1)
        config = (main_of_rank := prepare(resolved, world)).args[1]
        report.run_dir = Path(config.run_dir) if env.rank == 0 else None
        if not env.launched and (world > 1 or config.launch.max_restarts):
            valid, parts = partial(validate, world_size=world), Parts(StageBuilder())
            advise = out_of_memory.Explanation(config, resolved.config, valid, parts).advise
            return keep_running(main_of_rank, partial(prepare, resolved), config, advise)
        main_of_rank(env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
