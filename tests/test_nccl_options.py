"""What NCCL and CUDA are asked for, by layout: priorities and CTAs of groups, hardware queues. Stand-ins are asked."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megapar_models.registry import FOR_OPTIONS, named_configs

from megapar.base.grid import Grid
from megapar.comm import process_groups
from megapar.comm.process_groups import ProcessGroups, world_is_of_gradients
from megapar.config import files
from megapar.launch.rank_process import hardware_queues
from megapar.system import device
from tests.support.source_tree import ROOT

CONFIGS = ROOT / "pretrain_scripts/configs"


class Options:
    """Stands in for ProcessGroupNCCL.Options, which builds of torch for CPUs lack."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Options]:
    """The options of each group that torch was asked to make, by its ranks."""
    found: dict[tuple[int, ...], Options] = {}

    def new_group(ranks: list[int], timeout: timedelta, pg_options: Options) -> object:
        found[tuple(ranks)] = pg_options
        return object()

    def split_group(split_ranks: list[list[int]], timeout: timedelta, pg_options: Options) -> object:
        groups = [new_group(ranks, timeout, pg_options) for ranks in split_ranks]
        return groups[0]

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(process_groups, "_world", lambda: SimpleNamespace(bound_device_id=None))
    return found


@pytest.mark.parametrize("splits", [False, True])
def test_groups_have_the_priority_and_the_ctas_of_their_kind(
    made: dict[tuple[int, ...], Options], monkeypatch: pytest.MonkeyPatch, splits: bool
) -> None:
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0) if splits else None)
    monkeypatch.setattr(process_groups, "_world", lambda: world)
    groups = Grid(tp=2, dp=2, pp=2).groups()
    made_by_rank = ProcessGroups(0, 8, timedelta(seconds=1), gradient_ctas=16)
    for axis, ranks in groups.items():
        made_by_rank.make(axis, ranks)
    assert {ranks for axis in ("tp", "dp", "pp") for ranks in groups[axis]} == {*made}
    for axis, (high, ctas) in {"tp": (True, None), "pp": (True, None), "dp": (False, 16)}.items():
        found = {(made[ranks].is_high_priority_stream, made[ranks].config.max_ctas) for ranks in groups[axis]}
        assert found == {(high, ctas)}, axis


@pytest.mark.parametrize(
    ("sizes", "of_gradients"),
    [({"tp": 4}, False), ({"dp": 4}, True), ({"cp": 4}, False), ({"dp": 2, "tp": 2}, True), ({"pp": 4}, False)],
)
def test_the_group_of_all_ranks_has_the_priority_of_the_axis_that_gets_it(
    made: dict[tuple[int, ...], Options], sizes: dict[str, int], of_gradients: bool
) -> None:
    groups = Grid(**sizes).groups()
    assert world_is_of_gradients(groups, 4) == of_gradients
    by_rank = ProcessGroups(0, 4, timedelta(seconds=1))
    for axis, ranks in groups.items():
        by_rank.make(axis, ranks)
    whole = [axis for axis in ("tp", "cp", "dp", "pp") if groups[axis] == [(0, 1, 2, 3)]]
    shared = [axis for axis in whole if by_rank.of(axis, (0, 1, 2, 3)) is process_groups._world()]
    assert all(process_groups._is_of_gradients(axis) == of_gradients for axis in shared)


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ("--parallel.tp 2", 1),
        ("--parallel.cp 2", 1),
        ("", None),
        ("--parallel.pp 2", None),
        ("--parallel.tp 2 --optimizer.zero_stage 3", None),
        ("--parallel.tp 2 --parallel.tp_symmetric_memory", None),
        ("--config qwen3-30b-a3b --parallel.tp 2 --parallel.ep 2", None),
    ],
)
def test_hardware_queues_follow_from_the_layout(
    flags: str, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files.load(flags.split(), named_configs(CONFIGS), FOR_OPTIONS).config
    assert hardware_queues(config) == number
    for users, expected in ((None, "" if number is None else str(number)), ("32", "32")):
        monkeypatch.setenv(device.CONNECTIONS, users or "")
        if users is None:
            del os.environ[device.CONNECTIONS]
        device.set_connections(torch.device("cpu"), number)
        assert os.environ.get(device.CONNECTIONS) == users, "a CPU has no queues"
        device.set_connections(torch.device("cuda", 0), number)
        assert device.connections() == expected
