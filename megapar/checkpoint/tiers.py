"""The folders in which a run saves its checkpoints: host memory, a local disk, and the run folder.

All hold checkpoints of one format, written by one protocol. A start goes on from the newest complete one of them. The
folder in memory belongs to the local launcher, and ends with the job. The one on a local disk belongs to a run folder,
by a random name kept in both.
"""

import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from megapar.base.errors import StorageError, storing
from megapar.checkpoint.by_host import Disks, find_disks
from megapar.checkpoint.folder import Keep, remove
from megapar.checkpoint.folder import sweep as sweep_folder
from megapar.checkpoint.lineage import Lineage, abandoned_by
from megapar.comm import collectives
from megapar.config.options import CheckpointConfig
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.system.atomic_files import replace_file
from megapar.system.own_folder import make_own, opened
from megapar.system.regular_files import read_regular

FOLDER = "checkpoints"
_NAME = ".name"  # the file with the random name of a run folder


class Tier(NamedTuple):
    """A folder of checkpoints, one after every `every`-th step; 0: none but `at_end`.

    `at_end`: also after the last step, and when the run is asked to stop. With `disks` each host has a folder `root` of
    its own. `may_fail`: the run starts without room in it, and makes no checkpoints there until there is.
    """

    name: Literal["memory", "local", "shared"]
    root: Path
    every: int
    keep: Keep
    at_end: bool = False
    disks: Disks | None = None
    may_fail: bool = False

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


def all_of(
    options: CheckpointConfig, run_dir: Path, snapshots: str, ctx: ParallelContext, *, again: bool = False
) -> list[Tier]:
    """The tiers of a run, the fastest first. `snapshots` is the launcher's folder in memory, "" without one.

    A collective. Call it with the run folder locked. What killed jobs left in a folder is removed. Raises StorageError
    on every rank if a folder cannot be made. `again`: the job's launcher has started the ranks again. A faster tier
    that has failed meanwhile is then left out, with a warning.
    """
    tiers = [shared(options, run_dir)]
    faster: list[Callable[[], Tier | None]] = []
    if options.local_every:
        faster.append(lambda: _local(options, run_dir, ctx))
    if options.memory_every and snapshots:
        faster.append(lambda: _memory(options, Path(snapshots), ctx))
    for make in faster:
        try:
            if tier := make():
                tiers.insert(0, tier._replace(may_fail=again))
        except StorageError as error:  # on every rank, with the same words
            if not again:
                raise
            if ctx.world.first:
                logging.getLogger(__name__).warning("%s; this start goes on without it", error)
    return tiers


def _local(options: CheckpointConfig, run_dir: Path, ctx: ParallelContext) -> Tier | None:
    """The tier on local disks, None with a warning if another user could have put checkpoints there. A collective.

    Raises StorageError on every rank if the folder cannot be made.
    Everybody who may read the run folder knows the name of its folder there, and a scratch disk is often open to all.
    """
    doing = f"checkpoint.local_dir {options.local_dir} not usable"
    named = on_all_ranks(lambda: _name_of(run_dir) if ctx.world.first else "", ctx, StorageError, doing)
    folder = local_root(options) / from_first(named, ctx)

    def make() -> bool:
        with storing(folder):
            return make_own(folder)

    is_own = on_all_ranks(make, ctx, StorageError, doing)
    found_on = collectives.gather_json("" if is_own else socket.gethostname(), ctx.world, ctx.device)
    if hosts := sorted(set(filter(None, found_on))):
        if ctx.world.first:
            text = "%s on %s: a link, another user's, or open to others: checkpoint.local_dir is left out; remove it"
            logging.getLogger(__name__).warning(text, folder, ", ".join(hosts))
        return None
    root = folder / FOLDER
    found = find_disks(root, ctx)
    disks = found if len(set(found.of_rank)) > 1 else None
    # Of two, one is whole while the next is written, and one is left if the newest turns out to be damaged.
    tier = Tier("local", root, options.local_every, Keep(last=2), disks=disks)
    on_all_ranks(lambda: sweep_folder(root) if tier.is_led_by(ctx.world.rank) else None, ctx, StorageError, doing)
    return tier


def _memory(options: CheckpointConfig, root: Path, ctx: ParallelContext) -> Tier:
    """The tier in the launcher's folder in memory. A collective; raises StorageError on every rank if it has gone."""

    def prepare() -> None:
        if ctx.world.first:
            require_own(root)
            sweep_folder(root)

    on_all_ranks(prepare, ctx, StorageError, "snapshots not swept")
    return Tier("memory", root, options.memory_every, Keep(last=1))


def require_own(folder: Path) -> None:
    """Raise StorageError unless `folder` belongs to this user and is closed to others.

    A snapshot is never written to a folder of somebody who took the name of one that has gone.
    """
    with opened(folder) as descriptor:
        if descriptor is None:
            raise StorageError(f"{folder} is no folder of this user alone: it was removed or replaced")


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
