"""Schedules from files: our own text and torch's CSV, there and back; every refusal; a run reading one."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from megapar.base.errors import ConfigError
from megapar.config import plugins
from megapar.config.options import Config, ParallelConfig
from megapar.launch.rank_process import what_ranks_share
from megapar.pipeline.actions import show
from megapar.pipeline.schedule_files import is_file, read
from megapar.pipeline.schedules import SCHEDULES, find, make, of, placement
from megapar.pipeline.zero_bubble import ScheduleMemory
from tests.support import program

FIXED = {"1f1b": 1, "zb-h1": 1, "zb-2p": 1}


def write(folder: Path, text: str, name: str = "schedule.txt") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_shown_is_read_back(name: str, tmp_path: Path) -> None:
    """For its number of micro-batches, and for every smaller one."""
    for pp, m in itertools.product((1, 3), (1, 5)):
        vpp = FIXED.get(name, 2)
        orders = make(name, pp, vpp, m)
        path = write(tmp_path, f"# a comment\n\n{show(orders)}\n")
        assert make(path, pp, vpp, m) == orders
        assert placement(path, pp, vpp) == placement(name, pp, vpp)
        for fewer in range(1, m):
            assert make(path, pp, vpp, fewer) == [[a for a in order if a.microbatch < fewer] for order in orders]


# torch's CSV files


def torch_schedule(kind: str, pp: int, m: int) -> Any:
    """A schedule of torch's. Of the stages it asks for numbers alone."""
    numbers = (0, 2 * pp - 1) if "V" in kind else (0, pp)
    sizes: dict[str, Any] = {"num_stages": 2 * pp, "group_size": pp, "group_rank": 0, "group": None, "device": "cpu"}
    stages = [
        SimpleNamespace(
            stage_index=number,
            is_first=number == 0,
            is_last=number == 2 * pp - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank={},
            **sizes,
        )
        for number in numbers
    ]
    return getattr(torch_schedules, kind)(stages, m, loss_fn=lambda *_: 0)


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("kind", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_csv_files_of_torch_are_read(kind: str, transfers: bool, tmp_path: Path) -> None:
    """As torch writes them, with what it transfers and shards, and without."""
    schedule = torch_schedule(kind, 2, 4)
    path = str(tmp_path / "torch.csv")
    schedule._dump_csv(path, "compute_comms" if transfers else "compute_only")
    assert ("RECV_F" in Path(path).read_text()) is transfers
    computed = [[a for a in schedule.pipeline_order[rank] if a is not None] for rank in (0, 1)]
    expected = [[part for action in order for part in (action.sub_actions or [action])] for order in computed]
    assert show(make(path, 2, 2, 4)) == show(expected)
    assert placement(path, 2, 2) == ([0, 1, 1, 0] if "V" in kind else [0, 1, 0, 1])


def test_words_of_torch_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    rows = (
        "0UNSHARD,0F0,0SEND_F0,,0F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD,0RESHARD\n1RECV_F0,(1F0;1F1)OVERLAP_F_B,1I0,1W0,1B1"
    )
    path = write(tmp_path, rows, "torch.csv")
    assert show(make(path, 2, 1, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1I0 1W0 1B1"


# What is refused

GOOD = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no schedule: a line for each rank is needed, such as rank 0: 0F0 0B0"),
        ("hello", "row 0: 'hello' is no action; actions are a stage, one of F, B, I and W, and a micro-batch"),
        ("0F0,0X0", "row 0: '0X0' is no action"),
        ("0F0," + "9" * 131_073, "field larger than field limit "),
        ("0F0,(0B0;0UNKNOWN)OVERLAP_F_B", "row 0: '0UNKNOWN' is no action"),
        ("rank 1: 0F0 0B0", "line 'rank 1: 0F0 0B0' must begin with `rank 0:`"),
        ("rank 0: 0F0 0F0 0B0", "0F0 stands 2 times"),
        ("rank 0: 0F0 0F1 0B0", "0B1 is missing"),
        ("rank 0: 0F1 0B1", "0F0 is missing, 0B0 is missing"),
        ("rank 0: 0F0 0B1000000000", "names micro-batch 1000000000, and has 2 actions: too few for all micro-batches"),
        ("rank 0: 0F0 0W0", "0W0 has no 0I0"),
        ("rank 0: 0F0 0I0", "0I0 has no 0W0"),
        ("rank 0: 0F0 0B0 0I0 0W0", "0B0 stands beside 0I0"),
        ("rank 0: 0F0 1F0\nrank 1: 1B0 0B0", "stage 0 is on ranks 0 and 1"),
        ("rank 0: 0F0 0B0\nrank 1: 2F0 2B0", "no rank has stage 1"),
        ("rank 0: 0F0 1F0 1B0 0B0\nrank 1: 2F0 2B0", "as many stages as the others, but they have 2, 1"),
        ("rank 0: 0F0 0W0 0I0", "cannot run: rank 0 waits at 0W0 for its gradient of inputs 0I0"),
        (
            "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1",
            "rank 0 waits at 0B0 for the gradient of 1B0; rank 1 waits at 1F1 for the activation of 0F1",
        ),
    ],
)
def test_a_file_that_cannot_run_is_refused_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as error:
        find(path)
    assert str(error.value).startswith(f"parallel.schedule={path}: ")
    assert "\n" not in str(error.value)


def test_a_file_for_other_ranks_or_fewer_micro_batches_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"2 ranks and 2 stages, not for parallel.pp=4 and parallel.vpp=1; use"):
        make(path, 4, 1, 2)
    with pytest.raises(ConfigError, match=r"not for parallel.pp=2 and parallel.vpp=2; use parallel.pp 2 and .*vpp 1,"):
        placement(path, 2, 2)
    with pytest.raises(ConfigError, match=r"holds 2 micro-batches, but a step has 3; use a file for at least as many"):
        make(path, 2, 1, 3)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none.txt", "No such file"), ("binary.txt", "is not text"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=rf"cannot be read \({said}.*\); a name with a slash, .txt or"):
            find(f"{tmp_path}/{name}")


def test_a_schedule_above_the_memory_is_refused(tmp_path: Path) -> None:
    """So is one of ours without freedom."""
    path = write(tmp_path, GOOD)
    gib = 2**30
    for name in (path, "1f1b", "gpipe"):
        parallel = ParallelConfig(pp=2, vpp=1, schedule=name)
        assert make(of(parallel, ScheduleMemory(2 * gib, [gib, gib], [gib, gib])), 2, 1, 2)
        with pytest.raises(ConfigError, match=rf"^parallel.schedule={name}: keeps 2.000 GiB .*_gb=1.5; allow"):
            make(of(parallel, ScheduleMemory(1.5 * gib, [gib, gib], [gib, gib])), 2, 1, 2)


# What names a file, and what runs with one


@pytest.mark.parametrize(
    ("name", "file", "package"),
    [
        ("1f1b", False, ""),
        ("lab.schedules:MINE", False, "lab"),
        ("mine.csv", True, ""),
        ("./mine", True, ""),
        ("lab:1/mine", True, ""),
    ],
)
def test_files_modules_and_names_are_told_apart_by_the_name(name: str, file: bool, package: str) -> None:
    assert is_file(name) is file
    assert plugins.package_of(name) == package


def test_ranks_compare_what_the_file_says(tmp_path: Path) -> None:
    """Another order is another schedule. Another comment is not."""
    name = "schedule.txt"
    shared = []
    for number, text in enumerate((GOOD, f"# other\n{GOOD}", GOOD.replace("0F1 0B0", "0B0 0F1"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder, text, name)
        shared.append(what_ranks_share(Config(parallel=ParallelConfig(schedule=path)), "cpu"))
    of_files = [facts["the file of parallel.schedule"] for facts in shared]
    assert of_files[0] == of_files[1] != of_files[2]


def losses(folder: Path) -> list[str]:
    return [line.split("grad_norm")[0] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_a_run_reads_a_schedule_keeps_a_copy_and_goes_on_from_it(tmp_path: Path) -> None:
    """A 1F1B of more micro-batches than a step has gives the losses of 1f1b. The original may go."""
    flags = ["--launch.nproc", "2", "--parallel.pp", "2", "--checkpoint.every", "1"]
    # The learning rate does not depend on the number of steps.
    flags += ["--optimizer.schedule", "constant", "--optimizer.min_lr", "0", "--optimizer.warmup_steps", "0"]
    named, from_file = tmp_path / "named", tmp_path / "file"
    for folder in (named, from_file):
        folder.mkdir()
    assert program.run(*flags, *program.FOUR_LAYERS, "--train.steps", "2", cwd=named).code == 0
    write(from_file, show(make("1f1b", 2, 1, 64)))
    ended = program.run(*flags, "--parallel.schedule", "schedule.txt", "--train.steps", "1", cwd=from_file)
    assert ended.code == 0, ended.err
    (from_file / "schedule.txt").unlink()
    ended = program.run(*flags, "--parallel.schedule", "run/schedule.txt", "--train.steps", "2", cwd=from_file)
    assert ended.code == 0, ended.err
    assert read(str(from_file / "run/schedule.txt")).orders == make("1f1b", 2, 1, 64)
    assert len(losses(named)) >= 2
    assert losses(from_file) == losses(named)
