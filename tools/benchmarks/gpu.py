"""Trains Llamas of 1B to 8B in bf16 on one GPU: megapar beside the same model in plain PyTorch, eager and compiled.

All start from the same weights and see the same batches. The peer does what megapar does in torch's own ops: bf16
weights and activations, gradients of every micro-batch added to fp32 buffers, clipped by their global norm, fused AdamW
on fp32 main weights with fp32 moments, rounded into the bf16 weights: 18 bytes a parameter in both. Its cross entropy
is taken of fp32 logits of all tokens, attention is SDPA as it comes, and torch.compile compiles model and loss as one
graph. With full recompute it recomputes its layers as well.

MFU is tokens/s * FLOPs of a token / the GPU's dense bf16 peak (megapar.device.PEAK_TFLOPS). FLOPs of a token are
6 * (weights of matrices, the head's included) + 6 * s * heads * head_dim * layers: forward and backward, causal
attention counted half, no recomputation (megapar_models.counts). The first steps, which compile, are not
counted. Every figure of megapar is printed beside what benchmarks/gpu_model.py predicts for an H200.

Order: megapar on every workload, one profiled step, plain PyTorch, torch.compile. Each measurement runs alone, in a
fresh process, for at most three minutes. The JSON file is written again after each of them, so that nothing measured is
lost whenever the program is ended. A contender that runs out of memory, crashes or hangs ends none of the others; the
program ends with exit code 70 if megapar failed otherwise than for memory, or if losses or norms differ.

How long it takes, at the rates of gpu_model on an H200, with 8 micro-batches a step and 2 + 4 steps: megapar's steps
take 12, 14, 18 and 44 s (1b, 3b, 8b-16-layers, 8b) and each process starts in about 20 s, 170 s in all; the profile
takes 30 s. Eager PyTorch, about 1.4 times slower, takes 150 s, 8b ends for lack of memory. That leaves 160 s of 8.5
minutes for torch.compile, which needs one or two minutes a model: not all of them are run, and those are named.

--dry_run does the same on the CPU with a model of thousands of weights and claims no figure.
"""

import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from megapar_models.counts import WholeModel
from megapar_models.registry import presets, validate
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_profile, layouts
from benchmarks.gpu_contenders import Compiled, CompiledDry, MixedPrecision, RandomWeights
from benchmarks.gpu_model import H200, OFF, Job, Prediction, plain_peak_bytes, predict
from benchmarks.peers import Peer, Result
from megapar import device
from megapar.config.derive import num_microbatches
from megapar.config.options import Config, KernelsConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.errors import ConfigError, MegaparError, storing
from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json
from megapar.train.provenance import in_a_line, provenance

WARMUP = 2
TOLERANCES = {"loss": 1e-2, "grad_norm": 5e-2}  # relative: bf16 activations, rounded at other places
TARGET_MFU = 0.45
LARGE_MEMORY = 100e9  # bytes: above it is an H200, below it an H100 or A100
CONTENDER_SECONDS = 180.0  # a contender that takes longer hangs, or would leave no time for the others
GRACE_MINUTES = 1.0  # for what runs when --minutes are over

WorkloadName = Literal["1b", "3b", "8b-16-layers", "8b", "8b-4096"]
ContenderName = Literal["megapar", "torch", "compiled"]
RecomputeName = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Workload:
    """A preset of a model family and how a GPU of more than 100 GB trains it.

    `small_micro_batch_size` is the micro-batch of a smaller GPU, 0 if the model does not fit into 80 GB. `layers` 0
    means all. `instead` names the workload that takes this one's place if megapar runs out of memory.
    """

    preset: str
    seq_length: int
    micro_batch_size: int
    small_micro_batch_size: int = 0
    layers: int = 0
    recompute: RecomputeName = "none"
    loss_chunk: int = 0
    instead: WorkloadName | None = None


# The whole 8B takes 134.7 GiB of an H200's 140.4 before its first activation. Its logits are therefore computed in two
# chunks, which saves 0.4 GiB and costs 1.4 % of the time; more chunks would save nothing, because then the gradients of
# the last layer are the largest temporary tensors.
WORKLOADS: dict[WorkloadName, Workload] = {
    "1b": Workload("llama3.2-1b", 4096, 4, small_micro_batch_size=2),
    "3b": Workload("llama3.2-3b", 4096, 2, small_micro_batch_size=1),
    "8b-16-layers": Workload("llama3-8b", 8192, 1, layers=16),
    "8b": Workload("llama3-8b", 8192, 1, recompute="full", loss_chunk=4096, instead="8b-4096"),
    "8b-4096": Workload("llama3-8b", 4096, 1, recompute="full", loss_chunk=2048),
}


@dataclass(frozen=True)
class Options:
    """Measure training on one GPU."""

    workloads: tuple[WorkloadName, ...] = ()
    """What is trained; empty: all that fit the GPU's memory, without 8b-4096, which takes 8b's place if that does
    not."""
    contenders: tuple[ContenderName, ...] = ("megapar", "torch", "compiled")
    """Who trains it: megapar, plain PyTorch, torch.compile. They run in this order, whatever order is given."""
    layers: int = 0
    """Layers of every workload; 0: its own number."""
    recompute: Literal["workload", "none", "selective", "full"] = "workload"
    """Recomputed activations, as train.recompute; workload: its own."""
    loss_chunk: int = -1
    """Tokens whose logits megapar holds at once, as kernels.loss_chunk; -1: the workload's own."""
    micro_batch_size: int = 0
    """Samples of a forward pass; 0: the workload's own."""
    seq_length: int = 0
    """Tokens of a sample; 0: the workload's own."""
    micro_batches: int = 8
    """Forward passes of a step."""
    steps: int = 4
    """Timed steps, after two that warm up."""
    minutes: float = 8.5
    """No contender is begun after this time, and what runs is ended a minute later; what was not run is named."""
    profile: Literal["first", "none", "1b", "3b", "8b-16-layers", "8b", "8b-4096"] = "first"
    """The workload of which megapar's kernels are timed one by one, in one step; first: the first of --workloads."""
    json: Path = Path("runs/benchmark_gpu.json")
    """All numbers go here, after every contender; the profile as text beside it, named ...-kernels.txt."""
    dry_run: bool = False
    """A tiny model on the CPU, without figures."""


class TrainingError(MegaparError):
    """megapar failed, or contenders did not compute the same."""


def contender_class(name: ContenderName, dry_run: bool) -> type[Peer]:
    if name == "megapar":
        return layouts.Megapar
    if name == "torch":
        return MixedPrecision
    return CompiledDry if dry_run else Compiled


def model_of(workload: Workload, layers: int, dry_run: bool) -> ModelConfig:
    """The preset, cut to `layers` layers (0: the workload's own number), without stretched wavelengths, which cost
    nothing and which the peer lacks."""
    preset = tomllib.loads(presets()[workload.preset].read_text())["model"]
    model = ModelConfig(**{key: value for key, value in preset.items() if key != "rope_scaling"})
    model = replace(model, num_hidden_layers=layers or workload.layers or model.num_hidden_layers)
    if not dry_run:
        return model
    model = replace(model, hidden_size=128, num_hidden_layers=2, intermediate_size=256, vocab_size=512)
    return replace(model, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def make_config(options: Options, name: WorkloadName, large: bool) -> Config:
    """What is trained, derived values filled in; `large`: on a GPU of more than 100 GB.

    Raises ConfigError for numbers that do not fit.
    """
    workload = WORKLOADS[name]
    own = workload.micro_batch_size if large else workload.small_micro_batch_size or 1
    micro_batch_size = options.micro_batch_size or own
    seq_length = options.seq_length or workload.seq_length
    loss_chunk = workload.loss_chunk if options.loss_chunk < 0 else options.loss_chunk
    if options.dry_run:
        seq_length = 32
        loss_chunk = min(loss_chunk, 16)
    train = TrainConfig(
        global_batch_size=micro_batch_size * options.micro_batches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        precision="bf16",
        recompute=workload.recompute if options.recompute == "workload" else options.recompute,
    )
    config = Config(
        model=model_of(workload, options.layers, options.dry_run),
        parallel=ParallelConfig(dp=1),
        train=train,
        optimizer=OptimizerConfig(lr=1e-4, schedule="constant"),
        kernels=KernelsConfig(loss_chunk=loss_chunk),
    )
    return validate(config, 1)


def job_of(config: Config) -> Job:
    """The same for the model of time and memory."""
    train = config.train
    return Job(
        config.model,
        train.micro_batch_size,
        train.seq_length,
        micro_batches=num_microbatches(config),
        recompute=train.recompute,
        loss_chunk=config.kernels.loss_chunk,
    )


def facts_of(where: torch.device) -> dict[str, Any]:
    """The machine, found in a process of its own: this one must not start CUDA, or its children could not."""
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else 0
    return provenance(where) | {"memory_bytes": memory, "peak_tflops": device.peak_tflops(where)}


def take_steps(contender: Peer, config: Config, steps: int, where: torch.device) -> tuple[list[float], list[Result]]:
    """Seconds and result of each step."""
    seconds = []
    results = []
    for tokens_bs, targets_bs in layouts.make_batches(config, steps):
        tokens = tokens_bs.to(where)
        targets = targets_bs.to(where)
        device.synchronize(where)
        start = time.perf_counter()
        results.append(contender.step(tokens, targets))
        device.synchronize(where)
        seconds.append(time.perf_counter() - start)
    return seconds, results


def build(kind: type[Peer], config: Config, where: torch.device) -> Peer:
    """The contender, and on a GPU no memory that only its building needed."""
    contender = kind(config, RandomWeights(config.model, where), where)
    if where.type == "cuda":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    return contender


def measure(config: Config, kind: type[Peer], steps: int, where: torch.device) -> dict[str, Any]:
    """One contender's steps: seconds of those that count, results of all, peak bytes of device memory."""
    contender = build(kind, config, where)
    seconds, results = take_steps(contender, config, WARMUP + steps, where)
    return {"seconds": seconds[WARMUP:], "results": results, "peak_bytes": device.peak_memory_bytes(where)}


def measure_kernels(config: Config, where: torch.device) -> dict[str, Any]:
    """megapar's kernels in one step that is not the first: (name, launches, milliseconds) and the step's own time."""
    contender = build(layouts.Megapar, config, where)
    seconds, _ = take_steps(contender, config, WARMUP, where)
    tokens, targets = (x.to(where) for x in layouts.make_batches(config, 1)[0])
    kernels = gpu_profile.record(lambda: contender.step(tokens, targets), where)
    return {"step_ms": seconds[-1] * 1e3, "kernels": kernels}


def out_of_memory(error: Exception) -> bool:
    """Whether a contender's traceback says that the device's memory was exhausted: by torch, cuBLAS, cuDNN or
    Triton."""
    text = str(error)
    return any(words in text for words in ("OutOfMemoryError", "out of memory", "STATUS_ALLOC_FAILED"))


Kind = Literal["megapar", "torch", "compiled", "profile"]
Item = tuple[Kind, WorkloadName]


def default_workloads(large: bool) -> list[WorkloadName]:
    """All that take no other's place, of those that fit the GPU's memory."""
    spare = {workload.instead for workload in WORKLOADS.values()}
    return [name for name, w in WORKLOADS.items() if name not in spare and (large or w.small_micro_batch_size)]


def plan(options: Options, names: Sequence[WorkloadName]) -> list[Item]:
    """What is run, in order: what matters most comes first, what may take minutes to compile comes last."""
    items: list[Item] = []
    order: tuple[ContenderName, ...] = ("megapar", "torch", "compiled")
    for contender in order:
        if contender in options.contenders:
            items += [(contender, name) for name in names]
        if contender == "megapar" and options.profile == "first" and contender in options.contenders:
            items.append(("profile", names[0]))
        elif contender == "megapar" and options.profile != "first" and options.profile != "none":
            items.append(("profile", options.profile))
    return items


def with_instead(items: Sequence[Item], name: WorkloadName, instead: WorkloadName) -> list[Item]:
    """The rest of the plan once megapar had no memory for `name`: `instead` comes next, and after `name` for all."""
    changed: list[Item] = [("megapar", instead)]
    for kind, workload in items:
        changed.append((kind, workload))
        if workload == name:
            changed.append((kind, instead))
    return changed


class Session:
    """Runs the plan, and keeps, prints and writes what is found."""

    def __init__(self, options: Options, facts: dict[str, Any], began: float):
        self.options = options
        self.began = began
        self.facts = facts
        self.where = "cpu" if options.dry_run else "cuda"
        self.large = options.dry_run or facts["memory_bytes"] > LARGE_MEMORY
        self.machine = replace(
            H200,
            memory_bytes=facts["memory_bytes"] or H200.memory_bytes,
            peak_tflops=facts["peak_tflops"] or H200.peak_tflops,
        )
        self.runs: dict[WorkloadName, dict[str, Any]] = {}
        self.profile: dict[str, Any] | None = None
        self.not_run: list[str] = []

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def work(self, items: Sequence[Item]) -> None:
        """Run `items` in order, as far as the time lasts."""
        waiting = list(items)
        while waiting:
            kind, name = waiting.pop(0)
            if self.minutes() >= self.options.minutes:
                self.not_run.append(f"{name}, {kind}")
                continue
            if kind == "profile":
                self.take_profile(name)
            else:
                found = self.take(kind, name)
                instead = WORKLOADS[name].instead
                if kind == "megapar" and found["status"] == "out of memory" and instead and instead not in self.runs:
                    waiting = with_instead(waiting, name, instead)
            self.write()
        self.write()

    def predict(self, config: Config) -> Prediction:
        return predict(job_of(config), self.machine)

    def apart(self, body: Any) -> dict[str, Any]:
        """`body(device)` in a process of its own, with a status: ok, out of memory, or what went wrong."""
        left = (self.options.minutes + GRACE_MINUTES - self.minutes()) * 60
        try:
            found = layouts.run_ranks(1, self.where, body, seconds=round(min(CONTENDER_SECONDS, left), 1))[0]
        except layouts.BenchmarkError as error:
            lines = str(error).strip().splitlines()
            if out_of_memory(error):
                return {"status": "out of memory", "detail": lines[-1][:300]}
            print(error, file=sys.stderr, flush=True)
            return {"status": lines[-1][:150]}
        return {"status": "ok", **found}

    def run_of(self, name: WorkloadName, config: Config) -> dict[str, Any]:
        """The workload's part of the file, made when its first contender is about to run."""
        if name not in self.runs:
            prediction = self.predict(config)
            whole = WholeModel(config.model)
            self.runs[name] = {
                "workload": name,
                "model": WORKLOADS[name].preset,
                "layers": config.model.num_hidden_layers,
                "parameters": whole.parameters(),
                "flops_per_token": whole.flops_per_token(config.train.seq_length),
                "micro_batch_size": config.train.micro_batch_size,
                "seq_length": config.train.seq_length,
                "micro_batches": num_microbatches(config),
                "tokens_per_step": config.train.global_batch_size * config.train.seq_length,
                "recompute": config.train.recompute,
                "loss_chunk": config.kernels.loss_chunk,
                "predicted": {"ms": prediction.ms, "bytes": prediction.bytes, "spare_bytes": prediction.spare_bytes},
                "contenders": [],
            }
        return self.runs[name]

    def take(self, kind: ContenderName, name: WorkloadName) -> dict[str, Any]:
        """Measure one contender of one workload, and say what was found."""
        config = make_config(self.options, name, self.large)
        contender = contender_class(kind, self.options.dry_run)
        found = self.apart(partial(measure, config, contender, self.options.steps))
        run = self.run_of(name, config)
        row = {"name": contender.name, "contender": kind} | found | self.figures(kind, found, run, config)
        run["contenders"].append(row)
        print(in_words(run, row), flush=True)
        return row

    def figures(
        self, kind: ContenderName, found: dict[str, Any], run: dict[str, Any], config: Config
    ) -> dict[str, Any]:
        """What was measured, what the model predicts, and their ratios. None in a dry run, which measures nothing.

        Of the peers the model knows memory alone.
        """
        if kind == "megapar":
            prediction = self.predict(config)
            predicted = {
                "ms": prediction.total_ms,
                "tokens_per_second": prediction.tokens_per_second,
                "mfu": prediction.mfu,
                "peak_bytes": prediction.peak_bytes,
            }
        else:
            predicted = {"peak_bytes": plain_peak_bytes(job_of(config))}
        measured: dict[str, float | None] = dict.fromkeys(("ms", "tokens_per_second", "mfu", "peak_bytes"))
        if found["status"] == "ok" and not self.options.dry_run:
            seconds = statistics.median(found["seconds"])
            rate = run["tokens_per_step"] / seconds
            peak = self.facts["peak_tflops"]
            measured["ms"] = seconds * 1e3 / run["micro_batches"]
            measured["tokens_per_second"] = rate
            measured["mfu"] = rate * run["flops_per_token"] / peak / 1e12 if peak else None
            measured["peak_bytes"] = found["peak_bytes"]
        ratios = {key: value / expected for key, expected in predicted.items() if (value := measured[key]) is not None}
        seconds_kept = None if self.options.dry_run else found.get("seconds")
        return measured | {"seconds": seconds_kept, "predicted": predicted, "ratios": ratios}

    def take_profile(self, name: WorkloadName) -> None:
        """megapar's kernels in one step of `name`, into the file and as text beside it."""
        config = make_config(self.options, name, self.large)
        found = self.apart(partial(measure_kernels, config)) | {"workload": name}
        if found["status"] == "ok":
            kernels = [gpu_profile.Kernel(*kernel) for kernel in found["kernels"]]
            predicted = self.predict(config).by_category()
            found["categories"] = gpu_profile.by_category(kernels, predicted, num_microbatches(config))
            if self.options.dry_run:  # what was timed are torch's ops on a CPU
                found["step_ms"] = None
                found["kernels"] = [[kernel.name, kernel.calls, None] for kernel in kernels]
                found["categories"] = [row | {"ms": None} for row in found["categories"]]
            file = self.options.json.with_name(f"{self.options.json.stem}-kernels.txt")
            categories = gpu_profile.categories_as_text(found)
            with storing(file):
                file.write_text(f"{categories}\n{gpu_profile.kernels_as_text(found)}")
            print(f"{categories}kernels: {file}", flush=True)
        else:
            print(f"{name}, profile: {found['status']}", flush=True)
        self.profile = found

    def write(self) -> None:
        """The file as it stands."""
        options = {key: str(value) for key, value in asdict(self.options).items()}
        found = {"runs": list(self.runs.values()), "profile": self.profile, "not_run": self.not_run}
        more = {"dry_run": self.options.dry_run, "minutes": self.minutes(), "options": options}
        write_json(self.options.json, self.facts | more | found)


def in_words(run: dict[str, Any], row: dict[str, Any]) -> str:
    """One line about one contender."""
    line = f"{run['workload']}, {row['name']}: {row['status']}"
    if row["status"] == "out of memory":
        return f"{line}; by the model of memory it needs {row['predicted']['peak_bytes'] / 2**30:.1f} GiB"
    if row["ms"] is None:
        return line
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"{line}, {row['tokens_per_second']:,.0f} tokens/s{mfu}, peak {row['peak_bytes'] / 2**30:.1f} GiB"


def problems(run: dict[str, Any]) -> list[str]:
    """What makes the numbers worthless: megapar that failed, or others that computed something else.

    A lack of memory is a result.
    """
    ours = next((row for row in run["contenders"] if row["contender"] == "megapar"), None)
    if ours is None or ours["status"] == "out of memory":
        return []
    if ours["status"] != "ok":
        return [f"{run['workload']}, megapar: {ours['status']}"]
    found = []
    for other in (row for row in run["contenders"] if row is not ours and row["status"] == "ok"):
        for place, (what, tolerance) in enumerate(TOLERANCES.items()):
            pairs = zip(ours["results"], other["results"], strict=True)
            error = max(abs(x[place] - y[place]) / abs(y[place]) for x, y in pairs)
            if not error <= tolerance:
                found.append(f"{run['workload']}, {other['name']}: {what} differs by {error:.1e}, above {tolerance}")
    return found


def report(options: Options, runs: Sequence[dict[str, Any]]) -> Table:
    """Contenders side by side."""
    title = "DRY RUN on the CPU: no figures" if options.dry_run else f"Training on one GPU (aim: {TARGET_MFU:.0%} MFU)"
    table = Table(title=title)
    for column in ("workload", "contender", "status"):
        table.add_column(column)
    for column in ("tokens/s", "MFU", "peak GiB", "megapar is faster", "last loss"):
        table.add_column(column, justify="right")
    for run in runs:
        ours = next((row["tokens_per_second"] for row in run["contenders"] if row["contender"] == "megapar"), None)
        for row in run["contenders"]:
            rate, mfu, peak = (row[key] for key in ("tokens_per_second", "mfu", "peak_bytes"))
            table.add_row(
                f"{run['workload']} ({run['parameters'] / 1e6:,.1f}M)",
                row["name"],
                row["status"],
                f"{rate:,.0f}" if rate else "-",
                f"{mfu:.1%}" if mfu else "-",
                f"{peak / 2**30:.1f}" if peak else "-",
                f"{ours / rate:.2f}x" if rate and ours else "-",
                f"{row['results'][-1][0]:.4f}" if "results" in row else "-",
                end_section=row is run["contenders"][-1],
            )
    return table


def prediction_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Every measured figure beside its prediction; those that differ by more than OFF are marked."""
    table = Table(title="Measured beside the model of an H200 (benchmarks/gpu_model.py)")
    for column in ("workload", "contender", "figure"):
        table.add_column(column)
    for column in ("measured", "predicted", "ratio", f"off by > {OFF:.0%}"):
        table.add_column(column, justify="right")
    forms = {
        "ms": ("ms a micro-batch", 1.0, ",.1f"),
        "tokens_per_second": ("tokens/s", 1.0, ",.0f"),
        "mfu": ("MFU", 1.0, ".1%"),
        "peak_bytes": ("peak GiB", 2.0**30, ",.1f"),
    }
    for run in runs:
        for row in run["contenders"]:
            for key, ratio in row["ratios"].items():
                name, unit, form = forms[key]
                numbers = [format(value / unit, form) for value in (row[key], row["predicted"][key])]
                mark = "<-- off" if abs(ratio - 1) > OFF else ""
                table.add_row(run["workload"], row["name"], name, *numbers, f"{ratio:.2f}", mark)
    return table


def main(options: Options) -> None:
    """Measure, print the tables, write the JSON file; raises TrainingError if the numbers are worthless."""
    began = time.monotonic()
    for name in options.workloads or WORKLOADS:
        make_config(options, name, large=True)
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run trains a tiny model on the CPU, without figures")
    with storing(options.json):
        options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = layouts.run_ranks(1, "cpu" if options.dry_run else "cuda", facts_of, seconds=CONTENDER_SECONDS)[0]
    session = Session(options, facts, began)
    session.write()
    session.work(plan(options, options.workloads or default_workloads(session.large)))
    runs = list(session.runs.values())
    console = Console(width=130)  # narrower, numbers would be cut
    console.print(report(options, runs))
    if not options.dry_run:
        console.print(prediction_table(runs))
    for what in session.not_run:
        console.print(f"not run, the time was up: {what}")
    console.print(in_a_line(facts))
    console.print(f"{session.minutes():.1f} minutes, {options.json}")
    if found := [problem for run in runs for problem in problems(run)]:
        raise TrainingError("; ".join(found))


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
