"""Runs pretrain.py in a forked process: a case takes about a second, because torch is imported already.

The fork has its own session, working folder, environment variables and command line. Its standard output and standard
error go to files, so a test can read them while the program runs. Tests of the interpreter's real start use a
subprocess instead (tests/test_program.py).
"""

import logging
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support import garbage, options
from tests.support.progress import CAP_SECONDS, Watch, processes_of_session

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "pretrain_scripts/pretrain.py"
TINY = (
    *("--config", str(ROOT / "pretrain_scripts/configs/tiny.toml"), "--run_dir", "run"),
    *("--launch.device", "cpu", "--launch.threads", "1"),
)
# tyro keeps what it has read of the options in a section. What every program needs is read once here, instead of in
# each fork: this took up to 0.15 s of CPU a start.
OF_EACH_SECTION = (
    *("adapter.rank", "checkpoint.every", "data.workers", "guard.check_replicas_every", "kernels.loss_chunk"),
    *("log.straggler_every", "model.hidden_size", "optimizer.lr", "parallel.tp", "train.steps"),
)
options.load((*TINY, *(word for option in OF_EACH_SECTION for word in (f"--{option}", "1"))))

# Four micro-batches in a step, where the configuration has twelve: most of a short run's time goes into them.
FEW_MICRO_BATCHES = ("--train.micro_batch_size", "6")
# Two layers, where the configuration has four, unless the flags deal more of them to ranks: the others are alike, and
# took a third of the CPU time of all tests that start programs. Slow cases and those on GPUs keep four (conftest.py).
FEW_LAYERS = ("--model.num_hidden_layers", "2") if os.environ.get("MEGAPAR_TEST_FEW_LAYERS") else ()
FOUR_LAYERS = ("--model.num_hidden_layers", "4")  # for a comparison with what else has read the configuration
MORE_LAYERS = (
    *("--config", "--model.num_hidden_layers", "--model.family", "--parallel.vpp", "--parallel.schedule"),
    *("--parallel.partition", "--parallel.balance", "--train.recompute_layers"),
)
OTHER_BATCHES = ("--config", "--train.global_batch_size", "--train.micro_batch_size", "--train.batch_ramp")


@dataclass(frozen=True)
class Ended:
    """How a program ended. `code` is its exit code, or minus the number of the fatal signal."""

    code: int
    out: str
    err: str


class Program:
    """A program in a fork of this process.

    `plant`, if given, is called in the fork before the program: it may replace functions to plant a fault.
    """

    def __init__(
        self,
        script: Path,
        flags: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        plant: Callable[[], None] | None = None,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="program-"))
        # A suite starts hundreds of programs. Forks inherit this, and must not remove the folder at their own end.
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True).atexit = False
        fork = multiprocessing.get_context("fork")
        torch.set_num_threads(1)  # a fork among the threads of OpenMP hangs at its first parallel region
        self.process = fork.Process(target=_main, args=(script, flags, cwd, env, self.folder, plant))
        garbage.freeze()
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def out(self) -> str:
        """What the program has written to standard output so far."""
        return _text(self.folder / "out")

    @property
    def err(self) -> str:
        """What the program has written to standard error so far."""
        return _text(self.folder / "err")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program's first process alone."""
        os.kill(self.pid, number)

    def send_to_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the program's session: its ranks too, as a terminal does."""
        os.killpg(self.pid, number)

    def children(self) -> list[int]:
        """Process numbers of the living direct children: the local ranks, in the order of their start."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def until(self, text: str, idle_seconds: float = 60) -> None:
        """Wait until standard output or standard error contains `text`.

        Raises AssertionError if the program ends before, or uses almost no CPU time for `idle_seconds`.
        """
        watch = self._watch(idle_seconds)
        looks = 0
        while text not in self.out and text not in self.err:
            assert self.process.is_alive(), f"ended ({self.process.exitcode}) before {text!r}:\n{self.out}{self.err}"
            looks += 1
            if looks % 50 == 0 and watch.hung():
                self.kill_all()  # pytest would wait for it at its own end
                raise AssertionError(f"no {text!r}, and idle for {idle_seconds} s:\n{self.out}{self.err}")
            time.sleep(0.02)

    def wait(self, idle_seconds: float = 60, cap_seconds: float = CAP_SECONDS) -> Ended:
        """Wait for the end.

        If the program uses almost no CPU time for `idle_seconds`, or still runs after `cap_seconds`, every process of
        its session is killed and AssertionError raised.
        """
        watch = self._watch(idle_seconds, cap_seconds)
        while self.process.is_alive():
            if watch.hung():
                self.kill_all()
                raise AssertionError(
                    f"still running, idle for {idle_seconds} s or after {cap_seconds} s:\n{self.out}{self.err}"
                )
            self.process.join(1)
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, self.out, self.err)

    def _watch(self, idle_seconds: float, cap_seconds: float = CAP_SECONDS) -> Watch:
        return Watch(idle_seconds, lambda: processes_of_session(self.pid), cap_seconds)

    def kill_all(self) -> None:
        """End every process of the program's session at once."""
        self.send_to_all(signal.SIGKILL)
        self.process.join()


def start(
    *flags: str, cwd: Path, env: Mapping[str, str] | None = None, plant: Callable[[], None] | None = None
) -> Program:
    """Start the tiny configuration in folder `cwd`, with more flags; the run folder is `cwd`/run.

    It has few micro-batches and layers unless the flags say something of them.
    """
    known = TINY if any(flag in OTHER_BATCHES for flag in flags) else (*TINY, *FEW_MICRO_BATCHES)
    if not any(flag in MORE_LAYERS for flag in flags):
        known += FEW_LAYERS
    pairs = zip(known[::2], known[1::2], strict=True)
    kept = [word for pair in pairs if pair[0] not in flags for word in pair]  # an option may be given once
    return Program(PRETRAIN, (*kept, *flags), cwd, env or {}, plant)


def run(
    *flags: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    plant: Callable[[], None] | None = None,
) -> Ended:
    """`start`, then wait for the end."""
    return start(*flags, cwd=cwd, env=env, plant=plant).wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _main(
    script: Path,
    flags: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    folder: Path,
    plant: Callable[[], None] | None,
) -> None:
    os.setsid()
    # A test run in the background ignores SIGINT, under nohup also SIGHUP, and its forks would too: a program in a
    # terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
    # Python's own streams still write to what pytest captures: replace them too.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()  # pytest's, which keep warnings from standard error
    tempfile.tempdir = None  # remembered from this process: `env` may name another folder
    os.chdir(cwd)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(env)
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))  # where Python itself would look for modules beside the script
    if plant is not None:
        plant()
    runpy.run_path(str(script), run_name="__main__")
