"""Turns the options of a job of Hugging Face's Trainer or DeepSpeed into a configuration of megapar.

    megapar from_deepspeed finetune.sh --ds_config ds_config.json --model llama3-8b --output job.toml
    megapar from_deepspeed arguments.json --world_size 8 --samples 52002
    megapar from_deepspeed ds_config.json --world_size 8
    megapar from_deepspeed -- torchrun --nproc_per_node 8 train.py --learning_rate 1e-5 ...

A launch script is read, not run. Values "auto" of the ds_config are those of the arguments. Three lists say what was
carried over, which defaults differ here, and what has no counterpart. The exit code is 0 if everything was carried
over, and 2 otherwise.

megapar migrate deepspeed is the same program.
"""

import sys
from functools import partial
from pathlib import Path

from megapar_models.registry import FOR_OPTIONS, named_configs, validate
from megapar_tools.migrate import deepspeed_job
from megapar_tools.migrate.account import Project
from megapar_tools.migrate.deepspeed_job import DeepSpeedJob as Arguments
from megapar_tools.migrate.finish import run

from megapar.launch.reporting import open_streams, reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"

account = partial(deepspeed_job.account, Project(FOR_OPTIONS, partial(named_configs, CONFIGS), validate))


def main() -> int:
    open_streams()
    with reported():
        return run({"deepspeed": (Arguments, account)}, __doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
