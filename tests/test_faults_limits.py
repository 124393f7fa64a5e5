"""Memory, processes and threads run out while a run starts: exit code 8, one line, and no process is left."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megapar_models import build  # noqa: F401  imported before the limit holds, as the program does

from megapar.comm import shared_memory
from tests.support import faults
from tests.support.faults import FOUR, TWO, Scene, on_rank
from tests.support.program import ROOT

REFUSED = "(Resource temporarily unavailable): the limit of processes (ulimit -u, or the container's) or of memory"


def with_memory(more: int) -> Callable[[], None]:
    """Plants a limit of the address space, `more` bytes above what is used."""

    def plant() -> None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.RLIM_INFINITY))

    return plant


def with_forks(count: int) -> Callable[[], None]:
    """Plant the system's refusal of every process after `count` of them."""

    def plant() -> None:
        real = os.fork
        forks = iter(range(count))

        def fork() -> int:
            if next(forks, None) is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return real()

        os.fork = fork

    return plant


def no_shared_memory(inside: str, passing: str) -> Callable[[Any], None]:
    """From now on this rank gets no memory to share within the function `inside`, called by a function `passing`."""

    def act(ctx: Any) -> None:
        real = os.posix_fallocate

        def posix_fallocate(descriptor: int, offset: int, size: int) -> None:
            callers = {frame.name for frame in traceback.extract_stack()}
            if {inside, passing} <= callers:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            real(descriptor, offset, size)

        os.posix_fallocate = posix_fallocate
        shared_memory._smallest_fitting = lambda *_: None  # each message needs a new block

    return act


LAYOUTS = {"one": (), "two": TWO, "threads": (*TWO, "--launch.threads", "8")}
MEMORY = [(layout, mib) for layout in LAYOUTS for mib in (4, 8, 12, 24, 32, 40, 60)]
FEW_MEMORY = (("threads", 60),)

# All that the program imports is there before the limit holds, as in a run.
FRESH = """
import json, runpy, sys
from pathlib import Path
runpy.run_path("pretrain_scripts/pretrain.py", run_name="imported")
from tests.test_faults_limits import LAYOUTS, Scene, with_memory
folder, layout, mib = sys.argv[1:]
ended = Scene(Path(folder)).run(*LAYOUTS[layout], plant=with_memory(int(mib) << 20))
print(json.dumps([ended.code, ended.err]))
"""


@pytest.mark.parametrize(
    ("layout", "mib"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FEW_MEMORY)) for case in MEMORY]
)
def test_memory_that_ends_while_ranks_start(layout: str, mib: int, tmp_path: Path) -> None:
    """Fault out-of-memory: threads refused to OpenMP too; libgomp by itself would speak of them.

    The run starts from a fresh interpreter. One that has run other tests holds free memory, which no limit takes away.
    """
    command = [sys.executable, "-c", FRESH, str(tmp_path), layout, str(mib)]
    started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    code, err = json.loads(started.stdout)
    assert code == 8, err
    assert err.startswith("OutOfMemoryError: ")
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("passing", ["forward", "backward"])
def test_memory_that_ends_in_an_exchange_by_experts(passing: str, rank: int, tmp_path: Path) -> None:
    """Fault out-of-memory: both ranks end, error.json has the one without memory, and what was saved stays."""
    scene = Scene(tmp_path)
    flags = (*faults.LAYOUTS["ep2"], "--model.hidden_size", "64", "--checkpoint.every", "2")
    ended = scene.run(*flags, plant=on_rank(rank, 2, no_shared_memory("_all_to_all", passing)))
    assert ended.code == 8, ended.err
    assert re.fullmatch(r"OutOfMemoryError: .*no [\d,]+ bytes of memory to share with other ranks.*\n", ended.err)
    assert faults.error(scene.work)["rank"] == rank
    assert scene.check_checkpoints(ended.out) == [2]


@pytest.mark.parametrize("count", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_that_cannot_be_forked(count: int, tmp_path: Path) -> None:
    """Fault refused-process: the ranks forked before are ended."""
    ended = Scene(tmp_path).run(*FOUR, plant=with_forks(count))
    assert ended.code == 8
    assert ended.err.startswith(f"OutOfMemoryError: a rank cannot be started {REFUSED}")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_data_workers_that_cannot_be_forked(count: int, tmp_path: Path) -> None:
    """Fault refused-process."""
    ended = Scene(tmp_path).run("--data.workers", "2", plant=with_forks(count))
    assert ended.code == 8
    assert ended.err.startswith(f"OutOfMemoryError: data worker {count} cannot be started {REFUSED}")
    assert ended.err.endswith("; use fewer data.workers\n")
    assert ended.err.count("\n") == 1
