"""Rates of FP8 products on one GPU beside bf16, and times of the kernels that quantize, in less than three minutes.

Of a GPU with products of 1 x 128 (Hopper), for the matrices of Llama 3 8B, 3.2 3B and 1B and Qwen3 30B-A3B, and for
few inputs:

y           x in groups of 1 x 128 by W in blocks of 128 x 128 (torch.nn.functional.scaled_mm), into bf16
dx          dy in groups of 1 x 128 by the transposed W, into bf16
dW          dy and x in groups of 128 positions, into fp32
..., whole  of 8B, the products of layers: scales and transposes are made in the time that counts
dW, added   dW by our kernel, which writes the main gradient
tensorwise  y with one scale of a tensor and fast sums: the most that the GPU gives

Each product is first compared with restored numbers multiplied in fp32, and a wrong one is not timed. Then all products
of a shape and those of bf16 take turns, a second each in all: a GPU in training is bound by its power, not by the rate
of a short burst. Kernels that quantize are compared with torch's ops bit by bit, and timed one by one.

The last line says whether weight gradients in FP8 may be turned on, from the matrices of Llama 3 8B together: y and dx
need 1,050 TFLOP/s on an H200 and dW 1,000. Results are in the JSON file after every shape.

--dry_run computes shapes, strides and dtypes on the meta device, without figures.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megapar_kernels import quantize, scaled_products, scaled_tiles
from megapar_kernels.dispatch import Implementation
from megapar_kernels.quantize import Quantized
from torch import Tensor
from torch.nn.functional import ScalingType

from benchmarks import gpu
from benchmarks.gpu import WorkloadName
from benchmarks.harness import Case, Found, Output, Session, table
from benchmarks.kernels.measuring import brief, errors, prepare
from benchmarks.kernels.timing import Stopwatch
from megapar.config.model_options import MixtureModel

GATE = {"y": 1050.0, "dx": 1050.0, "dW": 1000.0}
"""TFLOP/s from which FP8 pays in each product, on an H200."""
GATE_OF: WorkloadName = "8b-16-layers"
"""The workload whose matrices decide, measured first."""
ADDED = "dW, added"
PARTNERS = {"y": "bf16 y", "dx": "bf16 y", "dW": "bf16 dW", ADDED: "bf16 dW", "tensorwise": "bf16 y"}
"""Products in FP8, each with the bf16 product that stands beside it."""
WHOLE = ", whole"
"""Added to the name of a product: with its scales and transposes."""
LARGEST_CODE = 448.0
ROUNDS = 5


@dataclass(frozen=True)
class Options(Output):
    """Measure FP8 products and what quantizes."""

    seconds: float = 1.0
    """Seconds of each product and shape, in five turns."""
    minutes: float = 2.5
    """No shape is begun after this time; what was not run is named."""
    json: Path = Path("runs/benchmark_fp8.json")
    """Results go here, after every shape."""
    dry_run: bool = False
    """Shapes on the meta device, without figures."""


class Shape(NamedTuple):
    """A matrix [outputs, inputs] and the tokens that it multiplies."""

    of: str
    matrix: str
    outputs: int
    inputs: int
    tokens: int


def shapes_of(name: WorkloadName) -> Iterator[Shape]:
    """The matrices of a layer of a workload as layers multiply them: q, k and v are one, gate and up another.

    An expert has its share of the tokens.
    """
    config = gpu.make_config(gpu.Options(), name)
    model = config.model
    tokens = config.train.seq_length * config.train.micro_batch_size
    heads, kv_heads = (number * model.head_dim for number in (model.num_attention_heads, model.num_key_value_heads))
    yield Shape(name, "q, k, v", heads + 2 * kv_heads, model.hidden_size, tokens)
    yield Shape(name, "output", model.hidden_size, heads, tokens)
    width, part = model.intermediate_size, "mlp"
    if isinstance(model, MixtureModel):
        width, part = model.moe.moe_intermediate_size, "expert"
        tokens = tokens * model.moe.num_experts_per_tok // model.moe.num_experts
    yield Shape(name, f"{part}, gate, up", 2 * width, model.hidden_size, tokens)
    yield Shape(name, f"{part}, down", model.hidden_size, width, tokens)


def all_shapes() -> list[Shape]:
    """All shapes, those that decide first."""
    names: tuple[WorkloadName, ...] = (GATE_OF, "qwen3-4-layers", "3b", "1b")
    found = [shape for name in names for shape in shapes_of(name)]
    few = [Shape("few inputs", str(inputs), 4096, inputs, 8192) for inputs in (768, 1408)]
    return [*found[:8], *few, *found[8:]]


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Callable[[], Tensor]:
    """What multiplies a [m, k] by the transpose of b [n, k]. The scales are brought into their places before."""
    recipes = [ScalingType.BlockWise1x128 if x.group[0] == 1 else ScalingType.BlockWise128x128 for x in (a, b)]
    scales = [quantize.expanded_scales(x.exponents, x.group) for x in (a, b)]
    codes, transposed = a.codes, b.codes.t()
    return lambda: F.scaled_mm(codes, transposed, scales[0], recipes[0], scales[1], recipes[1], output_dtype=dtype)


def restored(numbers: Quantized) -> Tensor:
    """The numbers in fp32."""
    restore = quantize.restore_groups if numbers.group[0] == 1 else quantize.restore_blocks
    return restore(numbers, torch.float32)


def emulated(a: Quantized, b: Quantized) -> Tensor:
    """The product of the restored numbers in fp32."""
    return restored(a) @ restored(b).t()


class Work(NamedTuple):
    """A product, what it shall be in fp32 if it is to be compared, and the relative norm of a difference allowed."""

    run: Callable[[], Tensor]
    expected: Callable[[], Tensor] | None = None
    limit: float = 1e-2


class Operands:
    """Random x, dy and W of a shape, in bf16 and in FP8, and the products of them."""

    def __init__(self, shape: Shape, target: torch.device):
        self.x, self.dy, self.weight = (
            torch.randn(size, device=target, dtype=torch.bfloat16)
            for size in ((shape.tokens, shape.inputs), (shape.tokens, shape.outputs), (shape.outputs, shape.inputs))
        )
        self.weight *= 0.02
        self.total = torch.zeros_like(self.weight, dtype=torch.float32)
        self.x_packed, self.dy_packed = (quantize.quantize_rows(x) for x in (self.x, self.dy))
        self.weight_codes = quantize.quantize_blocks(self.weight)

    def works(self) -> dict[str, Work]:
        """The products by name. Codes of rows are views of the packed rows."""
        x, dy = (quantize.view_packed(packed) for packed in (self.x_packed, self.dy_packed))
        weight, bf16 = self.weight_codes, torch.bfloat16
        back = Quantized(weight.codes.t().contiguous(), weight.exponents.t(), weight.group)
        of_x, of_dy = (
            scaled_products.over_positions(quantize.transposed_rows(packed[:, None]))
            for packed in (self.x_packed, self.dy_packed)
        )
        return {
            "y": Work(product(x, weight, bf16), partial(emulated, x, weight)),
            "dx": Work(product(dy, back, bf16), partial(emulated, dy, back)),
            "dW": Work(product(of_dy, of_x, torch.float32), partial(emulated, of_dy, of_x)),
            ADDED: Work(partial(self.add_weight_gradient, of_dy, of_x), partial(emulated, of_dy, of_x)),
            "tensorwise": self.tensorwise(),
            "bf16 y": Work(partial(torch.mm, self.x, self.weight.t())),
            "bf16 dW": Work(partial(torch.mm, self.dy.t(), self.x, out_dtype=torch.float32)),
        }

    def add_weight_gradient(self, of_dy: Quantized, of_x: Quantized) -> Tensor:
        """dW by our kernel, in place of what was in the main gradient."""
        scaled_tiles.add_weight_gradient(self.total, of_dy, of_x, overwrite=True)
        return self.total

    def tensorwise(self) -> Work:
        """y with one scale of a tensor, a power of two so that the numbers are restored exactly."""
        scales = [2 ** (x.abs().amax().float() / LARGEST_CODE).log2().ceil() for x in (self.x, self.weight)]
        x, weight = ((x / s).to(torch.float8_e4m3fn) for x, s in zip((self.x, self.weight), scales, strict=True))
        one = ScalingType.TensorWise
        run = partial(F.scaled_mm, x, weight.t(), scales[0], one, scales[1], one, use_fast_accum=True)
        # Fast sums keep fewer bits over many inputs.
        return Work(run, lambda: (x.float() * scales[0]) @ (weight.float() * scales[1]).t(), limit=5e-2)

    def whole_works(self, works: Mapping[str, Work], impl: Implementation) -> dict[str, Work]:
        """The products of layers, from packed rows: scales and transposes are made in the time that counts.

        They are compared as those of `works` are.
        """
        x_sb, dy_sb = self.x_packed[:, None], self.dy_packed[:, None]
        how: dict[str, Any] = {"impl": impl, "route": "blocks"}
        runs: dict[str, Callable[[], Tensor]] = {
            "y": partial(scaled_products.forward, self.x_packed, self.weight_codes, None, torch.bfloat16, **how),
            "dx": partial(scaled_products.input_gradient, self.dy_packed, self.weight_codes, torch.bfloat16, **how),
            "dW": partial(scaled_products.weight_gradient, dy_sb, x_sb, **how),
        }
        return {name + WHOLE: works[name]._replace(run=run) for name, run in runs.items()}


def problem_of(work: Work) -> str:
    """What is wrong with a product, if it is compared and differs. Shapes alone on the meta device."""
    if work.expected is None:
        return ""
    found, expected = work.run(), work.expected()
    if found.shape != expected.shape:
        return f"has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if found.is_meta:
        return ""
    (error,) = errors([found], [expected])
    return "" if error <= work.limit else f"differs from restored numbers by {error:.1e}, above {work.limit:.0e}"


def repeated(work: Work, times: int) -> None:
    """Queue a product so many times."""
    for _ in range(times):
        work.run()


def rates(works: Mapping[str, Work], shape: Shape, seconds: float, target: torch.device) -> dict[str, list[float]]:
    """TFLOP/s of each product in each of the turns."""
    flops = 2 * shape.outputs * shape.inputs * shape.tokens
    times, turns = {}, {}
    for name, work in works.items():
        trial = Case({name: partial(repeated, work, 10)}, rounds=1, device=target).measure()[name].wall[0] / 10
        times[name] = max(1, round(seconds / ROUNDS / trial))
        turns[name] = partial(repeated, work, times[name])
    found = Case(turns, ROUNDS, warmup=0, device=target).measure()
    return {name: [flops * times[name] / wall / 1e12 for wall in turn.wall] for name, turn in found.items()}


def kernels_of(operands: Operands) -> dict[str, Callable[[Implementation], Any]]:
    """What quantizes and moves codes, of the operands of a shape."""
    x, packed, weight = operands.x, operands.x_packed, operands.weight_codes
    rows = quantize.view_packed(packed)
    return {
        "quantize rows": lambda impl: quantize.quantize_rows(x, impl),
        "restore rows": lambda impl: quantize.restore_rows(packed, torch.bfloat16, impl),
        "group rows along positions": lambda impl: quantize.transposed_rows(packed[:, None], impl),
        "expand scales of rows": lambda impl: quantize.expanded_scales(rows.exponents, rows.group, impl),
        "quantize blocks": lambda impl: quantize.quantize_blocks(operands.weight, impl),
        "restore blocks": lambda impl: quantize.restore_blocks(weight, torch.bfloat16, impl),
        "transpose blocks": lambda impl: quantize.transposed_blocks(weight, impl),
        "expand scales of blocks": lambda impl: quantize.expanded_scales(weight.exponents, weight.group, impl),
    }


def parts_of(found: Any) -> list[Tensor]:
    """The tensors that a kernel returned, as bytes."""
    tensors = [found.codes, found.exponents] if isinstance(found, Quantized) else [found]
    return [x.contiguous().view(torch.uint8) for x in tensors]


def problem_of_kernel(kernel: Callable[[Implementation], Any], ours: Implementation) -> str:
    """What is wrong with a kernel. Shapes alone on the meta device."""
    pairs = list(zip(parts_of(kernel(ours)), parts_of(kernel("torch")), strict=True))
    if all(x.shape == y.shape if x.is_meta else torch.equal(x, y) for x, y in pairs):
        return ""
    return "bits differ from those of torch's ops"


def kernel_again(kernel: Callable[[Implementation], Any], ours: Implementation, _: int) -> Any:
    """Run a kernel, whichever the repetition is."""
    return kernel(ours)


@dataclass
class Probe(Session):
    """The shapes measured so far, and the kernels."""

    target: torch.device = torch.device("meta")  # noqa: RUF009 (immutable)
    rows: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def impl(self) -> Implementation:
        """What quantizes in the time that counts."""
        return "torch" if self.options.dry_run else "triton"

    def work(self, bench: Stopwatch) -> None:
        """All shapes as far as the time lasts, and kernels at two of those that decide."""
        kernels = [shape for shape in shapes_of(GATE_OF) if shape.matrix in ("mlp, gate, up", "mlp, down")]
        for shape in all_shapes():
            if self.may_begin(f"{shape.of}, {shape.matrix}"):
                operands = Operands(shape, self.target)
                self.take(shape, operands)
                if shape in kernels:
                    self.take_kernels(shape, operands, bench)
                del operands
                bench.release()
            self.keep()

    def take(self, shape: Shape, operands: Operands) -> None:
        """Compare all products of a shape, and time those that are right."""
        works = operands.works()
        if shape.of == GATE_OF:
            works |= operands.whole_works(works, self.impl)
        status = {
            name: self.status(f"{shape.of}, {shape.matrix}, {name}", partial(problem_of, work))
            for name, work in works.items()
        }
        good = {name: work for name, work in works.items() if status[name] == "ok"}
        found = {} if self.options.dry_run else rates(good, shape, self.options.seconds, self.target)
        for name in works:
            if name.startswith("bf16"):
                continue
            ours, beside = found.get(name), found.get(PARTNERS[name.removesuffix(WHOLE)])
            row = {**shape._asdict(), "product": name, "status": status[name], "tflops": ours, "bf16_tflops": beside}
            ratio = [fast / slow for fast, slow in zip(ours, beside, strict=True)] if ours and beside else None
            self.rows.append(row | {"over_bf16": ratio})

    def status(self, title: str, problem: Callable[[], str]) -> str:
        """ok, or why something is not timed. What is wrong is noted, and the rest goes on."""
        try:
            found = problem()
        except Exception as error:  # such as a GPU or a cuBLAS without the product: a line of the report
            found = brief(error)
        if found:
            self.wrong.append(f"{title}: {found}")
        return found or "ok"

    def take_kernels(self, shape: Shape, operands: Operands, bench: Stopwatch) -> None:
        """Compare what quantizes with torch's ops bit by bit, and time it."""
        for name, kernel in kernels_of(operands).items():
            of = f"{shape.of}, {shape.matrix}"
            status = self.status(f"{name}, {of}", partial(problem_of_kernel, kernel, self.impl))
            ms = bench.median_ms(partial(kernel_again, kernel, self.impl)) if status == "ok" else None
            self.kernels.append({"kernel": name, "of": of, "status": status, "ms": ms})

    def found(self) -> dict[str, Any]:
        return super().found() | {
            "dry_run": self.options.dry_run,
            "verdict": verdict(self.rows),
            "wrong": self.wrong,
            "rows": self.rows,
            "kernels": self.kernels,
        }


def rate_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """TFLOP/s of a product over all matrices that decide, one after the other. None if one was not measured."""
    flops = seconds = 0.0
    mine = [row for row in rows if row["of"] == GATE_OF and row["product"] == name]
    for row in mine:
        if not row["tflops"]:
            return None
        work = 2e-12 * row["outputs"] * row["inputs"] * row["tokens"]
        # The turns of a row last equally long by their numbers of products, so their mean is harmonic too.
        seconds += work * sum(1 / rate for rate in row["tflops"]) / len(row["tflops"])
        flops += work
    return flops / seconds if len(mine) == len(list(shapes_of(GATE_OF))) else None


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether weight gradients in FP8 may be turned on, with the rates."""
    found = {name: rate_of(rows, name) for name in GATE}
    missing = [name for name, rate in found.items() if rate is None]
    if missing:
        return f"no verdict: {' and '.join(missing)} of Llama 3 8B not measured"
    passes = all(rate is not None and rate >= GATE[name] for name, rate in found.items())
    rates_in_words = ", ".join(f"{name} {rate:,.0f} (needs {GATE[name]:,.0f})" for name, rate in found.items())
    says = "may be turned on" if passes else "stays in bf16"
    added = rate_of(rows, ADDED)
    of_ours = f"; dW by our kernel {added:,.0f}" if added else ""
    return f"the weight gradient in FP8 {says}: TFLOP/s sustained, Llama 3 8B: {rates_in_words}{of_ours}"


def measure(options: Options) -> Found:
    """Measure all. Wrong products and kernels are problems."""
    bench, _, circumstances = prepare(options.dry_run)
    target = torch.device("meta") if options.dry_run else bench.target
    session = Probe(options, circumstances, target=target)
    session.work(bench)
    title = "DRY RUN on the meta device: no figures" if options.dry_run else "FP8 products"
    shown = [table(session.rows, title), table(session.kernels)]
    return session.end(*shown, verdict(session.rows), problems=session.wrong)
