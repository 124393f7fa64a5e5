"""Turns a job of another framework into a configuration of megapar, and says what became of each of its options.

    megapar migrate megatron train.sh --output job.toml
    megapar migrate deepspeed finetune.sh --ds_config ds_config.json --model llama3-8b
    megapar migrate torchtitan llama3_8b.toml --world_size 64 -- --training.steps 5000

megatron reads GPT-NeoX's YAML too, and deepspeed Hugging Face's arguments and axolotl's. A launch script is read, not
run. Three lists say what was carried over, which defaults differ here, and what has no counterpart. The exit code is 0
if everything was carried over, and 2 otherwise.
"""

import sys
from functools import partial
from pathlib import Path

from megapar_models.convert.megatron import load_arguments
from megapar_models.registry import FOR_OPTIONS, named_configs, validate
from megapar_tools.migrate import deepspeed_job, megatron_job, torchtitan_job
from megapar_tools.migrate.account import Project
from megapar_tools.migrate.finish import run

from megapar.launch.reporting import open_streams, reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"
PROJECT = Project(FOR_OPTIONS, partial(named_configs, CONFIGS), validate)


JOBS = {
    "megatron": (megatron_job.MegatronJob, partial(megatron_job.account, PROJECT, load_arguments)),
    "deepspeed": (deepspeed_job.DeepSpeedJob, partial(deepspeed_job.account, PROJECT)),
    "torchtitan": (torchtitan_job.TorchtitanJob, partial(torchtitan_job.account, PROJECT)),
}


def main() -> int:
    open_streams()
    with reported():
        return run(JOBS, __doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
