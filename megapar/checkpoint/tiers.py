"""The folders in which a run saves its checkpoints: host memory, a local disk, and the run folder.

All hold checkpoints of one format, written by one protocol. A start goes on from the newest complete one of them. The
folder in memory belongs to the local launcher, and ends with the job. The one on a local disk belongs to a run folder,
by a random name kept in both.
"""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from megapar.checkpoint.by_host import Disks, find_disks
from megapar.checkpoint.folder import Keep, remove
from megapar.checkpoint.folder import sweep as sweep_folder
from megapar.checkpoint.lineage import Lineage, abandoned_by
from megapar.comm.agreement import from_first, on_all_ranks
from megapar.config.options import CheckpointConfig
from megapar.context import ParallelContext
from megapar.errors import StorageError, storing
from megapar.system.atomic_files import replace_file
from megapar.system.regular_files import read_regular

FOLDER = "checkpoints"
_NAME = ".name"  # the file with the random name of a run folder


class Tier(NamedTuple):
    """A folder of checkpoints, one after every `every`-th step; 0: none but `at_end`.

    `at_end`: also after the last step, and when the run is asked to stop. With `disks` each host has a folder `root` of
    its own.
    """

    name: Literal["memory", "local", "shared"]
    root: Path
    every: int
    keep: Keep
    at_end: bool = False
    disks: Disks | None = None

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is made after `step` steps; `last`: these are all steps of the run."""
        return (self.every > 0 and step % self.every == 0) or (last and self.at_end)

    def is_led_by(self, rank: int) -> bool:
        """Whether `rank` makes and removes the folders that it sees."""
        return self.disks.leads(rank) if self.disks else rank == 0


def shared(options: CheckpointConfig, run_dir: Path) -> Tier:
    """The tier in the run folder."""
    return Tier(
        "shared", run_dir / FOLDER, options.every, Keep(options.keep_last, options.keep_every), options.save_last
    )


def all_of(options: CheckpointConfig, run_dir: Path, snapshots: str, ctx: ParallelContext) -> list[Tier]:
    """The tiers of a run, the fastest first. `snapshots` is the launcher's folder in memory, "" without one.

    A collective. Call it with the run folder locked. What killed jobs left in a folder is removed. Raises StorageError
    on every rank if a folder cannot be made.
    """
    tiers = [shared(options, run_dir)]
    if options.local_every:
        doing = f"checkpoint.local_dir {options.local_dir} not usable"
        named = on_all_ranks(lambda: _name_of(run_dir) if ctx.world.first else "", ctx, StorageError, doing)
        root = local_root(options) / from_first(named, ctx) / FOLDER
        found = find_disks(root, ctx)
        disks = found if len(set(found.of_rank)) > 1 else None
        # Of two, one is whole while the next is written, and one is left if the newest turns out to be damaged.
        tier = Tier("local", root, options.local_every, Keep(last=2), disks=disks)
        on_all_ranks(lambda: sweep_folder(root) if tier.is_led_by(ctx.world.rank) else None, ctx, StorageError, doing)
        tiers.insert(0, tier)
    if options.memory_every and snapshots:
        root = Path(snapshots)
        on_all_ranks(lambda: sweep_folder(root) if ctx.world.first else None, ctx, StorageError, "snapshots not swept")
        tiers.insert(0, Tier("memory", root, options.memory_every, Keep(last=1)))
    return tiers


def local_root(options: CheckpointConfig) -> Path:
    """The folder of checkpoint.local_dir on this host."""
    return Path(options.local_dir).absolute()


def _name_of(run_dir: Path) -> str:
    """The random name of a run folder. A new folder of the same path has another one."""
    path = run_dir / _NAME
    with suppress(FileNotFoundError):
        name = read_regular(path, max_bytes=64).decode(errors="replace").strip()
        if name.isalnum():
            return name
    name = uuid.uuid4().hex
    with storing(path):
        replace_file(path, name.encode())
    return name


def discard(tiers: Sequence[Tier], lineage: Lineage, rank: int) -> None:
    """Remove the checkpoints of faster tiers not leading to `lineage`, the lineage of the run now starting.

    Those of the run folder are set aside instead (`lineage.set_aside`), and never removed. `rank` is this rank.
    """
    for tier in tiers:
        if tier.name != "shared" and tier.is_led_by(rank) and tier.root.is_dir():
            for path in abandoned_by(tier.root, lineage):
                remove(path)
