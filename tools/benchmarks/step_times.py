"""Predicted step times beside measured ones: twelve layouts of one and two ranks, run by the program itself.

--gpu names the hardware file that tools/calibrate.py wrote on this machine. Every run writes what was predicted beside
what it measured (metrics.jsonl). The layouts take turns, `rounds` times; of each the fastest round counts, because
other work on the machine only ever slows a run.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from megapar_tools.plan import hardware

from benchmarks.harness import Found, Output, table
from benchmarks.programs import pretrain
from megapar.observe.prediction import STEPS

LAYOUTS = {
    "one process": "",
    "one process, micro-batches of 4": "--train.micro_batch_size 4",
    "one process, recomputed": "--train.recompute full",
    "dp 2": "--parallel.dp 2",
    "dp 2, micro-batches of 4": "--parallel.dp 2 --train.micro_batch_size 4",
    "dp 2, ZeRO-3": "--parallel.dp 2 --optimizer.zero_stage 3",
    "tp 2": "--parallel.tp 2",
    "tp 2, sequence parallel": "--parallel.tp 2 --parallel.sequence_parallel",
    "pp 2": "--parallel.pp 2",
    "pp 2, zb-v": "--parallel.pp 2 --parallel.schedule zb-v",
    "pp 2, recomputed": "--parallel.pp 2 --train.recompute full",
    "cp 2": "--parallel.cp 2",
}
SIZES = (
    *("--model.hidden_size", "256", "--model.intermediate_size", "704", "--model.num_hidden_layers", "8"),
    *("--model.num_attention_heads", "4", "--model.num_key_value_heads", "2", "--model.vocab_size", "2048"),
    *("--train.seq_length", "256", "--train.global_batch_size", "8"),
)


@dataclass(frozen=True)
class Options(Output):
    """Compare predicted step times with measured ones."""

    gpu: Path
    """The hardware file of this machine."""
    rounds: int = 3
    """How often each layout is run."""


@dataclass(frozen=True)
class Times:
    """The predicted and the measured seconds of a step."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a share of the measured time."""
        return self.predicted / self.measured - 1


def run(flags: Sequence[str], machine: Path, folder: Path) -> Times:
    """Train for as many steps as a comparison needs. Raises BenchmarkError if the run fails."""
    more = ("--train.steps", STEPS + 1, "--gpu", machine, "--launch.device", "cpu", "--checkpoint.every", 0)
    # A core for each rank, as in the calibration.
    lines = pretrain(folder, (*SIZES, *flags, *more), OMP_NUM_THREADS="1")
    (line,) = (line for line in lines if "predicted_step_seconds" in line)
    return Times(line["predicted_step_seconds"], line["measured_step_seconds"])


def rank_correlation(found: Sequence[Times]) -> float:
    """Spearman's rank correlation of predicted and measured times."""
    predicted = _ranks([times.predicted for times in found])
    measured = _ranks([times.measured for times in found])
    squares = sum((a - b) ** 2 for a, b in zip(predicted, measured, strict=True))
    return 1 - 6 * squares / (len(found) ** 3 - len(found))


def _ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def summary(found: Mapping[str, Times]) -> dict[str, Any]:
    """Mean error, rank correlation, and how much longer the first choice takes than the best layout measured."""
    chosen = min(found, key=lambda name: found[name].predicted)
    best = min(found, key=lambda name: found[name].measured)
    return {
        "mean_error": mean(abs(times.error) for times in found.values()),
        "rank_correlation": rank_correlation(list(found.values())),
        "first_choice": chosen,
        "best_measured": best,
        "regret": found[chosen].measured / found[best].measured - 1,
    }


def measure(options: Options) -> Found:
    """Run all layouts in every round. Raises ConfigError for a hardware file that cannot be read."""
    hardware.load(str(options.gpu))
    rounds: dict[str, list[Times]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for index, (name, flags) in enumerate(LAYOUTS.items()):
                world = "2" if "parallel" in flags else "1"
                place = Path(folder) / f"{number}-{index}"
                rounds[name].append(run([*flags.split(), "--launch.nproc", world], options.gpu.absolute(), place))
    found = {name: min(some, key=lambda times: times.measured) for name, some in rounds.items()}
    outcome = summary(found)
    measured = {name: [[times.predicted, times.measured] for times in some] for name, some in rounds.items()}
    rows = [{"layout": name, **asdict(times), "error": times.error} for name, times in found.items()]
    return Found({"layouts": measured, "summary": outcome}, [table(rows), table([outcome])])
