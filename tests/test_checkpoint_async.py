"""Saving while training goes on: the state of one moment, two saves at a time, failures told to every rank."""

import json
import logging
import resource
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.base.errors import NumericError, StorageError
from megapar.checkpoint import save as saving
from megapar.checkpoint.format import checkpoint_folders, find_complete, read_manifest
from megapar.checkpoint.load import Reader
from megapar.checkpoint.save import Save, snapshot, snapshot_bytes
from megapar.checkpoint.tiers import FOLDER
from megapar.config.options import CheckpointConfig, Config
from megapar.declare import context
from megapar.system import device
from megapar.train.saver import Saver
from tests.support.checkpoints import (
    MODEL,
    STATE,
    files_limited_to,
    kill_saves,
    make_slice,
    outcome,
    toy_slices,
    whole_spec,
)
from tests.support.distributed import run_ranks
from tests.support.small_training import make_config, make_state, step

FACTS = {"consumed_samples": 0, "layout": {}, "model_config": MODEL, "trainer": {}, "data": {}}
CONFIGS = [
    make_config(tp=2, pp=2, dp=1),
    make_config(dp=2, pp=2, precision="bf16"),
    make_config(tp=2, dp=2, sequence_parallel=True),
    make_config(dp=4, zero_stage=0),
]


def asynchronous(config: Config, **options: Any) -> Config:
    return replace(config, checkpoint=CheckpointConfig(async_save=True, **options))


def save_both_ways(root: str, configs: list[Config]) -> None:
    """Each config's state after every one of three steps, and changed at once thereafter."""
    for number, config in enumerate(configs):
        for name, chosen in (("sync", config), ("async", asynchronous(config))):
            torch.manual_seed(number)  # decides the samples' weights
            state = make_state(chosen)
            folder = Path(root) / name / str(number)
            with Saver(state, folder) as saver:
                for _ in range(3):
                    step(state)
                    saver.save(state)
                    if name == "async" and state.step == 3:
                        for item in state.optimizer.slices():
                            item.main.zero_()
                            item.tensors["exp_avg"].fill_(torch.nan)
                list(saver.completed(wait=True))


def test_an_asynchronous_save_is_the_synchronous_one_bit_by_bit(tmp_path: Path) -> None:
    """Faults save-of-the-moment, conditional-collectives: on real ranks in each kind of layout, with training going on,
    all files are equal."""
    run_ranks(4, save_both_ways, str(tmp_path), CONFIGS)
    for number in range(len(CONFIGS)):
        first, second = (tmp_path / name / str(number) / FOLDER for name in ("sync", "async"))
        assert len(list(find_complete(second))) == 3
        for path in sorted(first.glob("step_*/rank_*")):
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path
        for folder in checkpoint_folders(first):
            ours, theirs = read_manifest(folder), read_manifest(second / folder.name)
            for manifest in (ours, theirs):
                manifest.trainer["config"].pop("checkpoint.async_save")
            assert ours == theirs


def fail_behind(root: str) -> list[tuple[str, int, str]]:
    """Rank 2's first save succeeds, its second does not; what each rank hears at the boundary after, and then."""
    state = make_state(asynchronous(make_config(dp=4)))
    outcomes = []
    with Saver(state, Path(root)) as saver:
        step(state)
        saver.save(state)
        list(saver.completed(wait=True))
        step(state)
        with files_limited_to(300 if state.ctx.world.rank == 2 else resource.RLIM_INFINITY):
            saver.save(state)
            saver._saves[0][0].join(None if state.ctx.world.rank == 2 else 0.0)
        step(state)

        def boundaries() -> None:
            while saver._saves:
                list(saver.completed())

        outcomes.append(outcome(boundaries))
        saver.save(state)
        list(saver.completed(wait=True))
    return outcomes


def test_a_failure_behind_is_every_ranks_error_at_the_next_step(tmp_path: Path) -> None:
    """Fault failed-asynchronous-save: the same words; what was complete stays, what is half goes, and a later save
    succeeds."""
    ranks = run_ranks(4, fail_behind, str(tmp_path))
    for outcomes in ranks:
        assert outcomes == ranks[0]
    ((kind, code, message),) = ranks[0]
    assert (kind, code) == ("StorageError", StorageError.exit_code)
    assert message.startswith("checkpoint of step 2 not saved (rank 2): ")
    assert "rank_00002.safetensors" in message
    assert sorted(p.name for p in (tmp_path / FOLDER).iterdir()) == ["latest", "step_00000001", "step_00000003"]


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[float, float]]:
    """Writing takes `seconds` longer; when each write began and ended."""
    spans: list[tuple[float, float]] = []
    write = saving.write_part

    def write_slowly(*args: Any) -> Any:
        began = time.monotonic()
        time.sleep(seconds)
        part = write(*args)
        spans.append((began, time.monotonic()))
        return part

    monkeypatch.setattr(saving, "write_part", write_slowly)
    return spans


def test_a_third_save_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault overlapping-saves: two copies of the state at most, one writer at a time, and the wait is told."""
    spans = slow(monkeypatch, 0.3)
    state = make_state(asynchronous(make_config()))
    with Saver(state, tmp_path) as saver, caplog.at_level(logging.WARNING):
        seen = []
        for _ in range(4):
            step(state)
            seen.append([path.name for path in saver.save(state)])
            assert len(saver._saves) <= 2
        assert [p.name for p in saver.completed(wait=True)] == ["step_00000003", "step_00000004"]
    assert seen == [[], [], ["step_00000001"], ["step_00000002"]]
    assert len(saver._idle) == 2
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert "waiting for the checkpoint of step 1, which is still being written" in caplog.text


def test_an_error_of_the_run_waits_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.3)
    state = make_state(asynchronous(make_config()))
    step(state)

    def fail() -> None:
        with Saver(state, tmp_path) as saver:
            saver.save(state)
            assert not list(find_complete(tmp_path / FOLDER))
            raise NumericError("a loss that is not finite")

    assert outcome(fail)[0] == "NumericError"
    assert [p.name for p in find_complete(tmp_path / FOLDER)] == ["step_00000001"]


def write_behind_for_ever(root: Path, first: int, done: Connection) -> None:
    """Saves follow each other from copies of slices, and these change at once."""
    under_way: list[Save] = []
    number = first
    while True:
        slices = toy_slices(number)
        copies = snapshot(slices, torch.empty(snapshot_bytes(slices), dtype=torch.uint8))
        for item in slices:
            item.main.zero_()
        facts = {**FACTS, "step": number}
        under_way.append(Save(root, copies, context.single(), facts, after=under_way[-1] if under_way else None))
        if len(under_way) == 2:
            done.send(int(under_way.pop(0).finish().name.removeprefix("step_")))
        number += 1


def test_kill_9_during_asynchronous_saves_loses_no_complete_checkpoint(tmp_path: Path) -> None:
    """Fault killed-saves."""
    kill_saves(write_behind_for_ever, 2, tmp_path, 8)


@pytest.mark.slow
def test_kill_9_during_asynchronous_saves_many_times(tmp_path: Path) -> None:
    """Fault killed-saves: 25 trials; test_checkpoint.py has as many of synchronous saves."""
    kill_saves(write_behind_for_ever, 2, tmp_path, 25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_state_is_copied_to_pinned_memory_before_it_changes(tmp_path: Path) -> None:
    """Fault save-of-the-moment on a GPU: 256 MB a tensor are overwritten right after the copy."""
    where = torch.device("cuda", 0)
    size = 1 << 26
    tensors = {state: torch.full((size,), 2.0, device=where) for state in STATE}
    item = make_slice(whole_spec("p", (size,)), 0, size, **tensors)
    buffer = device.host_buffer(snapshot_bytes([item]), where)
    assert buffer.is_pinned()
    copies = snapshot([item], buffer)
    device.synchronize(where)
    save = Save(tmp_path, copies, context.single(where), {**FACTS, "step": 1})
    for state in STATE:
        item.tensors[state].fill_(-1.0)
    path = save.finish()
    assert json.loads((path / "manifest.json").read_text())["body"]["step"] == 1
    with Reader(path, read_manifest(path)) as reader:
        assert all(bool((reader.tensor(f"{state}.p") == 2.0).all()) for state in STATE)
