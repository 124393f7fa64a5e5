"""Show runs in a browser while they train, from the files of their folders alone."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from megapar_tools.dashboard.server import Dashboard

from megapar.base.errors import DataError
from megapar.launch.reporting import open_streams, reported
from megapar.system.say import say


@dataclass
class Arguments:
    """Serve a page of runs at an address of this host. Ctrl-C ends it."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs. Their curves are drawn over each other. A run need not have started."""
    port: int = 8642
    """Port to listen on; 0 takes a free one."""


def main() -> None:
    open_streams()
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        if not args.run_dirs:
            raise DataError("give the folder of a run")
        with Dashboard(args.run_dirs, args.port) as dashboard:
            say(f"{dashboard.address} shows {', '.join(map(str, args.run_dirs))}. Ctrl-C ends it.")
            dashboard.serve_forever()


if __name__ == "__main__":
    main()
