"""What the tests of faults share: layouts, ways to end processes, and checks on the remains of an ended run."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megapar.checkpoint.format import checkpoint_folders, find_complete
from megapar.data.indexed import IndexedWriter
from megapar.step import divisors
from tests.support import program
from tests.support.program import Ended, Program
from tests.support.progress import CAP_SECONDS

TWO = ("--launch.nproc", "2")
FOUR = ("--launch.nproc", "4", "--parallel.tp", "2", "--parallel.pp", "2")
PACKED = "../packed"
"""The prefix of a token file of short documents, from the folder where a scene's programs run: `Scene` writes it."""
STATES = (
    *("--model.family", "qwen3_next", "--model.num_hidden_layers", "2", "--model.moe.num_experts", "3"),
    *("--model.layer_types", "linear_attention", "full_attention", "--model.moe.moe_intermediate_size", "24"),
    *("--model.linear_num_key_heads", "2", "--model.linear_num_value_heads", "4"),
    *("--model.linear_key_head_dim", "8", "--model.linear_value_head_dim", "6"),
    *("--data.train", PACKED, "--data.documents", "apart"),
    *("--train.seq_length", "28", "--parallel.cp", "2"),
)
LAYOUTS = {
    "one": (),
    "dp2": TWO,
    "tp2": (*TWO, "--parallel.tp", "2"),
    "pp2": (*TWO, "--parallel.pp", "2"),
    "tp2pp2": FOUR,
    "zero3": (*TWO, "--optimizer.zero_stage", "3"),
    "ep2": (*TWO, "--model.family", "mixtral", "--model.moe.num_experts", "4", "--parallel.ep", "2"),
    "states": (*TWO, *STATES),
}
RANKS = {"one": 1, "dp2": 2, "tp2": 2, "pp2": 2, "tp2pp2": 4, "zero3": 2, "ep2": 2, "states": 2}
LONG = ("--train.steps", "100000")
SPEED = ("step_seconds", "data_seconds", "tokens_per_second", "tflops_per_device", "mfu", "peak_memory_bytes")


def children(running: Program, count: int) -> list[int]:
    """Process numbers of the ranks, once all have started."""
    for _ in range(1000):
        if len(running.children()) == count:
            return running.children()
        time.sleep(0.02)
    raise AssertionError(f"{running.children()} instead of {count} ranks:\n{running.err}")


def gone(pids: list[int]) -> bool:
    """Whether none of the processes is left, waiting for the kernel to remove them."""
    for _ in range(500):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


def error(folder: Path) -> dict[str, Any]:
    """What error.json says of the run in `folder`/run."""
    facts: dict[str, Any] = json.loads((folder / "run/error.json").read_text())
    return facts


def on_rank(rank: int, at: int, act: Callable[[Any], None]) -> Callable[[], None]:
    """Plants `act(ctx)` at the beginning of step `at` (counted from 0) on one rank."""

    def plant() -> None:
        real = divisors.count_targets

        def count_targets(batches: Any, ctx: Any) -> Any:
            if ctx.world.rank == rank and ctx.flight.step == at + 1:
                act(ctx)
            return real(batches, ctx)

        divisors.count_targets = count_targets

    return plant


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the machine's speed: equal means bitwise equal."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in SPEED} for line in lines]


def weights(folder: Path, at: int) -> dict[str, bytes]:
    """The ranks' files of the checkpoint after step `at`."""
    shards = (folder / f"run/checkpoints/step_{at:08d}").glob("rank_*")
    return {path.name: path.read_bytes() for path in shards}


def write_documents(prefix: Path) -> None:
    """Write a token file of short documents, unless it is there: most samples have the start of one in their middle."""
    if prefix.with_suffix(".idx").exists():
        return
    draw = np.random.default_rng(3)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in draw.integers(1, 30, 120):
            writer.add_document(draw.integers(0, 131, length))


class Scene:
    """A folder for programs run one after the other, and checks on what they leave there.

    Programs run in `work`. Their temporary files go to `tmp`, so a file left behind is found.
    """

    def __init__(self, folder: Path):
        self.work, self.tmp = folder / "work", folder / "tmp"
        for path in (self.work, self.tmp):
            path.mkdir(exist_ok=True)

    def start(
        self, *flags: str, env: Mapping[str, str] | None = None, plant: Callable[[], None] | None = None
    ) -> Program:
        if PACKED in flags:
            write_documents(self.work / PACKED)
        # torch makes the folder of its compiler's cache where a process first imports the compiler, as planning does.
        folders = {"TMPDIR": str(self.tmp), "TORCHINDUCTOR_CACHE_DIR": str(self.work.parent / "inductor")}
        return program.start(*flags, cwd=self.work, env={**folders, **(env or {})}, plant=plant)

    def run(
        self,
        *flags: str,
        env: Mapping[str, str] | None = None,
        plant: Callable[[], None] | None = None,
        timeout_seconds: float = 60,
        traces: bool = False,
    ) -> Ended:
        """Run a program to its end, and assert: nothing of it is left."""
        running = self.start(*flags, env=env, plant=plant)
        return self.finish(running, timeout_seconds, traces=traces)

    def finish(self, running: Program, timeout_seconds: float = 60, *, traces: bool | None = False) -> Ended:
        """Wait for the end, and assert: no process, temporary file or shared memory is left, and no traceback but with
        `traces` (None: with or without one)."""
        ended = running.wait(timeout_seconds, max(timeout_seconds, CAP_SECONDS))
        pids = [running.pid, *members(self.work)]
        for _ in range(500):
            if not session(running.pid):
                break
            time.sleep(0.02)
        assert session(running.pid) == [], f"processes are left\n{ended.err}"
        assert os.listdir(self.tmp) == []
        names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        # With the whole number: another test's process may have one that begins with it.
        assert [name for name in names if any(re.search(rf"[-_]{pid}(?!\d)", name) for pid in pids)] == []
        assert traces in (None, "Traceback" in ended.err), ended.err
        assert "Error in " not in ended.err, ended.err
        return ended

    @property
    def checkpoints(self) -> Path:
        return self.work / "run/checkpoints"

    def check_checkpoints(self, out: str = "") -> list[int]:
        """Assert: each folder of a checkpoint is complete, and none reported as saved in `out` is missing. Returns the
        steps of all, the newest first."""
        folders = checkpoint_folders(self.checkpoints)
        assert list(find_complete(self.checkpoints)) == folders
        said = [Path(line.partition("| saved ")[2]).name for line in out.splitlines() if "| saved " in line]
        missing = set(said) - {folder.name for folder in folders}
        assert not missing, f"lost: {missing}"
        return [int(folder.name.removeprefix("step_")) for folder in folders]


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):  # a glob of */stat asks after each file, and fails if its process ends
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def members(folder: Path) -> list[int]:
    """Process numbers of the ranks, in their order, as the run folder tells them; none before it is there."""
    try:
        listed = json.loads((folder / "run/ranks.json").read_text())["ranks"]
    except OSError:
        return []
    return [member["pid"] for member in listed]


def send(number: signal.Signals, victim: str, launched: bool) -> None:
    """Send a signal from within a rank to `victim`: launcher, all, or rank N of the run in this folder.

    `launched`: whether a launcher of ours started the ranks; else the only process is rank 0 and launcher as well.
    """
    if victim == "all":
        os.killpg(0, number)
    elif victim == "launcher":
        os.kill(os.getppid() if launched else os.getpid(), number)
    else:
        os.kill(members(Path())[int(victim.removeprefix("rank"))], number)
