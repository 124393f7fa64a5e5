"""A training loop of your own: python own_loop.py --config C.toml [--section.key value ...], or under torchrun."""

import sys
from contextlib import closing
from pathlib import Path

from megapar_models.build import build_stages
from megapar_models.registry import FOR_OPTIONS, num_targets, validate

from megapar.config.files import load
from megapar.launch.rank_process import job
from megapar.launch.reporting import reported
from megapar.step.step import train_step
from megapar.system import environment
from megapar.train.checkpoints import lock_run_dir
from megapar.train.data import go_on, identity, open_loaders
from megapar.train.saver import Saver
from megapar.train.trainer import start

with reported():
    env = environment.read()  # one process, or the rank that torchrun or Slurm started
    config = validate(load(sys.argv[1:], families=FOR_OPTIONS).config, env.world_size)
run_dir = Path(config.run_dir)
with job(config, env) as (ctx, process):
    train_data, validation_sets = open_loaders(config, ctx, num_targets(config))
    with lock_run_dir(run_dir, ctx, process):
        # Step 0, or the checkpoint of checkpoint.resume; the second result are lines for the user.
        state, _ = start(config, ctx, build_stages(config, ctx), identity(train_data, validation_sets))
        go_on(state, train_data, validation_sets)  # with the samples behind those of the checkpoint
        process.arm()  # from here on a request to stop ends the run with a save
        with Saver(state, run_dir) as saver, closing(train_data):
            stop = state.step == config.train.steps
            while not stop:
                result = train_step(state, train_data.next_step(), asked_to_stop=process.asked_to_stop() != "")
                if ctx.world.first:
                    print(f"step {result.step} | loss {result.loss:.4f}")
                stop = result.stop or state.step == config.train.steps
                if saver.due(state.step, last=stop):
                    saver.save(state)
