"""The descent of training in FP8 (train.fp8 blocks) beside bf16, for several seeds, with faults that must be seen.

A Llama and a mixture of 2 layers, wider than those of the quickstart so that 128 x 128 divides their matrices, learn
the quickstart's text (`pretrain_scripts/quickstart_data.sh` makes it). Each run is one process on one core.
Compared is the mean loss of a range of steps while the loss falls, with bf16 of the same seed: the end of a small model
is the floor of its language, where any recipe ties.

blocks          train.fp8 blocks: weight gradients of numbers restored from codes
from_codes      weight gradients of codes grouped again along positions, as FP8 products of a GPU take them; of the
                Llama alone, because those of experts are always in bf16
stale_weights   a fault: codes and scales of the first step's weights serve 20 steps
wrong_exponent  a fault: each exponent of a gradient is that of the group beside it

The benchmark fails if FP8 is further from bf16 than `within`, or a fault is not. Runs are kept in `runs`, and a run
that has ended there is read, not repeated.
"""

import json
import runpy
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megapar_kernels import quantize
from megapar_kernels.quantize import BIAS, GROUP, Quantized
from megapar_models import build
from megapar_models.registry import FOR_OPTIONS, validate
from torch import Tensor

from benchmarks.harness import Found, Output, table
from benchmarks.programs import PRETRAIN, pretrain
from megapar.config.files import load
from megapar.linear.fp8_products import Fp8Products

BF16, FP8, FROM_CODES = "bf16", "blocks", "from_codes"
STALE_STEPS = 20
_SIZES = (
    *("--model.hidden_size", "256", "--model.num_attention_heads", "4", "--model.num_key_value_heads", "2"),
    *("--model.num_hidden_layers", "2"),
)
MODELS: Mapping[str, tuple[str, ...]] = {
    "llama": ("--config", "quickstart.toml", *_SIZES, "--model.intermediate_size", "768"),
    "mixture": ("--config", "moe_laptop.toml", *_SIZES, "--model.moe.moe_intermediate_size", "384"),
}
"""Flags of the models by name, with a file in pretrain_scripts/configs."""
_SHAPE = (
    *("--launch.nproc", "1", "--launch.device", "cpu", "--launch.threads", "1", "--log.profile", "none"),
    *("--parallel.dp", "1", "--parallel.tp", "1", "--parallel.pp", "1", "--parallel.cp", "1", "--parallel.ep", "1"),
    *("--parallel.no_sequence_parallel", "--checkpoint.no_save_last", "--train.precision", "bf16"),
    *("--train.global_batch_size", "8", "--train.micro_batch_size", "8", "--train.recompute", "none"),
    *("--train.eval_samples", "64", "--log.every", "10"),
    # With the 6e-3 of the quickstart, and so few tokens a step, runs part that differ by a rounding.
    *("--optimizer.lr", "1.5e-3", "--optimizer.min_lr", "1.5e-4"),
)


class FromCodes(Fp8Products):
    """FP8 whose weight gradients are products of codes in groups along positions, but for experts."""

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        by_position = [_restored(quantize.transposed_rows(rows)).transpose(0, 1).flatten(1) for rows in (grad_y, x)]
        return by_position[0] @ by_position[1].t()

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        gradient = self.weight_gradient(grad_y, x)
        if overwrite:
            total.copy_(gradient)
        else:
            total.add_(gradient)


def _restored(rows: Quantized) -> Tensor:
    """The numbers of codes in groups of 1 x 128, in fp32."""
    scales = quantize.power_of_two(rows.exponents.int() - BIAS)
    return (rows.codes.float().unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)


@dataclass(frozen=True)
class StaleWeights(Fp8Products):
    """A planted fault: a cache that keeps the codes of the first step's weights for `STALE_STEPS` steps."""

    first: dict[tuple[int, torch.Size], tuple[Quantized, int]] = field(default_factory=dict, compare=False)
    """By place and shape of a weight: its first codes, and the steps that they have served."""

    def convert_weight(self, weight: Tensor) -> Quantized:
        # Called once a step: the layer keeps the result until the values change.
        place = weight.data_ptr(), weight.shape
        codes, steps = self.first.get(place) or (super().convert_weight(weight), 0)
        self.first[place] = codes, steps + 1
        return codes if steps < STALE_STEPS else super().convert_weight(weight)


class WrongExponent(Fp8Products):
    """A planted fault: the exponents of gradients are shifted by one group along features."""

    def convert_gradient(self, grad_y: Tensor) -> Tensor:
        packed = super().convert_gradient(grad_y)
        exponents = quantize.view_packed(packed).exponents
        exponents.copy_(exponents.roll(1, -1))
        return packed


FAULTS: Mapping[str, type[Fp8Products]] = {"stale_weights": StaleWeights, "wrong_exponent": WrongExponent}
PRODUCTS: Mapping[str, type[Fp8Products]] = {FP8: Fp8Products, FROM_CODES: FromCodes, **FAULTS}
"""What multiplies, by case."""


@dataclass(frozen=True)
class Options(Output):
    """Compare the descents of FP8 and bf16."""

    models: tuple[str, ...] = tuple(MODELS)
    """Names in MODELS."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """train.seed of the runs. Faults have the first alone."""
    steps: int = 80
    """Steps of a run."""
    first: int = 11
    """The first step whose loss counts."""
    within: float = 1.0
    """Percent by which the mean loss of FP8 may differ from that of bf16, over all seeds."""
    side_by_side: int = 2
    """Runs at once."""
    flags: tuple[str, ...] = ()
    """Further options of all runs as NAME=VALUE. Give each set a folder of its own."""
    runs: Path = Path("runs/fp8_descent")
    """Folder of the runs."""
    picture: Path | None = None
    """Draw the losses into this file."""


def flags_of(options: Options, model: str, case: str, seed: int) -> list[str]:
    """The flags of a run."""
    key, file, *sizes = MODELS[model]
    words = [key, str(PRETRAIN.parent / "configs" / file), *sizes, *_SHAPE]
    words += ["--train.fp8", "none" if case == BF16 else "blocks"]
    words += ["--train.seed", str(seed), "--train.steps", str(options.steps)]
    return words + [word for flag in options.flags for word in ("--" + flag).split("=", 1)]


def run_with(case: str, *flags: str) -> None:
    """Train in this process with the products of `case`."""
    # In this process, which is for the one run.
    build.fp8_products = lambda device, *given: PRODUCTS[case](*given)
    sys.argv = [str(PRETRAIN), *flags]
    runpy.run_path(str(PRETRAIN), run_name="__main__")


def trained(options: Options, model: str, case: str, seed: int) -> dict[str, Any]:
    """The losses of a run by step, and the held-out one at its end. Raises BenchmarkError if the run fails."""
    folder = options.runs.absolute() / f"{model}-{case}-{options.steps}-{seed}"
    ended = folder / "losses.json"
    if not ended.exists():
        code = f"import sys; from benchmarks.fp8_descent import run_with; run_with({case!r}, *sys.argv[1:])"
        flags = flags_of(options, model, case, seed)
        lines = pretrain(folder, flags, "" if case == BF16 else code)
        losses = [line["loss"] for line in lines if "loss" in line]
        held_out = next(line["validation_loss"] for line in lines if "validation_loss" in line)
        ended.write_text(json.dumps({"seed": seed, "losses": losses, "held_out": held_out}))
    found: dict[str, Any] = json.loads(ended.read_text())
    return found


def all_runs(options: Options) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs of each model by case, in the order of seeds."""
    wanted = [
        (model, case, seed)
        for model in options.models
        for case in (BF16, *PRODUCTS)
        if (model, case) != ("mixture", FROM_CODES)
        for seed in options.seeds[: 1 if case in FAULTS else None]
    ]
    with ThreadPoolExecutor(options.side_by_side) as pool:  # of threads: each waits for a process
        found = list(pool.map(lambda words: trained(options, *words), wanted))
    by_model: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (model, case, _), run in zip(wanted, found, strict=True):
        by_model.setdefault(model, {}).setdefault(case, []).append(run)
    return by_model


def rows_of(options: Options, model: str, cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: mean losses by seed, in percent of bf16 of the same seed, and the largest of one step.

    Losses of bf16 are beside the mean of its seeds.
    """

    def descent(run: Mapping[str, Any]) -> float:
        return statistics.fmean(run["losses"][options.first - 1 :])

    mean = statistics.fmean(map(descent, cases[BF16]))
    rows = []
    for case, runs in cases.items():
        beside = zip(runs, cases[BF16], strict=False)  # faults have the first seed alone
        pairs = [(run["losses"], base["losses"]) for run, base in beside]
        steps = [(x / y - 1) * 100 for run, base in pairs for x, y in zip(run, base, strict=True)]
        percent = [
            (descent(run) / (mean if case == BF16 else descent(base)) - 1) * 100
            for run, base in zip(runs, cases[BF16], strict=False)
        ]
        row = {"model": model, "case": case, "fault": case in FAULTS, "mean_loss": statistics.fmean(map(descent, runs))}
        row |= {"percent_from_bf16": None if case == BF16 else statistics.fmean(percent), "percent_by_seed": percent}
        rows.append(row | {"largest_step_percent": max(steps, key=abs), "held_out": [run["held_out"] for run in runs]})
    return rows


def problems(options: Options, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """FP8 that is too far from bf16, and faults that are not."""
    found = []
    for row in rows:
        if row["case"] == BF16:
            continue
        name, percent = f"{row['model']}, {row['case']}", row["percent_from_bf16"]
        inside = abs(percent) <= options.within  # not so for NaN
        if row["fault"] and inside:
            found.append(f"{name}: {percent:+.2f} % from bf16, within {options.within} %: the fault is not seen")
        elif not row["fault"] and not inside:
            found.append(f"{name}: {percent:+.2f} % from bf16, more than {options.within} %")
    return found


def draw(options: Options, found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """For each model: left, the losses of all runs. Right, means of nine steps of their distances from bf16."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot is imported: it needs no display
    from matplotlib import pyplot as plt

    colors = {case: f"C{number}" for number, case in enumerate((BF16, *PRODUCTS))}
    figure, grid = plt.subplots(len(found), 2, figsize=(11, 3.6 * len(found)), layout="constrained", squeeze=False)
    for (left, right), (model, cases) in zip(grid, found.items(), strict=True):
        right.axhspan(-options.within, options.within, color="0.9", label=f"within {options.within:g} % of bf16")
        for case, runs in cases.items():
            for index, run in enumerate(runs):
                losses, base = run["losses"], cases[BF16][index]["losses"]
                look: dict[str, Any] = {"color": colors[case], "linewidth": 0.9, "alpha": 0.8}
                look |= {"linestyle": "--" if case in FAULTS else "-", "label": case if index == 0 else None}
                left.plot(range(1, len(losses) + 1), losses, **look)
                percent = [(x / y - 1) * 100 for x, y in zip(losses, base, strict=True)]
                if case != BF16:
                    smooth = [statistics.fmean(percent[max(0, i - 4) : i + 5]) for i in range(len(percent))]
                    right.plot(range(1, len(losses) + 1), smooth, **look)
        left.set(xlabel="step", ylabel="nats per token", title=f"{model}: training loss of each seed")
        right.set(xlabel="step", ylabel="%", title=f"{model}: distance from bf16 of the same seed")
        right.set_yscale("symlog", linthresh=2 * options.within)
        for axes in (left, right):
            axes.axvline(options.first, color="gray", linewidth=0.6)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def in_words(options: Options, model: str) -> str:
    """Which matrices of a model are in FP8."""
    config = validate(load(flags_of(options, model, FP8, options.seeds[0]), {}, FOR_OPTIONS).config, 1)
    return build.fp8_matrices(config).in_words()


def measure(options: Options) -> Found:
    """Train what is missing, judge, and draw the picture."""
    matrices = {model: in_words(options, model) for model in options.models}
    found = all_runs(options)
    rows = [row for model, cases in found.items() for row in rows_of(options, model, cases)]
    if options.picture:
        draw(options, found, options.picture)
    lines = [f"{model}: {words}" for model, words in matrices.items()]
    numbers = {"matrices": matrices, "rows": rows, "runs": found}
    return Found(numbers, [*lines, table(rows)], problems(options, rows))
