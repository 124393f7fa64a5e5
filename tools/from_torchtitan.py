"""Turns the options of a job of torchtitan into a configuration of megapar, and says what became of each.

    megapar from_torchtitan llama3_8b.toml --world_size 64 --output job.toml
    megapar from_torchtitan llama3_8b.toml --world_size 64 -- --training.steps 5000

Flags behind -- win over the file, as they do in torchtitan. Three lists say what was carried over, which defaults
differ here, and what has no counterpart. The exit code is 0 if everything was carried over, and 2 otherwise.

megapar migrate torchtitan is the same program.
"""

import sys
from functools import partial
from pathlib import Path

from megapar_models.registry import FOR_OPTIONS, named_configs, validate
from megapar_tools.migrate import torchtitan_job
from megapar_tools.migrate.account import Project
from megapar_tools.migrate.finish import run
from megapar_tools.migrate.torchtitan_job import TorchtitanJob as Arguments

from megapar.launch.reporting import open_streams, reported

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"

account = partial(torchtitan_job.account, Project(FOR_OPTIONS, partial(named_configs, CONFIGS), validate))


def main() -> int:
    open_streams()
    with reported():
        return run({"torchtitan": (Arguments, account)}, __doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
