"""Turns the options of a job of Megatron-LM into a configuration of megapar, and says what became of each.

    megapar from_megatron train.sh --output job.toml
    megapar from_megatron args.json --world_size 64
    megapar from_megatron CHECKPOINT
    megapar from_megatron -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 ...

YAML of GPT-NeoX is read too. A launch script is read, not run. Of a checkpoint (--ckpt-format torch) the saved
arguments are read, and no code in it is run. Three lists say what was carried over, which defaults differ here, and
what has no counterpart. The exit code is 0 if everything was carried over, and 2 otherwise.

megapar migrate megatron is the same program.
"""

import sys
from functools import partial
from pathlib import Path

from megapar_models.convert.megatron import load_arguments
from megapar_models.registry import FOR_OPTIONS, named_configs, validate
from megapar_tools.migrate import megatron_job
from megapar_tools.migrate.account import Project
from megapar_tools.migrate.finish import run
from megapar_tools.migrate.megatron_job import MegatronJob as Arguments

from megapar.launch.reporting import open_streams, reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"

account = partial(megatron_job.account, Project(FOR_OPTIONS, partial(named_configs, CONFIGS), validate), load_arguments)


def main() -> int:
    open_streams()
    with reported():
        return run({"megatron": (Arguments, account)}, __doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
