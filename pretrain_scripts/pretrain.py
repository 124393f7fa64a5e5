"""Pretrain a transformer: pretrain.py --config C.toml [--section.key value ...], by itself, under torchrun or Slurm."""

import sys
from pathlib import Path

from megapar_models.build import StageBuilder, build_stages, described
from megapar_models.counts import size_and_flops
from megapar_models.doors import opened
from megapar_models.registry import FOR_OPTIONS, named_configs, num_targets, sample_kind, validate

from megapar.comm.flight import Board
from megapar.config.files import load
from megapar.launch.rank_process import job
from megapar.launch.reporting import begin_program, exits_refused, reported
from megapar.launch.restarts import read_job, run_job
from megapar.observe.report import write_run_header
from megapar.system.environment import Environment
from megapar.train.checkpoints import lock_run_dir
from megapar.train.data import go_on, identity, open_loaders
from megapar.train.doors import hint
from megapar.train.report_at_end import ReportAtEnd
from megapar.train.run_plan import RunPlan
from megapar.train.trainer import TrainingRun, initializes_by_unit, start, train


def train_rank(plan: RunPlan, env: Environment, board: Board | None = None) -> None:
    """Train on one rank. Ranks of the local launcher log what they do on `board`."""
    with job(plan.config, env, board, plan.explained(env.rank, launcher_plans=board is not None)) as (ctx, process):
        plan, balance = plan.measured(ctx)
        config, run_dir = plan.config, Path(plan.config.run_dir)
        data, held_out = open_loaders(config, ctx, num_targets(config), sample_kind(config))
        limit, on_host = plan.memory_limit(), plan.host_bytes_of_inputs(env.rank)
        with lock_run_dir(run_dir, ctx, process):
            stages = build_stages(config, ctx, allocate=not initializes_by_unit(config))
            samples, foreign = identity(data, held_out), opened(config, ctx)
            state, notes = start(config, ctx, stages, samples, limit, env, on_host, foreign)
            go_on(state, data, held_out)
            model, flops = described(config, ctx.device)
            write_run_header(config, ctx, model, [*balance, *notes], plan.options.to_toml())
            process.arm()  # last: until here there is nothing to save, so a request to stop ends the run
            report, time = plan.memory_report(env.rank), plan.prediction(ctx)
            run = TrainingRun(state, data, held_out, run_dir, flops, process.asked_to_stop, report, time, process)
            process.stopped = train(run)


def main() -> int:
    speaker = begin_program()
    presets = named_configs(Path(__file__).parent / "configs")
    with reported(speaker):
        given = load(sys.argv[1:], presets, FOR_OPTIONS, hint)  # --help ends here
    with ReportAtEnd() as report, reported(speaker), exits_refused():
        if given.config.dry_run:
            RunPlan.of(given, validate, StageBuilder()).show(size_and_flops)
            return 0
        env, world_size = read_job(given.config)
        plan = RunPlan.of(given, validate, StageBuilder(), world_size)
        report.run_dir = Path(plan.config.run_dir) if env.rank == 0 else None
        return run_job(train_rank, plan, env)


if __name__ == "__main__":
    sys.exit(main())
