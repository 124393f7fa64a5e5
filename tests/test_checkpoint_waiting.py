"""Slow work on rank 0's disk: nobody waits for it inside a collective, for its timeout would end the run.

In each test the work ends only after the ranks have met in several further collectives. So if they waited for it inside
one, the test would not end.
"""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.base.errors import StorageError
from megapar.base.grid import Grid
from megapar.checkpoint import folder as folders
from megapar.checkpoint import load as loading
from megapar.checkpoint import save as saving
from megapar.checkpoint.folder import exclusive
from megapar.checkpoint.format import checkpoint_folders
from megapar.checkpoint.load import load
from megapar.checkpoint.save import save
from megapar.checkpoint.tiers import FOLDER
from megapar.comm import collectives
from megapar.config.options import CheckpointConfig
from megapar.declare import agreement, context
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.train.saver import Saver
from tests.support.checkpoints import cut_slices
from tests.support.distributed import run_ranks
from tests.support.small_training import MODEL_CONFIG, make_config, make_state, step

MEETINGS = 5
SECONDS = 30.0  # after which work that waits for a meeting gives up, and the test fails


class Meetings:
    """Counts the ranks' looks at each other, and lets work wait until there have been some more."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()
        original = agreement.any_rank

        def any_rank(flag: bool, ctx: ParallelContext) -> bool:
            with self._changed:
                self._count += 1
                self._changed.notify_all()
            return original(flag, ctx)

        agreement.any_rank = any_rank
        saving.any_rank = any_rank

    def more(self) -> None:
        with self._changed:
            until = self._count + MEETINGS
            assert self._changed.wait_for(lambda: self._count >= until, SECONDS), "the ranks wait in a collective"


def slowly(owner: Any, name: str, wait: Any) -> None:
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        wait()
        return original(*args, **kwargs)

    setattr(owner, name, slow)


def prune_slowly(root: str, async_save: bool) -> list[str]:
    """Three saves with one kept; each removal ends only after training has gone on."""
    options = CheckpointConfig(async_save=async_save, keep_last=1)
    state = make_state(replace(make_config(dp=2), checkpoint=options))
    trained = threading.Event()
    waited: list[bool] = []
    if state.ctx.world.first:
        slowly(folders, "_remove", lambda: waited.append(trained.wait(SECONDS)))
    with Saver(state, Path(root)) as saver:
        for _ in range(2):
            step(state)
            saver.save(state)
            list(saver.completed(wait=True))
        step(state)  # while rank 0 still removes step 1
        trained.set()
        saver.save(state)
        list(saver.completed(wait=True))
    collectives.barrier(state.ctx.world)
    assert all(waited)
    assert len(waited) == (2 if state.ctx.world.first else 0)
    return sorted(path.name for path in (Path(root) / FOLDER).iterdir())


@pytest.mark.parametrize("async_save", [False, True], ids=["synchronous", "asynchronous"])
def test_training_goes_on_while_old_checkpoints_are_removed(tmp_path: Path, async_save: bool) -> None:
    """Fault slow-disk: and all are gone when the run ends."""
    for names in run_ranks(2, prune_slowly, str(tmp_path), async_save):
        assert names == ["latest", "step_00000003"]


def settle_slowly(root: str) -> list[str]:
    """The last removal of a run ends only after the ranks have looked at each other again."""
    options = CheckpointConfig(keep_last=1)
    state = make_state(replace(make_config(dp=2), checkpoint=options))
    meetings = Meetings()
    if state.ctx.world.first:
        slowly(folders, "_remove", meetings.more)
    with Saver(state, Path(root)) as saver:
        for _ in range(2):
            step(state)
            saver.save(state)
    return [path.name for path in checkpoint_folders(Path(root) / FOLDER)]


def test_the_end_of_a_run_awaits_the_removal(tmp_path: Path) -> None:
    """Fault slow-disk."""
    for names in run_ranks(2, settle_slowly, str(tmp_path)):
        assert names == ["step_00000002"]
    assert not list((tmp_path / FOLDER).glob(".*"))


def start_slowly(root: str) -> None:
    """The sweep, the search for a manifest, the reading of chunks, the removal of a failed save: all slow on rank 0."""
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    meetings, folder, first = Meetings(), Path(root), ctx.world.first
    facts: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "trainer": {}, "data": {}}
    facts["model_config"] = MODEL_CONFIG
    if first:
        (folder / "checkpoints/.tmp-step_00000009-x").mkdir(parents=True)
        slowly(folders, "_remove", meetings.more)
        slowly(folders, "require_space", meetings.more)
        slowly(saving, "publish", meetings.more)
        slowly(loading, "read_manifest", meetings.more)
        slowly(loading, "fill", meetings.more)
        slowly(saving.shutil, "rmtree", meetings.more)
    with exclusive(folder, folder / "checkpoints", ctx):
        path = save(folder, slices=cut_slices(ctx), ctx=ctx, replicated=False, step=1, **facts)
        load(path, slices=cut_slices(ctx), ctx=ctx, model_config=MODEL_CONFIG)
        with pytest.raises(StorageError, match="cover"):
            save(folder, slices=[] if first else cut_slices(ctx), ctx=ctx, replicated=False, step=2, **facts)


def test_start_up_saves_and_loads_may_outlast_a_collective(tmp_path: Path) -> None:
    """Fault slow-disk."""
    run_ranks(2, start_slowly, str(tmp_path))
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step_00000001"]
    assert not list(tmp_path.glob(".tmp*"))


def share(large: int) -> list[Any]:
    ctx = context.create(Grid(tp=1, dp=3, pp=1))
    mine = {"rank": ctx.world.rank, "text": "é" * (large if ctx.world.first else 7)}
    found = [from_first(mine, ctx), from_first(None, ctx)]
    slow = threading.Event()
    if ctx.world.rank != 2:
        slow.set()
    threading.Timer(0.2, slow.set).start()
    on_all_ranks(lambda: slow.wait(SECONDS), ctx, StorageError, "waiting")
    return [*found, collectives.gather_json(mine["text"][: ctx.world.rank], ctx.world, torch.device("cpu"))]


def test_rank_0_tells_all_ranks_the_same(tmp_path: Path) -> None:
    for one, nothing, gathered in run_ranks(3, share, 400_000):
        assert one == {"rank": 0, "text": "é" * 400_000}
        assert nothing is None
        assert gathered == ["", "é", "éé"]


def test_a_signal_within_the_work_of_a_single_rank_is_no_error_of_its_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault killed-at-any-moment: one process works in its main thread, where the handlers of signals raise."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_all_ranks(interrupted, context.single(), StorageError, "checkpoint of step 4 not saved")
    monkeypatch.setattr(saving, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saving._write_file(tmp_path / "part.safetensors", {})
    with pytest.raises(StorageError, match="not saved: "):
        on_all_ranks(lambda: tmp_path.rmdir() or Path("missing").stat(), context.single(), StorageError, "not saved")


def post_and_collect(size: int) -> int:
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    if not ctx.world.first:
        generator = torch.Generator().manual_seed(0)
        collectives.post("large", torch.randint(10**9, (size,), generator=generator).tolist())
        return 0
    while (found := collectives.collect("large")) is None:
        pass
    assert collectives.collect("large") is None
    return len(found)


def test_a_part_of_any_size_passes_through_the_store(tmp_path: Path) -> None:
    """Fault thousands-of-ranks: pieces, as TCPStore closes the connection at a value above 8 MiB."""
    limit = collectives._PIECE
    assert limit < 8 << 20
    collectives._PIECE = 1000  # inherited by the ranks
    try:
        assert run_ranks(2, post_and_collect, 5000) == [5000, 0]
    finally:
        collectives._PIECE = limit
