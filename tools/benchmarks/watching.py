"""What a step pays for being watched: the flight log and the heartbeat, metrics, sinks, slow ranks, hashes of copies.

Two replicas of a Llama of 8 million parameters train on this machine's CPUs. Each mechanism is called as in any run,
and the time of its calls in the training thread is added up; the clock's own time is taken off. The difference of two
runs would show nothing: steps of one machine differ by more than these calls take. Hashes are compared every
`hashes_every` steps.
"""

import json
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Found, Output, table
from benchmarks.programs import PRETRAIN, TINY, pretrain
from megapar.comm.flight import AxisLog, Flight
from megapar.observe import replicas
from megapar.observe.metrics import Meter, Reporter
from megapar.observe.stragglers import Stragglers, Waits
from megapar.observe.watch import Watch
from megapar.train import trainer

_FILE = "watching.json"
_SHAPE = (
    *("--config", str(TINY), "--launch.device", "cpu", "--launch.nproc", "2"),
    *("--parallel.dp", "2", "--model.hidden_size", "256", "--model.num_hidden_layers", "8"),
    *("--model.num_attention_heads", "8", "--model.num_key_value_heads", "4", "--model.head_dim", "32"),
    *("--model.intermediate_size", "704", "--model.vocab_size", "4096", "--train.seq_length", "256"),
    *("--train.global_batch_size", "16", "--train.micro_batch_size", "4", "--model.max_position_embeddings", "256"),
)
_FLIGHT, _METRICS, _SLOW, _HASHES = "flight log, heartbeat", "metrics, console, sinks", "slow ranks", "hashes"
_WATCHED: dict[str, list[tuple[Any, str]]] = {
    _FLIGHT: [(AxisLog, "begin"), (AxisLog, "wait"), (AxisLog, "end"), (AxisLog, "started"), (Flight, "enter")],
    _METRICS: [(Reporter, "step"), (Meter, "start"), (Meter, "queued"), (Meter, "line"), (Watch, "after_line")],
    _SLOW: [(Stragglers, "_gather"), (Stragglers, "_judge"), (Waits, "own_seconds")],
    _HASHES: [(replicas, "check_replicas")],
}


@dataclass(frozen=True)
class Options(Output):
    """Measure the cost of watching on this machine."""

    steps: int = 60
    """Steps of the run."""
    hashes_every: int = 20
    """guard.check_replicas_every of the run."""


class Stopwatch:
    """Adds up the time of calls in the thread that made it. A call within another counts for the outer one alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_WATCHED, 0.0)
        self.calls = dict.fromkeys(_WATCHED, 0)
        self._inside = False
        self._thread = threading.get_ident()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1
                self._inside = False

        return timed

    def own_seconds(self) -> float:
        """What a call of the stopwatch itself adds to the time that it measures."""
        other = Stopwatch()
        nothing = other.around(_FLIGHT, lambda: None)
        for _ in range(10_000):
            nothing()
        return other.seconds[_FLIGHT] / other.calls[_FLIGHT]


def watched_run(*flags: str) -> None:
    """Train in this process and its forks. Rank 0 writes the times of a step to `_FILE` in the run folder."""
    clock = Stopwatch()
    for name, functions in _WATCHED.items():
        for owner, attribute in functions:
            setattr(owner, attribute, clock.around(name, getattr(owner, attribute)))
    train = trainer._train
    own = clock.own_seconds()

    def measured(run: trainer.TrainingRun, watch: Watch) -> str:
        clock._thread = threading.get_ident()
        start, before = time.perf_counter(), dict(clock.seconds)
        calls = dict(clock.calls)
        reason = train(run, watch)
        steps = run.state.step
        found = {
            name: (clock.seconds[name] - before[name] - own * (clock.calls[name] - calls[name])) / steps
            for name in _WATCHED
        }
        if run.state.ctx.world.first:
            seconds = (time.perf_counter() - start) / steps
            (run.run_dir / _FILE).write_text(json.dumps({"step": seconds, "seconds": found}))
        return reason

    trainer._train = measured
    sys.argv = [str(PRETRAIN), *flags]
    runpy.run_path(str(PRETRAIN), run_name="__main__")


def measure(options: Options) -> Found:
    """Make the run. Each mechanism has its seconds a step."""
    code = "import sys; from benchmarks.watching import watched_run; watched_run(*sys.argv[1:])"
    steps = ("--train.steps", options.steps, "--guard.check_replicas_every", options.hashes_every)
    with tempfile.TemporaryDirectory() as folder:
        pretrain(Path(folder), (*_SHAPE, *steps, "--checkpoint.no-save_last"), code)
        found = json.loads((Path(folder) / _FILE).read_text())
    rows = [
        {"watched by": name, "seconds a step": x, "share": x / found["step"]} for name, x in found["seconds"].items()
    ]
    return Found(found, [table(rows)])
