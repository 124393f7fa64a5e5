"""Compiles every kernel in every shipped configuration for sm_80, sm_90 and sm_100, without a GPU, and tells what the
binaries take: python tests/kernel_table.py [--only OP] [--json FILE].

A process of its own: Triton's interpreter and compiler cannot share one. Pointers and the sizes named in `aligned` are
declared divisible by 16, as the JIT finds them to be at launch.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from megapar_kernels import activations, adamw, cross_entropy, dropout, norms, rope, softmax
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as megapar.device.prepare sets it
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
ARCHITECTURES = (80, 90, 100)
REGISTERS, MOST_WARPS = 65536, 64  # of one SM


@dataclass(frozen=True)
class Shipped:
    """A kernel and one of the configurations that its launcher chooses."""

    op: str
    variant: str
    kernel: Any
    types: Mapping[str, str]  # of run-time arguments: *bf16, *fp32, i32, fp32 ...; all others are constants
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    aligned: Sequence[str] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}"


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel. Warps are those that fit on an SM by registers; loads are counted in the machine code."""

    registers: int
    stack: int
    spills: int
    shared: int
    warps_per_sm: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int


def shipped() -> Iterator[Shipped]:
    """All kernels: one block an op."""
    yield from ()
    yield from _activations()
    yield from _rope()
    yield from _cross_entropy()
    yield from _dropout()
    yield from _softmax()
    yield from _norms()
    yield from _adamw()


def _cross_entropy() -> Iterator[Shipped]:
    statistics, gradient = cross_entropy._statistics_kernel, cross_entropy._gradient_kernel
    rowwise = dict.fromkeys(("maximum_ptr", "scale_ptr", "grad_loss_ptr"), "*fp32")
    for dtype, width in (("bf16", 256), ("bf16", 131072), ("fp32", 131072)):
        sizes = dict.fromkeys(("rows", "columns", "width", "stride"), "i32")
        pointers = {"logits_ptr": f"*{dtype}", "target_ptr": "*i64"}
        types = {**pointers, "statistics_ptr": "*fp32", **sizes}
        steps, lanes, warps = cross_entropy.statistics_config(width)
        for variant, with_total in (("statistics", False), ("statistics, smoothed", True)):
            constants = {"WITH_TOTAL": with_total, "STEPS": steps, "LANES": lanes}
            name, aligned = f"{variant} {dtype} {width}", ("rows", "width", "stride")
            yield Shipped("cross_entropy", name, statistics, types, constants, warps, aligned=aligned)
        block, warps = cross_entropy.gradient_config(width)
        sizes = dict.fromkeys(("columns", "width", "stride", "blocks"), "i32")
        types = {**pointers, **rowwise, "grad_ptr": f"*{dtype}", **sizes, "on_target": "fp32", "on_all": "fp32"}
        name, constants, aligned = f"gradient {dtype} {width}", {"BLOCK": block}, ("width", "stride")
        yield Shipped("cross_entropy", name, gradient, types, constants, warps, aligned=aligned)


def _dropout() -> Iterator[Shipped]:
    for columns in (256, 4096):
        rows, block, warps = dropout.config(columns)
        constants = {"THRESHOLD": int(0.1 * 2**32), "ROWS": rows, "BLOCK": block}
        types = {
            "x_ptr": "*bf16",
            "keys_ptr": "*i64",
            "y_ptr": "*bf16",
            "rows": "i32",
            "columns": "i32",
            "scale": "fp32",
        }
        kernel, aligned = dropout._dropout_add_kernel, ("rows", "columns")
        forward = {**types, "residual_ptr": "*bf16"}
        yield Shipped("dropout", f"forward {columns}", kernel, forward, constants, warps, aligned=aligned)
        backward = {**constants, "residual_ptr": None}
        yield Shipped("dropout", f"backward {columns}", kernel, types, backward, warps, aligned=aligned)


def _adamw() -> Iterator[Shipped]:
    kernel, (units, warps) = adamw._adamw_kernel, adamw.config()
    flat = ("main_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "clip_ptr")
    scalars = ("decay", "momentum", "beta2", "beta2_rest", "eps", "step_size", "root_correction")
    types = {**dict.fromkeys(flat, "*fp32"), "elements": "i32", **dict.fromkeys(scalars, "fp32")}
    constants = {"UNITS": units, "UNIT": adamw.UNIT}
    full = {**types, "params_ptr": "*bf16", "decayed_ptr": "*i1", "found_inf_ptr": "*fp32"}
    yield Shipped("adamw", "bf16", kernel, full, constants, warps, aligned=("elements",))
    absent = dict.fromkeys(("params_ptr", "decayed_ptr", "found_inf_ptr"))
    yield Shipped("adamw", "fp32", kernel, types, {**constants, **absent}, warps, aligned=("elements",))
    steps, block, warps = adamw.square_sum_config()
    types = {"x_ptr": "*fp32", "tiles_ptr": "*i64", "partial_ptr": "*fp64", "elements": "i32"}
    constants = {"STEPS": steps, "BLOCK": block, "UNIT": adamw.UNIT}
    yield Shipped("adamw", "square sum", adamw._square_sum_kernel, types, constants, warps, aligned=("elements",))


def _activations() -> Iterator[Shipped]:
    forward, backward = activations._activation_forward_kernel, activations._activation_backward_kernel
    shapes = [("swiglu", "silu", True, 96), ("swiglu", "silu", True, 4096), ("geglu", "gelu", True, 4096)]
    shapes += [("reglu_squared", "relu_squared", True, 4096), ("relu_squared", "relu_squared", False, 4096)]
    for name, activation, gated, columns in [*shapes, ("bias_gelu", "gelu", False, 4096)]:
        row_block, column_block, warps = activations.config(columns)
        sizes = {"ACTIVATION": activation, "GATED": gated, "ROW_BLOCK": row_block, "COLUMN_BLOCK": column_block}
        for direction, kernel in (("forward", forward), ("backward", backward)):
            types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in sizes}
            if name != "bias_gelu":
                types.pop("bias_ptr")
            constants = sizes if name == "bias_gelu" else {**sizes, "bias_ptr": None}
            yield Shipped(
                "activations", f"{name} {direction} {columns}", kernel, types, constants, warps, aligned=["columns"]
            )


def _rope() -> Iterator[Shipped]:
    kernel = rope._rotate_kernel
    for layout, heads, width in itertools.product(("half", "interleaved"), (4, 32), (64, 80, 128)):
        *tile, warps = rope.config(heads, width)
        constants = {"WIDTH": width, "INTERLEAVED": layout == "interleaved", "INVERSE": True}
        constants |= dict(zip(("POSITIONS", "HEADS", "PAIRS"), tile, strict=True))
        types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in constants}
        types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        aligned = [x for x in types if "stride" in x]
        yield Shipped("rope", f"{layout} {heads} heads of {width}", kernel, types, constants, warps, aligned=aligned)


def _norms() -> Iterator[Shipped]:
    for layer_norm, columns in itertools.product((False, True), (64, 128, 512, 1024, 4096, 8192, 16384, 32768, 65536)):
        tiles = [
            ("forward", norms._norm_forward_kernel, norms.forward_config(columns)),
            ("backward", norms._norm_backward_kernel, norms.backward_config(columns, 2, layer_norm)),
        ]
        for direction, kernel, config in tiles:
            if config is not None:
                sizes = {"ROW_BLOCK": config[0], "COLUMN_BLOCK": config[1]}
                for weight in ("bf16", "fp32") if columns in (128, 4096, 8192) else ("bf16",):
                    yield _norm(f"{direction} {columns} {weight}", kernel, sizes, config[2], layer_norm, weight)
    for layer_norm in (False, True):
        for direction, kernel in (
            ("forward", norms._norm_forward_wide_kernel),
            ("backward", norms._norm_backward_wide_kernel),
        ):
            sizes = {"BLOCK": norms.WIDE_BLOCK}
            yield _norm(f"{direction} wide", kernel, sizes, norms.WIDE_WARPS, layer_norm, "bf16")
        sizes = dict(zip(("ROW_BLOCK", "COLUMN_BLOCK"), norms.GRADIENT_TILE, strict=True))
        kernel = norms._norm_weight_gradient_kernel
        yield _norm("weight gradient wide", kernel, sizes, norms.GRADIENT_WARPS, layer_norm, "bf16")


def _norm(variant: str, kernel: Any, sizes: Mapping[str, int], warps: int, layer_norm: bool, weight: str) -> Shipped:
    """With the residual, which takes the most registers; RMSNorm is what lacks the pointers of bias and mean."""
    absent = () if layer_norm else ("bias_ptr", "mean_ptr", "grad_bias_ptr")
    types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in {*sizes, *absent}}
    wide = dict.fromkeys(("mean_ptr", "rstd_ptr", "grad_weight_ptr", "grad_bias_ptr"), "*fp32")
    wide |= {"eps": "fp32", "weight_ptr": f"*{weight}", "bias_ptr": f"*{weight}"}
    types = {x: wide.get(x, kind) for x, kind in types.items()}
    constants = {**sizes, **{x: None for x in kernel.arg_names if x in absent}}
    name = f"{'add_layer_norm' if layer_norm else 'add_rms_norm'} {variant}"
    return Shipped("norms", name, kernel, types, constants, warps, aligned=("columns",))


def _softmax() -> Iterator[Shipped]:
    forward, backward = softmax._softmax_forward_kernel, softmax._softmax_backward_kernel
    strides = ("batch_stride", "head_stride", "query_stride")
    for columns, causal in itertools.product((256, 2048, 4096, 8192, 16384), (True, False)):
        rows, block, warps = softmax.config(columns)
        constants: dict[str, Any] = {"CAUSAL": causal, "ROWS": rows, "BLOCK": block}
        name, aligned = f"{'causal' if causal else 'masked'} {columns}", ("rows", "columns", "queries", *strides)
        sizes = {**dict.fromkeys(("rows", "columns", "queries"), "i32"), "scale": "fp32"}
        types = {"scores_ptr": "*bf16", "y_ptr": "*bf16", "mask_ptr": "*i1", **sizes}
        types |= dict.fromkeys(("heads", *strides), "i32")
        if causal:
            del types["mask_ptr"]
        mask = {"mask_ptr": None} if causal else {}
        yield Shipped(
            "softmax",
            f"{name} forward",
            forward,
            types,
            {**constants, **mask, "column_stride": 1},
            warps,
            aligned=aligned,
        )
        types = {**dict.fromkeys(("y_ptr", "grad_y_ptr", "grad_scores_ptr"), "*bf16"), **sizes}
        yield Shipped("softmax", f"{name} backward", backward, types, constants, warps, aligned=aligned[:3])


def compile_one(item: Shipped, architecture: int) -> Resources:
    names = item.kernel.arg_names
    pointers = [name for name in names if item.types.get(name, "").startswith("*")]
    divisible = {*pointers, *item.aligned}
    source = ASTSource(
        fn=item.kernel,
        signature={name: item.types.get(name, "constexpr") for name in names},
        constexprs=dict(item.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in divisible},
    )
    options = {"num_warps": item.num_warps, "num_stages": item.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    in_use = (found["REG"] + 7) // 8 * 8 * 32
    return Resources(
        registers=found["REG"],
        stack=found["STACK"],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=compiled.metadata.shared,
        warps_per_sm=min(MOST_WARPS, REGISTERS // in_use // item.num_warps * item.num_warps),
        wide_loads=len(re.findall(r"LDG\.E(?:\.E[FL])?\.(?:128|ENL2)", code)),
        narrow_loads=len(re.findall(r"LDG\.E(?!(?:\.E[FL])?\.(?:128|ENL2))", code)),
        wide_stores=len(re.findall(r"STG\.E\.(?:128|ENL2)", code)),
    )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BINARIES / name), *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose name starts with this")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    table: dict[str, dict[str, dict[str, int]]] = {}
    names = [item.name for item in shipped() if item.name.startswith(options.only)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for name, table[name] in zip(names, pool.imap(compile_named, names), strict=True):
            for architecture, numbers in table[name].items():
                print(
                    f"{name:<40} {architecture:<7}", *(f"{key} {value}" for key, value in numbers.items()), flush=True
                )
    if options.json:
        lines = [f" {json.dumps(name)}: {json.dumps(resources)}" for name, resources in sorted(table.items())]
        head = f'{{"triton": {json.dumps(triton.__version__)}, "kernels": {{'
        options.json.write_text("\n".join([head, ",\n".join(lines), "}}"]) + "\n")


def compile_named(name: str) -> dict[str, dict[str, int]]:
    """Resources by architecture."""
    (item,) = (item for item in shipped() if item.name == name)
    return {f"sm_{architecture}": asdict(compile_one(item, architecture)) for architecture in ARCHITECTURES}


if __name__ == "__main__":
    sys.exit(main())
