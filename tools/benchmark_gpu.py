"""Trains a 1B and a 3B Llama in bf16 on one GPU: megapar beside the same model in plain PyTorch, eager and compiled.

All start from the same weights and see the same batches. The peer does what megapar does in torch's own ops: bf16
weights and activations, gradients of every micro-batch added to fp32 buffers, clipped by their global norm, fused AdamW
on fp32 main weights with fp32 moments, rounded into the bf16 weights: 18 bytes a parameter in both. Its cross entropy
is taken of fp32 logits, attention is SDPA as it comes, and torch.compile compiles model and loss as one graph.

MFU is tokens/s * FLOPs of a token / the GPU's dense bf16 peak (megapar.device.PEAK_TFLOPS). FLOPs of a token are
6 * (weights of matrices, the head's included) + 6 * s * heads * head_dim * layers: forward and backward, causal
attention counted half, no recomputation (megapar_models.build.flops_per_token). Each contender runs alone, in a fresh
process; the first steps, which compile, are not counted. Losses and norms that differ end the run with exit code 70.

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
from typing import Any

import benchmark
import torch
import torch.nn.functional as F
import tyro
from benchmark_peers import Llama, Peer, Result, Weights, clip, make_optimizer
from megapar_models.build import flops_per_token, logical_tensors, parameter_count
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from megapar import device
from megapar.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.errors import ConfigError, MegaparError, reported
from megapar.train.report import in_a_line, provenance, write_json
from megapar.validate import validate

PRESETS = Path(__file__).parents[1] / "pretrain_scripts/configs/models"
WARMUP = 2
TOLERANCES = {"loss": 1e-2, "grad_norm": 5e-2}  # relative: bf16 activations, rounded at other places
TARGET_MFU = 0.45


@dataclass(frozen=True)
class Options:
    """Measure training on one GPU."""

    models: tuple[str, ...] = ("llama3.2-1b", "llama3.2-3b")
    """Presets of pretrain_scripts/configs/models."""
    micro_batch_size: tuple[int, ...] = (2, 1)
    """Samples of a forward pass, one number a model: what the peers' fp32 logits leave room for in 80 GB."""
    global_batch_size: tuple[int, ...] = (16, 8)
    """Samples of a step, one number a model."""
    seq_length: int = 4096
    """Tokens of a sample."""
    steps: int = 5
    """Timed steps, after two that warm up."""
    json: Path | None = None
    """Write all numbers to this file."""
    dry_run: bool = False
    """A tiny model on the CPU, without figures."""


class MixedPrecision(Peer):
    """Plain PyTorch in bf16 with fp32 main weights, gradients and moments."""

    name = "PyTorch"
    backend: str | None = None

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, device)
        with device:
            self.model = Llama(config.model, config.train.seq_length, range(config.model.num_hidden_layers)).bfloat16()
        assert self.model.head is not None
        assert self.model.embedding is not None
        if config.model.tie_word_embeddings:
            self.model.head.weight = self.model.embedding.weight
        self.model.load_state_dict(weights)
        self.model.cos, self.model.sin = (
            self.model.cos.bfloat16(),
            self.model.sin.bfloat16(),
        )  # as Hugging Face has them
        self.params = list(self.model.parameters())
        self.mains = [p.detach().float() for p in self.params]
        for param, main in zip(self.params, self.mains, strict=True):
            main.grad = torch.zeros_like(main)
            param.register_post_accumulate_grad_hook(partial(self._collect, main.grad))
        self.optimizer = make_optimizer(self.mains, config.optimizer)
        self.loss = torch.compile(self._loss, backend=self.backend, dynamic=False) if self.backend else self._loss

    @staticmethod
    def _collect(total: Tensor, param: Tensor) -> None:
        assert param.grad is not None
        total.add_(param.grad)
        param.grad = None

    def _loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        logits = self.model(tokens_bs).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_bs.flatten(), reduction="sum")

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros((), device=self.device)
        for tokens, targets in self.micro_batches(tokens_bs, targets_bs):
            loss = self.loss(tokens, targets)
            (loss / targets_bs.numel()).backward()
            total += loss.detach()
        norm = clip([], self.mains, self.config.optimizer.clip_grad, None)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.mains)
        return Result(total.item() / targets_bs.numel(), norm)


class Compiled(MixedPrecision):
    name = "PyTorch, compiled"
    backend = "inductor"


class CompiledDry(Compiled):
    """Traced and differentiated as a graph, without code generation, which takes a CPU a minute."""

    backend = "aot_eager"


def make_config(options: Options, number: int) -> Config:
    """The model without stretched wavelengths, which cost nothing and which the peer lacks.

    Raises ConfigError for a preset that is not there or numbers that do not fit.
    """
    name = options.models[number]
    if not len(options.models) == len(options.micro_batch_size) == len(options.global_batch_size):
        raise ConfigError("--models, --micro_batch_size and --global_batch_size must be equally many")
    file = PRESETS / f"{name}.toml"
    if not file.is_file():
        known = " ".join(sorted(path.stem for path in PRESETS.glob("llama*.toml")))
        raise ConfigError(f"--models {name}: no such preset; there are {known}")
    fields = {key: value for key, value in tomllib.loads(file.read_text())["model"].items() if key != "rope_scaling"}
    model = ModelConfig(**fields)
    if options.dry_run:
        model = replace(model, hidden_size=128, num_hidden_layers=2, intermediate_size=256, vocab_size=512)
        model = replace(model, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    train = TrainConfig(
        global_batch_size=options.global_batch_size[number],
        micro_batch_size=options.micro_batch_size[number],
        seq_length=32 if options.dry_run else options.seq_length,
        precision="bf16",
    )
    optimizer = OptimizerConfig(lr=1e-4, schedule="constant")
    return validate(Config(model=model, parallel=ParallelConfig(dp=1), train=train, optimizer=optimizer), 1)


def make_weights(config: Config, where: torch.device) -> dict[str, Tensor]:
    """Logical tensors in bf16: matrices N(0, 0.02), norms near 1; a tied head beside its embedding."""
    generator = torch.Generator(where).manual_seed(1)
    weights = {
        name: (torch.randn(piece.shape, generator=generator, device=where) * 0.02 + (len(piece.shape) == 1)).bfloat16()
        for name, piece in logical_tensors(config.model).items()
    }
    return {"head.weight": weights["embedding.weight"]} | weights


def measure(options: Options, number: int, kind: type[Peer], where: torch.device) -> dict[str, Any]:
    """One contender's steps; seconds and memory are None in a dry run."""
    config = make_config(options, number)
    try:
        contender = kind(config, make_weights(config, where), where)
        if not options.dry_run:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
        seconds, results = [], []
        for tokens_bs, targets_bs in benchmark.make_batches(config, WARMUP + options.steps):
            tokens, targets = tokens_bs.to(where), targets_bs.to(where)
            device.synchronize(where)
            start = time.perf_counter()
            results.append(contender.step(tokens, targets))
            device.synchronize(where)
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    figures = {"seconds": seconds[WARMUP:], "peak_bytes": device.peak_memory_bytes(where)}
    return {
        "status": "ok",
        "results": results,
        "peak_tflops": device.peak_tflops(where),
        **(dict.fromkeys(figures) if options.dry_run else figures),
    }


def run_model(options: Options, number: int) -> dict[str, Any]:
    """All contenders of one model, each in a process of its own."""
    config = make_config(options, number)
    tokens = config.train.global_batch_size * config.train.seq_length
    flops = flops_per_token(config.model, config.train.seq_length)
    contenders = []
    for kind in (benchmark.Megapar, MixedPrecision, CompiledDry if options.dry_run else Compiled):
        try:
            body = partial(measure, options, number, kind)
            found = benchmark.run_ranks(1, "cpu" if options.dry_run else "cuda", body)[0]
        except benchmark.BenchmarkError as error:  # the others are still worth measuring; ours is raised at the end
            print(error, file=sys.stderr)
            found = {"status": str(error).strip().splitlines()[-1][:150]}
        rate = tokens / statistics.median(found["seconds"]) if found.get("seconds") else None
        peak = found.get("peak_tflops") or None
        mfu = rate * flops / peak / 1e12 if rate and peak else None
        contenders.append({"name": kind.name, **found, "tokens_per_second": rate, "mfu": mfu})
    return {
        "model": options.models[number],
        "parameters": parameter_count(config.model),
        "flops_per_token": flops,
        "tokens_per_step": tokens,
        "micro_batch_size": config.train.micro_batch_size,
        "contenders": contenders,
    }


def problems(run: dict[str, Any]) -> list[str]:
    """What makes the numbers worthless: megapar that did not train, or others that computed something else."""
    ours, *others = run["contenders"]
    if ours["status"] != "ok":
        return [f"{run['model']}, megapar: {ours['status']}"]
    found = []
    for other in (other for other in others if other["status"] == "ok"):
        for place, (what, tolerance) in enumerate(TOLERANCES.items()):
            pairs = zip(ours["results"], other["results"], strict=True)
            error = max(abs(x[place] - y[place]) / abs(y[place]) for x, y in pairs)
            if not error <= tolerance:
                found.append(f"{run['model']}, {other['name']}: {what} differs by {error:.1e}, above {tolerance}")
    return found


def report(options: Options, runs: Sequence[dict[str, Any]]) -> Table:
    title = "DRY RUN on the CPU: no figures" if options.dry_run else f"Training on one GPU (aim: {TARGET_MFU:.0%} MFU)"
    table = Table(title=title)
    for column in ("model", "contender", "status"):
        table.add_column(column)
    for column in ("tokens/s", "MFU", "peak GB", "megapar is faster", "last loss"):
        table.add_column(column, justify="right")
    for run in runs:
        ours = run["contenders"][0]["tokens_per_second"]
        for contender in run["contenders"]:
            rate, mfu, peak = (contender.get(key) for key in ("tokens_per_second", "mfu", "peak_bytes"))
            table.add_row(
                f"{run['model']} ({run['parameters'] / 1e6:,.1f}M)",
                contender["name"],
                contender["status"],
                f"{rate:,.0f}" if rate else "-",
                f"{mfu:.1%}" if mfu else "-",
                f"{peak / 1e9:.1f}" if peak else "-",
                f"{ours / rate:.2f}x" if rate and ours else "-",
                f"{contender['results'][-1][0]:.4f}" if "results" in contender else "-",
                end_section=contender is run["contenders"][-1],
            )
    return table


class TrainingError(MegaparError):
    """megapar failed, or contenders did not compute the same."""


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file; raises TrainingError if the numbers are worthless."""
    for number in range(len(options.models)):
        make_config(options, number)
    if not options.dry_run and not device.cuda_devices():
        raise ConfigError("there is no GPU here; --dry_run trains a tiny model on the CPU, without figures")
    runs = []
    with Progress(auto_refresh=False, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=len(options.models))
        for number, name in enumerate(options.models):
            progress.update(task, description=name, refresh=True)
            runs.append(run_model(options, number))
            progress.update(task, advance=1, refresh=True)
    console = Console(width=130)  # narrower, numbers would be cut
    console.print(report(options, runs))
    facts = provenance(device.choose("cpu" if options.dry_run else "cuda", 0, 1))
    console.print(in_a_line(facts))
    if options.json:
        facts |= {"dry_run": options.dry_run, "options": {k: str(v) for k, v in asdict(options).items()}, "runs": runs}
        write_json(options.json, facts)
    if found := [problem for run in runs for problem in problems(run)]:
        raise TrainingError("; ".join(found))


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
