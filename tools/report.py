"""Write report.html into run folders: one page for each run that opens without a network.

A run writes it at its end too."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from megapar_tools.dashboard.page import write_report

from megapar.base.errors import DataError, reason_of
from megapar.launch.reporting import open_streams, reported
from megapar.system.say import say


@dataclass
class Arguments:
    """Write report.html into run folders."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, also of those that are at work."""


def main() -> None:
    open_streams()
    with reported():
        for run_dir in tyro.cli(Arguments, description=__doc__, use_underscores=True).run_dirs:
            path = run_dir / "metrics.jsonl"
            try:
                has_trained = path.is_file()
            except OSError as error:  # such as a folder of another user
                raise DataError(f"{path}: {reason_of(error)}") from error
            if not has_trained:
                raise DataError(f"{path} is not there: give the folder of a run that has trained")
            say(str(write_report(run_dir)))


if __name__ == "__main__":
    main()
