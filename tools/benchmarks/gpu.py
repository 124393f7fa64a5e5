"""Trains Llamas of 1B to 8B and mixtures of experts in bf16 on one GPU: megapar beside the same Llama in plain
PyTorch, or the same mixture of Hugging Face, eager and compiled.

All start from the same weights and see the same batches. The peer does the same as megapar in torch's own ops: bf16
weights and activations, gradients of every micro-batch added to fp32 buffers, clipped by their global norm, fused AdamW
on fp32 main weights with fp32 moments, rounded into the bf16 weights: 18 bytes a parameter in both. Its cross entropy
is taken of fp32 logits of all tokens, attention is SDPA as it comes, and torch.compile compiles model and loss as one
graph. With full recompute it recomputes its layers as well. Mixtures are cut to a few layers that fit into a GPU, so
their embedding and head weigh more than in the whole model. Experts of Hugging Face are torch's grouped_mm.

MFU is tokens/s * FLOPs of a token / the GPU's dense bf16 peak (megapar.system.device.PEAK_TFLOPS).
megapar_models.counts has the FLOPs of a token: causal attention counted half, no recomputation. The first steps compile
and are not counted. The time of megapar stands beside the prediction of megapar_tools.plan.step_time, and its memory
beside the plan of --dry_run.

`--contenders megapar fp8` is megapar in bf16 and with train.fp8 blocks, on the same weights and batches. MFU stays
relative to the bf16 peak.

Order: megapar on every workload, one profiled step, plain PyTorch, torch.compile with its one or two minutes a model.
Each measurement runs alone, in a fresh process, for at most three minutes, and the JSON file is written again after
each. If a contender runs out of memory, crashes or hangs, the others go on. The program ends with exit code 70 if
megapar failed otherwise than for memory, or if losses or norms differ.

--dry_run does the same on the CPU with a model of thousands of weights and claims no figure.
"""

import statistics
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megapar_models.build import StageBuilder
from megapar_models.counts import WholeModel
from megapar_models.registry import find, presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.durations import BACKWARD_ATTENTION, EXPERTS, FORWARD_ATTENTION, KERNELS, PRODUCTS
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import report_rank
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import OPTIMIZER, StepTime, step_time
from rich.table import Table

from benchmarks.contenders import Megapar
from benchmarks.counting import cost
from benchmarks.gpu_contenders import (
    Compiled,
    CompiledMixture,
    MegaparInFp8,
    MixedPrecision,
    MixedPrecisionMixture,
    RandomWeights,
)
from benchmarks.harness import Found, Output, Session, figure, table
from benchmarks.layouts import largest_error, make_batches
from benchmarks.peers import Peer, Result
from benchmarks.profiling import Kernel, kind_of, record
from benchmarks.ranks import BenchmarkError, run_ranks
from megapar.base.errors import ConfigError
from megapar.config.derive import num_microbatches
from megapar.config.model_options import MixtureModel, ModelConfig, MoEConfig
from megapar.config.options import Config, KernelsConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.observe.provenance import provenance
from megapar.system import device

OFF = 0.15  # a measured figure that differs from its prediction by more is marked
WARMUP = 2
TOLERANCES = {"loss": 1e-2, "grad_norm": 5e-2}  # relative: bf16 activations, rounded at other places
TARGET_MFU = 0.45
CONTENDER_SECONDS = 180.0  # a contender that takes longer hangs, or would leave no time for the others
GRACE_MINUTES = 1.0  # for what runs when --minutes are over
NO_MEMORY = "out of memory"  # a contender's status

WorkloadName = Literal["1b", "3b", "8b-16-layers", "8b", "mixtral-2-layers", "qwen3-4-layers"]
ContenderName = Literal["megapar", "fp8", "torch", "compiled"]


@dataclass(frozen=True)
class Workload:
    """A preset of a model family and how an H200 trains it. `layers` 0 means all."""

    preset: str
    seq_length: int
    micro_batch_size: int
    layers: int = 0
    recompute: Literal["none", "full"] = "none"
    loss_chunk: int = 0


# The whole 8B takes 134.7 GiB of an H200's 140.4 before its first activation. Its logits are therefore computed in two
# chunks, which saves 0.4 GiB and costs 1.4 % of the time; more chunks would save nothing, because then the gradients of
# the last layer are the largest temporary tensors.
WORKLOADS: dict[WorkloadName, Workload] = {
    "1b": Workload("llama3.2-1b", 4096, 4),
    "3b": Workload("llama3.2-3b", 4096, 2),
    "8b-16-layers": Workload("llama3-8b", 8192, 1, layers=16),
    "8b": Workload("llama3-8b", 8192, 1, recompute="full", loss_chunk=4096),
    "mixtral-2-layers": Workload("mixtral-8x7b", 4096, 2, layers=2),
    "qwen3-4-layers": Workload("qwen3-30b-a3b", 4096, 2, layers=4),
}

CONTENDERS: dict[ContenderName, type[Peer]] = {
    "megapar": Megapar,
    "fp8": MegaparInFp8,
    "torch": MixedPrecision,
    "compiled": Compiled,
}
OF_MIXTURES: dict[ContenderName, type[Peer]] = CONTENDERS | {
    "torch": MixedPrecisionMixture,
    "compiled": CompiledMixture,
}

NO_BALANCE = {"balance": "none", "router_aux_loss_coef": MoEConfig.router_aux_loss_coef}

# The parts of the time, by what the kernels that take it are called in a profile.
OTHERS = "other kernels"
CATEGORIES: dict[str, tuple[str, ...]] = {
    "matrix products": (PRODUCTS,),
    "products of experts": (EXPERTS,),
    "attention": (FORWARD_ATTENTION, BACKWARD_ATTENTION),
    OTHERS: (KERNELS,),
    "optimizer and norm": (OPTIMIZER,),
}

# Kinds of kernels by their names in lower case, tried in this order. Attention comes before the matrix products,
# because attention's kernels are built from CUTLASS too and have it in their names.
PATTERNS = {
    "attention": r"flash|fmha|sdpa|attention|\b_softmax_|softmax_warp|cudnn::fusion::(compute_dot_do_o|convert_dq)"
    r"|fmha_reduce_head|\b(forward|queries|keys_values)_kernel"
    r"|\b(sums|pairs|inverse|solved|states|outputs|(state|pair|input)_gradients)_kernel",
    OTHERS: r"\b_norm_|rms_?norm|layer_norm|rowwisemoments|gammabeta|\b_activation_|\b_rotate"
    r"|\b_statistics_kernel|\b_gradient_kernel|cunn_softmax|nll_loss",
    "optimizer and norm": r"\b_adamw_|\b_square_sum|fusedadam|lpnorm",
    "products of experts": r"groupproblemshape|grouped|\b_weight_gradient_kernel",
    "matrix products": r"nvjet|cutlass|xmma|gemm|gemv|splitk|cublas|matmul|\bscaled_gradient_kernel",
}


@dataclass(frozen=True)
class Options(Output):
    """Measure training on one GPU."""

    workloads: tuple[WorkloadName, ...] = ()
    """What is trained; empty: all."""
    contenders: tuple[ContenderName, ...] = ("megapar", "torch", "compiled")
    """Who trains it: megapar, megapar with train.fp8 blocks, plain PyTorch or Hugging Face, torch.compile. They run in
    this order, whatever order is given."""
    micro_batch_size: int = 0
    """Samples of a forward pass; 0: the workload's own."""
    micro_batches: int = 8
    """Forward passes of a step."""
    steps: int = 4
    """Timed steps, after two that warm up."""
    minutes: float = 8.5
    """No contender is begun after this time, and what runs is ended a minute later; what was not run is named."""
    profile: bool = True
    """Time megapar's kernels one by one, in one step of the first workload."""
    json: Path = Path("runs/benchmark_gpu.json")
    """All numbers go here, after every contender."""
    dry_run: bool = False
    """A tiny model on the CPU, without figures."""


def model_of(workload: Workload, *, dry_run: bool) -> ModelConfig:
    """The preset with the workload's layers, without what the peer lacks and costs nothing: stretched wavelengths, a
    loss of balance."""
    preset = tomllib.loads(presets()[workload.preset].read_text())["model"]
    mixture = preset.pop("moe", None)
    model = find(preset["family"]).options(**{key: value for key, value in preset.items() if key != "rope_scaling"})
    model = replace(model, num_hidden_layers=workload.layers or model.num_hidden_layers)
    if isinstance(model, MixtureModel):
        model = replace(model, moe=replace(model.moe, **mixture | NO_BALANCE))
    if not dry_run:
        return model
    if isinstance(model, MixtureModel):
        model = replace(model, moe=replace(model.moe, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64))
    model = replace(model, hidden_size=128, num_hidden_layers=2, intermediate_size=256, vocab_size=512)
    return replace(model, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def make_config(options: Options, name: WorkloadName) -> Config:
    """What is trained, derived values filled in. Raises ConfigError if the numbers do not fit each other."""
    workload = WORKLOADS[name]
    seq_length = workload.seq_length
    loss_chunk = workload.loss_chunk
    micro_batch_size = options.micro_batch_size or workload.micro_batch_size
    if options.dry_run:
        seq_length = 32
        loss_chunk = min(loss_chunk, 16)
    train = TrainConfig(
        global_batch_size=micro_batch_size * options.micro_batches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        precision="bf16",
        recompute=workload.recompute,
    )
    config = Config(
        model=model_of(workload, dry_run=options.dry_run),
        parallel=ParallelConfig(dp=1),
        train=train,
        # So low that losses stay comparable: at 1e-4, without warmup, roundings grow until losses differ by 15 %.
        optimizer=OptimizerConfig(lr=1e-5, schedule="constant"),
        kernels=KernelsConfig(loss_chunk=loss_chunk),
    )
    return validate(config, 1)


def plan_memory(config: Config, _: torch.device) -> dict[str, Any]:
    """What megapar needs by its plan, by name. Workspaces of kernels are not in it."""
    return {"bytes": report_rank(config, Parts(StageBuilder()), 0).rows}


def plan_time(config: Config, machine: Hardware, _: torch.device) -> dict[str, Any]:
    """The predicted milliseconds of a step, and of a micro-batch by category."""
    prediction = predict(config, machine)
    return {"step_ms": prediction.seconds * 1e3, "ms": predicted_ms(config, prediction)}


def facts_of(target: torch.device) -> dict[str, Any]:
    """The machine, found in a process of its own: this one must not start CUDA, or its children could not."""
    return provenance(target) | {"peak_tflops": device.peak_tflops(target)}


def take_steps(contender: Peer, config: Config, steps: int) -> tuple[list[float], list[Result]]:
    """Seconds and result of each step."""
    found = []
    for batch in make_batches(config, steps):
        on_device = [x.to(contender.device) for x in batch]
        device.synchronize(contender.device)
        found.append(cost(partial(contender.whole_step, *on_device)))
    return [spent.wall for spent, _ in found], [result for _, result in found]


def build(kind: type[Peer], config: Config, target: torch.device) -> Peer:
    """The contender; on a GPU, memory needed only for its building is free again."""
    contender = kind(config, RandomWeights(config.model, target), target)
    if target.type == "cuda":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    return contender


def measure_steps(config: Config, kind: type[Peer], steps: int, target: torch.device) -> dict[str, Any]:
    """One contender's steps: seconds of the counted ones, results of all, peak bytes of device memory."""
    seconds, results = take_steps(build(kind, config, target), config, WARMUP + steps)
    return {"seconds": seconds[WARMUP:], "results": results, "peak_bytes": device.peak_memory_bytes(target)}


def measure_kernels(config: Config, target: torch.device) -> dict[str, Any]:
    """megapar's kernels in one step after the first: (name, launches, milliseconds) and the step's own time."""
    contender = build(Megapar, config, target)
    seconds, _ = take_steps(contender, config, WARMUP)
    batch = [x.to(target) for x in make_batches(config, 1)[0]]
    return {"step_ms": seconds[-1] * 1e3, "kernels": record(partial(contender.whole_step, *batch), target)}


def categorize(name: str) -> str:
    """The category of CATEGORIES for a kernel's name as the profiler prints it."""
    return kind_of(name.lower(), PATTERNS, OTHERS)


def machine_of(circumstances: Mapping[str, Any]) -> Hardware:
    """The machine that the GPU's name tells, with its peak; an H200 for another GPU and in a dry run."""
    machine = hardware.load(hardware.name_of(str(circumstances.get("hardware", ""))) or "h200-141g")
    peak = circumstances["peak_tflops"] or machine.peak_tflops["bf16"]
    return replace(machine, peak_tflops={**machine.peak_tflops, "bf16": peak})


def predict(config: Config, machine: Hardware) -> StepTime:
    """The time of a step of megapar with its fused kernels on `machine`."""
    planned = replace(config, kernels=replace(config.kernels, backend="triton"))
    return step_time(planned, Parts(StageBuilder()), machine)


def predicted_ms(config: Config, prediction: StepTime) -> dict[str, float]:
    """Milliseconds of a micro-batch by category. A step's own work is shared among its micro-batches."""
    each = 1e3 / num_microbatches(config)
    return {name: each * sum(prediction.busy.get(part, 0.0) for part in parts) for name, parts in CATEGORIES.items()}


def by_category(kernels: Sequence[Kernel], config: Config, predicted_of: Mapping[str, float]) -> list[dict[str, Any]]:
    """Milliseconds and launches of a step by category beside the predicted ones, `predicted_ms`."""
    rows = []
    for name, predicted in predicted_of.items():
        of_kind = [kernel for kernel in kernels if categorize(kernel.name) == name]
        row = {"category": name, "ms": sum(k.ms for k in of_kind), "calls": sum(k.calls for k in of_kind)}
        if predicted or of_kind:  # a Llama has no products of experts
            rows.append(row | {"predicted_ms": predicted * num_microbatches(config)})
    return rows


def out_of_memory(error: Exception) -> bool:
    """Whether a contender's traceback tells of exhausted device memory: by torch, cuBLAS, cuDNN or Triton."""
    text = str(error)
    return any(words in text for words in ("OutOfMemoryError", "out of memory", "STATUS_ALLOC_FAILED"))


class Training(Session):
    """Measures, and keeps, prints and writes what is found."""

    def __init__(self, options: Options, circumstances: dict[str, Any]):
        super().__init__(options, circumstances)
        self.target = "cpu" if options.dry_run else "cuda"
        self.machine = machine_of(circumstances)
        self.names = options.workloads or tuple(WORKLOADS)
        self.runs: dict[WorkloadName, dict[str, Any]] = {}
        self.profile: dict[str, Any] | None = None

    def work(self) -> None:
        """All runs, as far as the time lasts: the most important ones first, those with minutes of compilation last."""
        for kind in CONTENDERS:
            if kind not in self.options.contenders:
                continue
            for name in self.names:
                if self.may_begin(f"{name}, {kind}"):
                    self.take(kind, name)
                self.keep()
            if kind == "megapar" and self.options.profile and self.may_begin(f"{self.names[0]}, profile"):
                self.take_profile(self.names[0])
                self.keep()

    def apart(self, body: Any, target: str = "") -> dict[str, Any]:
        """`body(device)` in a process of its own, with a status: ok, out of memory, or what went wrong."""
        left = (self.options.minutes + GRACE_MINUTES - self.minutes) * 60
        try:
            found = run_ranks(1, target or self.target, body, seconds=round(min(CONTENDER_SECONDS, left), 1))[0]
        except BenchmarkError as error:
            lines = str(error).strip().splitlines()
            if out_of_memory(error):
                return {"status": NO_MEMORY, "detail": lines[-1][:300]}
            print(error, file=sys.stderr, flush=True)
            return {"status": lines[-1][:150]}
        return {"status": "ok", **found}

    def run_of(self, name: WorkloadName, config: Config) -> dict[str, Any]:
        """The workload's part of the file, made when its first contender is about to run."""
        if name not in self.runs:
            # Each in a process of its own: their backward passes would start CUDA in this one, which forks contenders.
            planned = self.apart(partial(plan_memory, config), "cpu")
            predicted = self.apart(partial(plan_time, config, self.machine), "cpu")
            whole = WholeModel(config.model)
            self.runs[name] = {
                "workload": name,
                "model": WORKLOADS[name].preset,
                "parameters": whole.parameters(),
                "flops_per_token": whole.flops_per_token(config.train.seq_length),
                "micro_batches": num_microbatches(config),
                "tokens_per_step": config.train.global_batch_size * config.train.seq_length,
                "config": asdict(config),
                "predicted": {
                    "ms": predicted.get("ms"),
                    "step_ms": predicted.get("step_ms"),
                    "bytes": planned.get("bytes"),
                },
                "contenders": [],
            }
        return self.runs[name]

    def take(self, kind: ContenderName, name: WorkloadName) -> None:
        """Measure one contender of one workload, and say what was found."""
        config = make_config(self.options, name)
        contender = (OF_MIXTURES if isinstance(config.model, MixtureModel) else CONTENDERS)[kind]
        found = self.apart(partial(measure_steps, config, contender, self.options.steps))
        run = self.run_of(name, config)
        row = {"name": contender.name, "contender": kind} | found | self.figures(found, run)
        run["contenders"].append(row)
        print(f"{name}, {contender.name}: {row['status']}", flush=True)

    def figures(self, found: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
        """Measured figures. None in a dry run: it measures nothing."""
        if found["status"] != "ok" or self.options.dry_run:
            return dict.fromkeys(("seconds", "ms", "tokens_per_second", "mfu", "peak_bytes"))
        seconds = statistics.median(found["seconds"])
        rate = run["tokens_per_step"] / seconds
        peak = self.circumstances["peak_tflops"]
        return {
            "ms": seconds * 1e3 / run["micro_batches"],
            "tokens_per_second": rate,
            "mfu": rate * run["flops_per_token"] / peak / 1e12 if peak else None,
        }

    def take_profile(self, name: WorkloadName) -> None:
        """megapar's kernels in one step of `name`."""
        config = make_config(self.options, name)
        found = self.apart(partial(measure_kernels, config)) | {"workload": name}
        self.profile = found
        if found["status"] != "ok":
            print(f"{name}, profile: {found['status']}", flush=True)
            return
        kernels = [Kernel(*kernel) for kernel in found["kernels"]]
        found["categories"] = by_category(kernels, config, self.run_of(name, config)["predicted"]["ms"] or {})
        if self.options.dry_run:  # what was timed are torch's ops on a CPU
            found["step_ms"] = None
            found["kernels"] = [[kernel.name, kernel.calls, None] for kernel in kernels]
            found["categories"] = [row | {"ms": None} for row in found["categories"]]
        self.report.console.print(profile_table(found))

    def found(self) -> dict[str, Any]:
        more = {"dry_run": self.options.dry_run, "runs": list(self.runs.values()), "profile": self.profile}
        return super().found() | more


def problems(run: dict[str, Any]) -> list[str]:
    """What makes the numbers worthless: a failure of megapar, or another contender with other losses or norms.

    A lack of memory is a result.
    """
    ours = next((row for row in run["contenders"] if row["contender"] == "megapar"), None)
    if ours is None or ours["status"] == NO_MEMORY:
        return []
    if ours["status"] != "ok":
        return [f"{run['workload']}, megapar: {ours['status']}"]
    found = []
    for other in (row for row in run["contenders"] if row is not ours and row["status"] == "ok"):
        for what, tolerance in TOLERANCES.items():
            error = largest_error(ours["results"], other["results"], what)
            if not error <= tolerance:
                found.append(f"{run['workload']}, {other['name']}: {what} differs by {error:.1e}, above {tolerance}")
    return found


def planned_bytes(run: dict[str, Any]) -> int | None:
    """What megapar needs by its plan."""
    planned = run["predicted"]["bytes"]
    return sum(planned.values()) if planned else None


def over(measured: float | None, predicted: float | None) -> str:
    """A figure over its prediction, marked if they differ by more than OFF."""
    if measured is None or not predicted:
        return "-"
    ratio = measured / predicted
    return f"{ratio:.2f} <-- off" if abs(ratio - 1) > OFF else f"{ratio:.2f}"


def speed_table(options: Options, runs: Sequence[dict[str, Any]]) -> Table:
    """Contenders side by side, megapar beside its predictions."""
    rows = []
    for run in runs:
        ours = next((row["tokens_per_second"] for row in run["contenders"] if row["contender"] == "megapar"), None)
        for row in run["contenders"]:
            rate, peak = row["tokens_per_second"], row["peak_bytes"]
            shown = {"workload": f"{run['workload']} ({run['parameters'] / 1e6:,.1f}M)", "contender": row["name"]}
            shown |= {"status": row["status"], "tokens/s": rate, "MFU": row["mfu"], "peak GiB": peak and peak / 2**30}
            if row["contender"] == "megapar":
                step_ms = run["predicted"]["step_ms"]
                shown["time/predicted"] = over(row["ms"], step_ms and step_ms / run["micro_batches"])
                shown["peak/planned"] = over(peak, planned_bytes(run))
            shown["megapar is faster"] = ours / rate if rate and ours else None
            rows.append(shown | {"last loss": row["results"][-1][0] if "results" in row else None})
    title = f"Training on one GPU (aim: {TARGET_MFU:.0%} MFU); predicted are its time and planned memory"
    if options.dry_run:
        title = "DRY RUN on the CPU: no figures"
    return table(rows, title)


def profile_table(found: dict[str, Any]) -> Table:
    """Each category of kernels beside its prediction. `found` is what the JSON file holds."""
    rows = [row | {"over predicted": over(row["ms"], row["predicted_ms"])} for row in found["categories"]]
    total = sum(row["ms"] or 0.0 for row in rows)
    return table(rows, f"One step of {found['workload']}: {figure(found['step_ms'])} ms, kernels {total:.1f} ms")


def measure(options: Options) -> Found:
    """Measure all. A failure of megapar and contenders that differ are problems."""
    began = time.monotonic()
    for name in options.workloads or WORKLOADS:
        make_config(options, name)
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run trains a tiny model on the CPU, without figures")
    circumstances = run_ranks(1, "cpu" if options.dry_run else "cuda", facts_of, seconds=CONTENDER_SECONDS)[0]
    session = Training(options, circumstances)
    session.began = began
    session.keep()
    session.work()
    runs = list(session.runs.values())
    return session.end(speed_table(options, runs), problems=[problem for run in runs for problem in problems(run)])
