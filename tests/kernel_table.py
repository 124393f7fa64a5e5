"""Compiles every kernel in every shipped configuration for sm_80, sm_90 and sm_100, without a GPU, and tells what the
binaries take: python tests/kernel_table.py [--only OP ...] [--json FILE].

It must be a process of its own, because Triton's interpreter and compiler cannot share one. Pointers and the sizes
named in `aligned` are declared divisible by 16, as the JIT finds them to be at launch. The JIT also makes every integer
argument that is 1 a constant: `_size_one` lists the kernels to which that happens.

tests/golden holds one table for each version of triton that was reviewed. The table of triton 3.6.0 is that of a GPU
machine with torch 2.11.0. On Linux PyPI's torch 2.11.0 is the CUDA build, which brings triton 3.6.0 and needs no GPU
to compile:

    python3.12 -m venv V
    V/bin/pip install torch==2.11.0 numpy pytest hypothesis tyro
    PYTHONPATH=.:models:kernels V/bin/python -m pytest tests/test_kernels_compiled.py
    PYTHONPATH=.:models:kernels V/bin/python tests/kernel_table.py --json tests/golden/kernel_resources_3.6.0.json

This file and tests/test_kernels_compiled.py need torch and pytest alone. tests/test_kernels_*.py need the others, too.

Instructions an element: between matrix products an H200 runs at 1.4 GHz of its 1.98, because it is hot. It then issues
132 x 128 x 1.4e9 instructions of one thread a second, and copies 4.3e12 bytes. In the time in which B bytes are copied
it issues 5.50 B instructions: the budget of an element that takes B bytes of memory traffic. A kernel that takes more
waits for its instructions and not for the memory. So did the backward of bias and GELU with 35.6 of 33.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import triton
from megapar_kernels import (
    activations,
    adamw,
    attention_tiles,
    cross_entropy,
    delta_backward_kernels,
    delta_fused,
    delta_kernels,
    dropout,
    grouped,
    norms,
    quantize_kernels,
    rope,
    scaled_tiles,
    short_conv_kernels,
    tiled_attention,
    token_rows,
)
from megapar_kernels.chunks import CHUNK
from megapar_kernels.dispatch import next_power_of_2
from megapar_kernels.quantize import packed_width
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as megapar.system.device.prepare sets it
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
ARCHITECTURES = (80, 90, 100)
REGISTERS, MOST_WARPS = 65536, 64  # of one SM
COUNTED = 90  # the architecture whose instructions are counted: an H200's
INSTRUCTIONS_A_BYTE = 132 * 128 * 1.4e9 / 4.3e12  # that an H200 issues while it copies a byte
LARGE = 4096  # columns from which on instructions are counted: in short rows a kernel's first instructions dominate
PRODUCTS = {"HGMMA": "wgmma", "UTCHMMA": "tcgen05", "HMMA": "mma"}  # by the name of the instruction
PRODUCTS |= {"QGMMA": "wgmma", "UTCQMMA": "tcgen05"}  # those of FP8
BATCH = 8  # kernels whose machine code one call of nvdisasm takes: its start takes longer than they do


@dataclass(frozen=True)
class Shipped:
    """A kernel and one of the configurations that its launcher chooses.

    `elements` are those of a program's tile, `traffic` the bytes of memory traffic that an element takes (the kernel's
    docstring says how many); 0 where instructions are not counted. `has_tail`: the last loop walks over what is left
    of a row, which may be nothing.
    """

    op: str
    variant: str
    kernel: Any
    types: Mapping[str, str]  # of run-time arguments: *bf16, *fp32, i32, fp32 ...; all others are constants
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    aligned: Sequence[str] = field(default_factory=tuple)
    elements: int = 0
    traffic: int = 0
    has_tail: bool = False
    architectures: Sequence[int] = ARCHITECTURES
    of_ampere: "Shipped | None" = None  # what is launched on sm_80 in its place

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}"


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel. Warps are those that fit on an SM by registers; loads are counted in the machine code.

    Instructions are those that a thread executes for an element, in a loop over tiles those of an iteration; the
    budget is explained above.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    warps_per_sm: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    instructions_per_element: float | None = None
    budget: float | None = None
    matrix_products: str | None = (
        None  # the instructions that multiply matrices: mma, wgmma (Hopper), tcgen05 (Blackwell)
    )


def shipped() -> Iterator[Shipped]:
    """All kernels in all sizes, then again with integer arguments that are 1."""
    yield from _all_sizes()
    yield from _size_one()


def _all_sizes() -> Iterator[Shipped]:
    """One block an op."""
    yield from _activations()
    yield from _weighted_activations()
    yield from _rope()
    yield from _cross_entropy()
    yield from _dropout()
    yield from _norms()
    yield from _adamw()
    yield from _tiled_attention()
    yield from _token_rows()
    yield from _grouped()
    yield from _delta_rule()
    yield from _short_conv()
    yield from _quantize()
    yield from _scaled()


def _token_rows() -> Iterator[Shipped]:
    indices, sizes = {"row_of_choice_ptr": "*i64"}, {"columns": "i32"}
    for columns, choices in itertools.product((2048, 4096), (1, 8)):
        block, warps = token_rows.copy_config(columns)
        yield Shipped(
            "token_rows", f"copy to {choices}, {columns}", token_rows._copy_kernel,
            {"x_ptr": "*bf16", **indices, "rows_ptr": "*bf16", **sizes}, {"CHOICES": choices, "BLOCK": block}, warps,
            aligned=("columns",), elements=block, traffic=2 + 2 * choices if columns >= LARGE else 0,
        )  # fmt: skip
    for columns, choices in itertools.product((256, 2048, 4096), (1, 2, 8)):
        tokens, block, warps = token_rows.sum_config(columns)
        constants: dict[str, Any] = {"CHOICES": choices, "TOKENS": tokens, "BLOCK": block}
        types = {"rows_ptr": "*bf16", **indices, "y_ptr": "*bf16", "tokens": "i32", **sizes}
        yield Shipped(
            "token_rows", f"sum of {choices}, {columns}", token_rows._sum_kernel, types, constants, warps,
            aligned=("columns",), elements=tokens * block, traffic=2 * choices + 2 if columns >= LARGE else 0,
        )  # fmt: skip


def _grouped() -> Iterator[Shipped]:
    kernel = grouped._weight_gradient_kernel
    out_block, in_block, row_block, warps, stages = grouped.config()
    sizes = {"OUT_BLOCK": out_block, "IN_BLOCK": in_block, "ROW_BLOCK": row_block}
    types = {"grad_ptr": "*bf16", "x_ptr": "*bf16", "ends_ptr": "*i32", "totals_ptr": "*fp32"}
    for overwrite in (False, True):
        yield Shipped(
            "grouped", f"weight gradient {'first' if overwrite else 'added'}", kernel,
            {**types, "outputs": "i32", "inputs": "i32"}, {**sizes, "OVERWRITE": overwrite}, warps, stages,
            aligned=("outputs", "inputs"),
        )  # fmt: skip


def _delta_rule() -> Iterator[Shipped]:
    """With one decay for a head and with one for each channel."""
    front, back = delta_kernels, delta_backward_kernels
    numbers = (
        "sums_ptr",
        "a_ptr",
        "beta_ptr",
        "state_ptr",
        "last_ptr",
        "dlast_ptr",
        "dstate_ptr",
        "dg_ptr",
        "dbeta_ptr",
    )
    wide = {**dict.fromkeys((*numbers, "g_ptr"), "*fp32"), "starts_ptr": "*i32"}
    kernels = [
        ("sums", front.sums_kernel), ("pairs", front.pairs_kernel), ("solved", front.solved_kernel),
        ("states", front.states_kernel), ("outputs", front.outputs_kernel), ("inverse", front.inverse_kernel),
        ("state gradients", back.state_gradients_kernel), ("pair gradients", back.pair_gradients_kernel),
        ("input gradients", back.input_gradients_kernel),
    ]  # fmt: skip
    for d, e in ((64, 64), (128, 128), (256, 512)):
        for per_channel in (False, True):
            for name, kernel in kernels:
                known = {"WIDTH": d, "V_WIDTH": e, "PER_CHANNEL": per_channel, "CHUNK": CHUNK}
                known |= {"COLUMNS": delta_fused.columns(d), "V_COLUMNS": delta_fused.columns(e)}
                if name == "sums":
                    known["WIDTH"] = d if per_channel else 1
                    known["COLUMNS"] = delta_fused.columns(known["WIDTH"])
                if name in ("pairs", "input gradients"):
                    known["COLUMNS"] = delta_fused.pair_columns(d, per_channel)
                if "ROWS" in kernel.arg_names:
                    known["ROWS"] = delta_fused.columns(d, delta_fused.WIDEST)
                    known["V_COLUMNS"] = delta_fused.columns(e, delta_fused.state_columns(d))
                constants = {x: value for x, value in known.items() if x in kernel.arg_names}
                if per_channel and "PER_CHANNEL" not in constants and name != "sums":
                    continue
                if d > 64 and (name == "inverse" or known["WIDTH"] == 1):
                    continue  # equal to those of 64
                types = {x: wide.get(x, "*bf16" if x.endswith("_ptr") else "i32") for x in kernel.arg_names}
                shape = "channels" if per_channel else "heads"
                tiles = delta_fused.launch(name, d, per_channel)
                yield Shipped(
                    "delta_rule", f"{name} {d}/{e}, decays of {shape}", kernel,
                    {x: kind for x, kind in types.items() if x not in constants}, constants, **tiles,
                    aligned=[x for x in types if x.endswith(("_s", "_b", "_n")) and not x.startswith("beta")],
                )  # fmt: skip


def _short_conv() -> Iterator[Shipped]:
    """With SiLU. Not counted: the taps of an element take 27 instructions forward where there is time for 22, and the
    backward computes z again for each position that reads an input."""
    c = short_conv_kernels
    forward = "forward", c.convolved_kernel, c.FORWARD_ROWS, c.FORWARD_WARPS
    backward = "backward", c.convolution_gradients_kernel, c.BACKWARD_ROWS, c.BACKWARD_WARPS
    for name, kernel, rows, warps in (forward, backward):
        sizes = {"SILU": True, "ROWS": rows, "COLUMNS": c.COLUMNS, "RUN": c.RUN}
        for width, others in ((4, ()), (4, ("before_ptr", "place_ptr", "bias_ptr"))):
            known = {**sizes, "TAPS": width, "SUMS": next_power_of_2(width + 1)}
            known |= {x: None for x in ("before_ptr", "place_ptr", "bias_ptr") if x not in others}
            constants = {x: value for x, value in known.items() if x in kernel.arg_names}
            special = {"partial_ptr": "*fp32", "place_ptr": "*i64"}
            types = {x: special.get(x, "*bf16" if x.endswith("_ptr") else "i32") for x in kernel.arg_names}
            yield Shipped(
                "short_conv", f"{name} of {width}{', ' * bool(others)}{', '.join(x[:-4] for x in others)}", kernel,
                {x: kind for x, kind in types.items() if x not in constants}, constants, warps,
                aligned=[x for x in types if x == "channels" or (x.endswith(("_s", "_b")) and x[:5] != "place")],
            )  # fmt: skip


def _quantize() -> Iterator[Shipped]:
    """Not for sm_80, for which Triton has no e4m3."""

    def of(
        variant: str, kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, int], warps: int,
        elements: int = 0, traffic: int = 0,
    ) -> Shipped:  # fmt: skip
        numbers = {name: "i32" for name in kernel.arg_names if name not in (*pointers, *constants)}
        aligned = [name for name in numbers if name in ("stride", "width", "columns", "rows", "row_stride")]
        return Shipped(
            "quantize", variant, kernel, {**pointers, **numbers}, constants, warps, aligned=aligned,
            elements=elements, traffic=traffic, architectures=(90, 100),
        )  # fmt: skip

    q = quantize_kernels
    for features in (768, 1408, 4096):
        tile = dict(zip(("ROWS", "GROUPS"), q.tile_of_groups(features // 128), strict=True))
        size = q.GROUPS_OF_TILE * 128, 3
        pointers = {"x_ptr": "*bf16", "packed_ptr": "*u8"}
        yield of(f"rows {features}", q.quantize_rows_kernel, pointers, tile, q.WARPS, *size)
        pointers = {"packed_ptr": "*u8", "y_ptr": "*bf16"}
        yield of(f"restored rows {features}", q.restore_rows_kernel, pointers, tile, q.WARPS, *size)
    matrix = {"weight_ptr": "*bf16", "codes_ptr": "*u8", "exponents_ptr": "*u8"}
    yield of("blocks", q.quantize_blocks_kernel, matrix, {}, q.QUANTIZE_BLOCK_WARPS, 128 * 128, 3)
    yield of("restored blocks", q.restore_blocks_kernel, matrix, {}, q.BLOCK_WARPS, 128 * 128, 3)
    pointers = dict.fromkeys(("packed_ptr", "codes_ptr", "exponents_ptr"), "*u8")
    tile = {"COLUMNS": q.TRANSPOSED_COLUMNS}
    # Not counted: 20 instructions where there is time for 11, mostly for the maximum over rows and the transpose.
    yield of("along positions", q.transposed_rows_kernel, pointers, tile, q.WARPS)
    pointers = {"x_ptr": "*u8", "y_ptr": "*u8"}
    yield of("transposed bytes", q.transposed_bytes_kernel, pointers, {}, q.BLOCK_WARPS, 128 * 128, 2)
    tile = dict(zip(("ROWS", "COLUMNS"), q.SCALES_TILE, strict=True)) | {"column_stride": 1}
    pointers = {"exponents_ptr": "*u8", "scales_ptr": "*fp32"}
    yield of("expanded scales", q.expanded_scales_kernel, pointers, tile | {"out_row_stride": 1}, q.WARPS)
    pointers = {"exponents_ptr": "*u8", "scales_ptr": "*i32"}
    yield of("swizzled scales", q.swizzled_scales_kernel, pointers, tile | {"GROUP_ROWS": 1}, q.WARPS)


def _scaled() -> Iterator[Shipped]:
    """FP8 products. Qwen3-30B has 128 experts, and each rank of ep 8 has 16 of them."""
    pointers = {"x_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "weight_ptr": "*fp8e4nv", "exponents_ptr": "*u8"}
    pointers |= {"ends_ptr": "*i32", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("groups", "outputs", "inputs", "width", "all_rows", "group_stride"), "i32")
    rows, warps, stages = scaled_tiles.grouped_config()
    for groups, name in ((128, "out_stride"), (16, "in_stride")):
        transposed = name == "in_stride"  # the matrix of an input gradient
        variant = f"products of {groups} groups{', transposed' if transposed else ''}"
        constants = {"GROUPS": groups, "ROWS": rows, "out_stride" if transposed else "in_stride": 1}
        yield Shipped(
            "scaled", variant, scaled_tiles.scaled_grouped_kernel,
            {**pointers, **numbers, name: "i32"}, constants, warps, stages,
            aligned=("outputs", "inputs", "width"), architectures=(90, 100),
        )  # fmt: skip
    pointers = {"grad_ptr": "*fp8e4nv", "x_ptr": "*fp8e4nv"}
    pointers |= dict.fromkeys(("grad_scales_ptr", "x_scales_ptr", "total_ptr"), "*fp32")
    sizes = ("outputs", "inputs", "positions")
    columns, warps, stages = scaled_tiles.gradient_config()
    for overwrite in (False, True):
        yield Shipped(
            "scaled", f"weight gradient {'first' if overwrite else 'added'}", scaled_tiles.scaled_gradient_kernel,
            {**pointers, **dict.fromkeys(sizes, "i32")},
            {"OVERWRITE": overwrite, "TILE_ROWS": scaled_tiles.TILES_OF_ROW, "COLUMNS": columns}, warps, stages,
            aligned=sizes, architectures=(90, 100),
        )  # fmt: skip


def _cross_entropy() -> Iterator[Shipped]:
    statistics, gradient = cross_entropy._statistics_kernel, cross_entropy._gradient_kernel
    rowwise = dict.fromkeys(("maximum_ptr", "scale_ptr", "grad_loss_ptr"), "*fp32")
    for dtype, width in (("bf16", 256), ("bf16", 131072), ("fp32", 131072)):
        bytes_a_logit = 2 if dtype == "bf16" else 4
        sizes = dict.fromkeys(("rows", "columns", "width", "stride"), "i32")
        pointers = {"logits_ptr": f"*{dtype}", "target_ptr": "*i64"}
        types = {**pointers, "statistics_ptr": "*fp32", **sizes}
        steps, lanes, warps = cross_entropy.statistics_config(width)
        yield Shipped(
            "cross_entropy", f"statistics {dtype} {width}", statistics, types,
            {"STEPS": steps, "LANES": lanes}, warps, aligned=("rows", "width", "stride"),
            elements=steps * lanes, traffic=bytes_a_logit if width >= LARGE else 0, has_tail=True,
        )  # fmt: skip
        block, warps = cross_entropy.gradient_config(width, bytes_a_logit)
        sizes = dict.fromkeys(("columns", "width", "stride", "blocks"), "i32")
        types = {**pointers, **rowwise, "grad_ptr": f"*{dtype}", **sizes}
        yield Shipped(
            "cross_entropy", f"gradient {dtype} {width}", gradient, types, {"BLOCK": block}, warps,
            aligned=("width", "stride"), elements=block, traffic=2 * bytes_a_logit if width >= LARGE else 0,
        )  # fmt: skip


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
        for direction, traffic in (("forward", 6), ("backward", 4)):
            forward = direction == "forward"
            yield Shipped(
                "dropout", f"{direction} {columns}", kernel,
                {**types, "residual_ptr": "*bf16"} if forward else types,
                constants if forward else {**constants, "residual_ptr": None}, warps, aligned=aligned,
                elements=rows * block, traffic=traffic if columns >= LARGE else 0,
            )  # fmt: skip


def _adamw() -> Iterator[Shipped]:
    kernel, (units, warps) = adamw._adamw_kernel, adamw.config()
    flat = ("main_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "clip_ptr")
    scalars = ("decay", "momentum", "beta2", "beta2_rest", "eps", "step_size", "root_correction")
    types = {**dict.fromkeys(flat, "*fp32"), "elements": "i32", "update": "i32", **dict.fromkeys(scalars, "fp32")}
    narrow = dict.fromkeys(("remainder_ptr", "rows_ptr", "tiles_ptr"))
    constants = {"UNITS": units, "UNIT": adamw.UNIT, **narrow}
    full = {**types, "params_ptr": "*bf16", "decayed_ptr": "*i1", "found_inf_ptr": "*fp32"}
    aligned, elements = ("elements",), units * adamw.UNIT
    yield Shipped("adamw", "bf16", kernel, full, constants, warps, aligned=aligned, elements=elements, traffic=30)
    halves = {"main_ptr": "*i16", "remainder_ptr": "*i16"}
    moments = {"exp_avg_ptr": "*i16", "exp_avg_sq_ptr": "*i16", "rows_ptr": "*i64", "tiles_ptr": "*i32"}
    for variant, changed, traffic in (
        ("main weights in halves", halves, 28), ("bf16 moments", moments, 22), ("all in 16 bits", halves | moments, 20)
    ):  # fmt: skip
        there = {**full, **changed}
        if "remainder_ptr" in changed:
            del there["params_ptr"]  # the upper halves are the parameters
        none = {name: None for name in (*narrow, "params_ptr") if name not in there}
        yield Shipped(
            "adamw", variant, kernel, there, {"UNITS": units, "UNIT": adamw.UNIT, **none}, warps,
            aligned=aligned, elements=elements, traffic=traffic,
        )  # fmt: skip
    constants = {**constants, **dict.fromkeys(("params_ptr", "decayed_ptr", "found_inf_ptr"))}
    yield Shipped("adamw", "fp32", kernel, types, constants, warps, aligned=aligned, elements=elements, traffic=28)
    steps, block, warps = adamw.square_sum_config()
    types = {"x_ptr": "*fp32", "tiles_ptr": "*i64", "partial_ptr": "*fp64", "elements": "i32"}
    constants = {"STEPS": steps, "BLOCK": block, "UNIT": adamw.UNIT}
    kernel, elements = adamw._square_sum_kernel, steps * block
    yield Shipped("adamw", "square sum", kernel, types, constants, warps, aligned=aligned, elements=elements, traffic=4)


def _activations() -> Iterator[Shipped]:
    forward = activations._activation_forward_kernel
    shapes = [("swiglu", "silu", True, 96), ("swiglu", "silu", True, 4096), ("geglu", "gelu", True, 4096)]
    shapes += [("reglu_squared", "relu_squared", True, 4096), ("relu_squared", "relu_squared", False, 4096)]
    for name, activation, gated, columns in [*shapes, ("bias_gelu", "gelu", False, 4096)]:
        backward = (
            activations._biased_backward_kernel if name == "bias_gelu" else activations._activation_backward_kernel
        )
        row_block, column_block, warps = activations.config(columns)
        sizes = {"ACTIVATION": activation, "GATED": gated, "ROW_BLOCK": row_block, "COLUMN_BLOCK": column_block}
        sizes["STAGES"] = activations.biased_backward_config(columns)[3]
        sizes["WIDTH"] = 0
        for direction, kernel in (("forward", forward), ("backward", backward)):
            types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in sizes}
            constants = {**sizes, "bias_ptr": None, "weights_ptr": None}
            if name == "bias_gelu":
                constants.pop("bias_ptr")
            types = {x: kind for x, kind in types.items() if x not in constants}
            types |= {"grad_bias_ptr": "*fp32"} if "grad_bias_ptr" in types else {}
            constants = {x: value for x, value in constants.items() if x in kernel.arg_names}
            traffic = {"forward": 6 if gated else 4, "backward": 10 if gated else 6}[direction]
            yield Shipped(
                "activations", f"{name} {direction} {columns}", kernel, types, constants, warps, aligned=["columns"],
                elements=row_block * column_block, traffic=traffic if columns >= LARGE else 0,
            )  # fmt: skip


def _weighted_activations() -> Iterator[Shipped]:
    """The widths of Qwen3-30B's experts and of Mixtral's. fp32 weights of rows."""
    for columns in (768, 14336):
        row_block, column_block, warps = activations.config(columns)
        tile = {"ROW_BLOCK": row_block, "COLUMN_BLOCK": column_block, "ACTIVATION": "silu"}
        weights = dict.fromkeys(("weights_ptr", "grad_weights_ptr"), "*fp32")
        plain = {"GATED": True, "bias_ptr": None, "WIDTH": 0}
        for direction, kernel, constants, traffic in (
            ("forward", activations._activation_forward_kernel, {**tile, **plain}, 6),
            ("backward", activations._weighted_backward_kernel, tile, 10),
        ):
            types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in constants}
            types |= {name: kind for name, kind in weights.items() if name in types}
            yield Shipped(
                "activations", f"swiglu weighted {direction} {columns}", kernel, types, constants, warps,
                aligned=["columns"], elements=row_block * column_block, traffic=traffic if columns >= LARGE else 0,
            )  # fmt: skip
        # Not counted: 29 instructions where there is time for 28; two kernels move 9 bytes in place of 5.
        for variant, types in (("swiglu", {}), ("swiglu weighted", {"weights_ptr": "*fp32"})):
            constants = {**tile, "GATED": True, "bias_ptr": None, "WIDTH": packed_width(columns)}
            constants |= {} if types else {"weights_ptr": None}
            types = {"x_ptr": "*bf16", **types, "y_ptr": "*u8", "rows": "i32", "columns": "i32"}
            yield Shipped(
                "packed activations", f"{variant} forward {columns}", activations._activation_forward_kernel, types,
                constants, warps, aligned=["columns"], architectures=(90, 100),
            )  # fmt: skip


def _rope(heads: Sequence[int] = (4, 32)) -> Iterator[Shipped]:
    kernel = rope._rotate_kernel
    for most_heads, width in itertools.product(heads, (64, 80, 128)):
        *tile, warps = rope.config(most_heads, width)
        constants = {"WIDTH": width, "INVERSE": True}
        constants |= dict(zip(("POSITIONS", "HEADS", "PAIRS"), tile, strict=True))
        types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in constants}
        types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        aligned = [x for x in types if "stride" in x]
        yield Shipped(
            "rope", f"{most_heads} heads of {width}", kernel, types, constants, warps, aligned=aligned,
            elements=2 * math.prod(tile), traffic=4 if width == 128 else 0,
        )  # fmt: skip


def _norms() -> Iterator[Shipped]:
    for layer_norm, columns in itertools.product((False, True), (64, 128, 512, 1024, 4096, 8192, 16384, 32768, 65536)):
        tiles = [
            ("forward", norms._norm_forward_kernel, norms.forward_config(columns, adds=True)),
            ("backward", norms._norm_backward_kernel, norms.backward_config(columns, 2, 3)),
        ]
        if columns >= LARGE:
            tiles.append(("forward alone", norms._norm_forward_kernel, norms.forward_config(columns, adds=False)))
        for direction, kernel, config in tiles:
            if config is not None:
                sizes = {"ROW_BLOCK": config[0], "COLUMN_BLOCK": config[1]}
                if isinstance(config, norms.BackwardTile):
                    sizes["STAGES"] = config.stages
                for weight in ("bf16", "fp32") if columns in (128, 4096, 8192) else ("bf16",):
                    traffic = (4 if direction == "forward alone" else 8) if columns >= LARGE else 0
                    name = f"{direction} {columns} {weight}"
                    yield _norm(name, kernel, {**sizes, "run": 1}, config[2], layer_norm, weight, traffic)
                if kernel is norms._norm_forward_kernel and columns in (1024, LARGE) and not layer_norm:
                    packs = {**sizes, "run": 1, "WIDTH": packed_width(columns)}
                    # Alone it takes 20 instructions where there is time for 17; two kernels move 7 bytes in place of 3.
                    traffic = 7 if columns >= LARGE and direction == "forward" else 0
                    item = _norm(f"{direction} {columns}", kernel, packs, config[2], False, "bf16", traffic)
                    yield replace(item, architectures=(90, 100), op="packed norms")
                if columns == 128:  # the heads of a fused projection
                    yield _norm(f"{direction} {columns} in runs", kernel, sizes, config[2], layer_norm, "bf16", 0)
    for layer_norm in (False, True):
        for direction, kernel in (
            ("forward", norms._norm_forward_wide_kernel),
            ("backward", norms._norm_backward_wide_kernel),
        ):
            sizes = {"BLOCK": norms.WIDE_BLOCK}
            yield _norm(f"{direction} wide", kernel, sizes, norms.WIDE_WARPS, layer_norm, "bf16", 8)
        sizes = dict(zip(("ROW_BLOCK", "COLUMN_BLOCK"), norms.GRADIENT_TILE, strict=True))
        kernel = norms._norm_weight_gradient_kernel
        yield _norm("weight gradient wide", kernel, sizes, norms.GRADIENT_WARPS, layer_norm, "bf16", 4)


def _norm(
    variant: str, kernel: Any, sizes: Mapping[str, int], warps: int, layer_norm: bool, weight: str, traffic: int
) -> Shipped:
    """With the residual, which takes the most registers, unless the variant is alone. RMSNorm is what lacks the
    pointers of bias and mean."""
    absent = () if layer_norm else ("bias_ptr", "mean_ptr", "grad_bias_ptr")
    absent += ("residual_ptr", "sum_ptr") if " alone " in variant else ()
    if "WIDTH" in kernel.arg_names:
        sizes = {"WIDTH": 0, **sizes}
    types = {x: "*bf16" if x.endswith("_ptr") else "i32" for x in kernel.arg_names if x not in {*sizes, *absent}}
    if sizes.get("WIDTH"):
        types["y_ptr"] = "*u8"
    wide = dict.fromkeys(("mean_ptr", "rstd_ptr", "grad_weight_ptr", "grad_bias_ptr"), "*fp32")
    wide |= {"eps": "fp32", "weight_ptr": f"*{weight}", "bias_ptr": f"*{weight}"}
    types = {x: wide.get(x, kind) for x, kind in types.items()}
    constants = {**sizes, **{x: None for x in kernel.arg_names if x in absent}}
    name = f"{'add_layer_norm' if layer_norm else 'add_rms_norm'} {variant}"
    return Shipped(
        "norms", name, kernel, types, constants, warps, aligned=[x for x in types if x in ("columns", "run_stride")],
        elements=math.prod(size for name, size in sizes.items() if name not in ("STAGES", "run", "WIDTH")),
        traffic=traffic,
    )  # fmt: skip


def _tiled_attention() -> Iterator[Shipped]:
    """With all that takes registers but dropout: documents, a window, a cap and sinks. With dropout, which no model has
    beside a cap or sinks. With ALiBi alone. And with none of these."""
    kernels = [
        ("forward", attention_tiles.forward_kernel, lambda *sizes, **_: tiled_attention.forward_config(*sizes)),
        ("queries", attention_tiles.queries_kernel, tiled_attention.queries_config),
        ("keys and values", attention_tiles.keys_values_kernel, tiled_attention.keys_values_config),
    ]
    special = {**dict.fromkeys(("lse_ptr", "delta_ptr", "scale", "cap", "keep_scale"), "fp32")}
    special |= dict.fromkeys(("starts_ptr", "stops_ptr"), "i32") | dict.fromkeys(("random_ptr", "columns_ptr"), "i64")
    special |= {"slopes_ptr": "fp32", "rows_at_ptr": "i64", "keys_at_ptr": "i64"}
    rules, drops = ("starts_ptr", "stops_ptr", "sinks_ptr"), ("random_ptr", "columns_ptr")
    bias = ("slopes_ptr", "rows_at_ptr", "keys_at_ptr")
    sizes = [(*widths, 0) for widths in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512))]
    for width, v_width, window in (*sizes, (64, 64, tiled_attention.NARROW)):
        narrow = ", narrow window" if window else ""
        for direction, kernel, config in kernels:
            main, rest, v_columns = tiled_attention.columns(width, v_width)
            constants: dict[str, Any] = {"WIDTH": width, "MAIN": main, "REST": rest, "V_WIDTH": v_width}
            constants |= {"V_COLUMNS": v_columns, "CAUSAL": True, "CAPPED": True, "THRESHOLD": int(0.1 * 2**32)}
            if direction == "keys and values":  # of two passes the first is the larger
                of_keys, of_values = tiled_attention.keys_values_passes(width, v_width)[0]
                constants |= {"OF_KEYS": of_keys, "OF_VALUES": of_values}
            types = {}
            for name in kernel.arg_names:
                if name not in {*constants, "QUERIES", "KEYS"}:
                    kind = special.get(name, "bf16" if name.endswith("_ptr") else "i32")
                    types[name] = f"*{kind}" if name.endswith("_ptr") else kind
            of_generation = []
            for capability in ((8, 0), (9, 0)):
                tiles = config(width, v_width, window, capability=capability)
                of_generation.append(
                    Shipped(
                        "tiled_attention", f"{direction} {width}/{v_width}{narrow}", kernel, types,
                        {**constants, "QUERIES": tiles.queries, "KEYS": tiles.keys}, tiles.warps, tiles.stages,
                        aligned=[name for name in types if "stride" in name],
                    )
                )  # fmt: skip
            of_variants = {"": (*drops, *bias), ", dropout": (*rules, *bias), ", plain": (*rules, *drops, *bias)}
            for what, left_out in {**of_variants, ", ALiBi": (*rules, *drops)}.items():
                absent = {name: None for name in types if name in left_out}
                constant = {**absent, "CAPPED": False} if what else absent
                ampere, hopper = (
                    replace(
                        full, variant=f"{full.variant}{what}", constants={**full.constants, **constant},
                        types={name: kind for name, kind in types.items() if name not in absent},
                    )
                    for full in of_generation
                )  # fmt: skip
                yield replace(hopper, of_ampere=ampere)


def _size_one() -> Iterator[Shipped]:
    """Kernels with the integer arguments that are 1 in practice, which the JIT then makes constants. For one
    architecture: what is looked for is whether they compile without spills."""
    ones: dict[str, tuple[str, ...]] = {
        # one token: a sequence of one, or a tensor rank's slice of a short one
        "activations swiglu forward 4096": ("rows",),
        "activations swiglu backward 4096": ("rows",),
        "activations bias_gelu backward 4096": ("rows",),
        "cross_entropy statistics bf16 131072": ("rows",),
        "dropout forward 4096": ("rows",),
        **{
            f"norms {norm} {variant}": ("rows",)
            for norm in ("add_rms_norm", "add_layer_norm")
            for variant in (
                *("forward 4096 bf16", "backward 4096 bf16"),
                *("forward wide", "backward wide", "weight gradient wide"),
            )
        },
        # a vocabulary, or a rank's slice of one, that a single block covers
        "cross_entropy gradient bf16 256": ("blocks",),
        "cross_entropy gradient bf16 131072": ("blocks",),  # the largest block
        # tensor parallelism leaves a rank one key head, or one head of each
        "rope 4 heads of 128": ("k_heads",),
        "rope 1 heads of 128": ("q_heads", "k_heads"),
        "rope 1 heads of 64": ("positions", "q_heads", "k_heads"),
        "adamw square sum": ("elements",),
        # one head of one sample of one position
        **{
            f"delta_rule {name} 64/64, decays of {shape}": ("heads", "length", "chunks", "all_heads", "beta_n")
            for name, shape in (
                *(("sums", "channels"), ("pairs", "heads"), ("solved", "channels"), ("states", "channels")),
                *(("outputs", "heads"), ("inverse", "heads"), ("state gradients", "channels")),
                *(("pair gradients", "heads"), ("input gradients", "channels")),
            )
        },
        "short_conv forward of 4, before, place, bias": ("length", "channels", "place_s", "place_b"),
        "short_conv backward of 4, before, place, bias": ("length", "channels", "place_s", "place_b"),
        # one query head for each key head, one sequence of one position
        "tiled_attention forward 64/64": ("run", "queries", "keys"),
        "tiled_attention queries 64/64": ("run", "queries", "keys"),
        "tiled_attention keys and values 64/64": ("run", "queries", "keys"),
    }
    items = {item.name: item for item in (*_all_sizes(), *_rope(heads=(1,)))}
    for name, names in ones.items():
        item = items[name]
        names = tuple(name for name in names if name in item.types)
        yield replace(
            item,
            variant=f"{item.variant}, {' = '.join(names)} = 1",
            types={x: kind for x, kind in item.types.items() if x not in names},
            constants={**item.constants, **dict.fromkeys(names, 1)},
            aligned=[x for x in item.aligned if x not in names],
            traffic=0,
            architectures=(COUNTED,),
        )


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one architecture."""

    item: Shipped
    architecture: int
    cubin: bytes
    shared: int


def compile_one(item: Shipped, architecture: int) -> Binary:
    if architecture == 80:
        item = item.of_ampere or item
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
    return Binary(item, architecture, compiled.asm["cubin"], compiled.metadata.shared)


def resources(binary: Binary, code: Sequence[str]) -> Resources:
    """Of a binary and its disassembled instructions."""
    item = binary.item
    usage = _tool("cuobjdump", "--dump-resource-usage", content=binary.cubin, suffix=".cubin")
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    in_use = (found["REG"] + 7) // 8 * 8 * 32
    counted = binary.architecture == COUNTED and item.traffic > 0
    text = "\n".join(code)
    # Into registers, or asynchronously into shared memory (STS).
    wide = len(re.findall(r"\bLDG(?:STS)?\.E(?:\.EF|\.EL|\.BYPASS)?\.(?:128|ENL2)", text))
    return Resources(
        registers=found["REG"],
        stack=found["STACK"],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        shared=binary.shared,
        warps_per_sm=min(MOST_WARPS, REGISTERS // in_use // item.num_warps * item.num_warps),
        wide_loads=wide,
        narrow_loads=len(re.findall(r"\bLDG(?:STS)?\.E\b", text)) - wide,
        wide_stores=len(re.findall(r"STG\.E\.(?:128|ENL2)", text)),
        instructions_per_element=round(instructions_per_element(item, code), 1) if counted else None,
        budget=round(INSTRUCTIONS_A_BYTE * item.traffic, 1) if counted else None,
        matrix_products=next((kind for name, kind in PRODUCTS.items() if re.search(rf"\b{name}", text)), None),
    )


def instructions_per_element(item: Shipped, code: Sequence[str]) -> float:
    """Those of all loops over tiles, which each see every element once; without a loop those of the whole kernel."""
    loops = [address - target + 1 for address, target in _branches(code) if target < address]
    instructions = sum(loops[:-1] if item.has_tail else loops) if loops else _shortest_way(code)
    return instructions * 32 * item.num_warps / item.elements


def _branches(code: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Numbers of the instructions that are branches, and of those where they lead."""
    for number, instruction in enumerate(code):
        if found := re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", instruction):
            yield number, int(found[1], 16)


def _shortest_way(code: Sequence[str]) -> int:
    """Instructions from the first to an EXIT when every branch is taken that shortens the way: rare cases are branches
    that cost more, and of a rotation's two branches a program takes one."""
    branches = dict(_branches(code))
    ways = [0] * (len(code) + 1)
    for number in reversed(range(len(code))):
        instruction = code[number]
        way = ways[number + 1]
        conditional = instruction.startswith("@") or re.search(r"\bBRA\S* !?U?P\d", instruction)
        if number in branches and branches[number] > number:
            way = min(way, ways[branches[number]]) if conditional else ways[branches[number]]
        elif "EXIT" in instruction and not conditional:
            way = 0
        ways[number] = way + 1
    return ways[0]


def disassemble(binaries: Sequence[Binary]) -> list[list[str]]:
    """Instructions of each binary, all of one architecture. Branches lead to 0x and the instruction's number."""
    architecture, texts = binaries[0].architecture, [_machine_code(binary.cubin) for binary in binaries]
    listing = _tool("nvdisasm", "-b", f"SM{architecture}", content=b"".join(texts), suffix=".bin")
    lines = [instruction.strip() for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", listing)]
    codes, first = [], 0
    for text in texts:
        number = len(text) // 16
        codes.append([_relative(line, 16 * first) for line in lines[first : first + number]])
        first += number
    assert first == len(lines), f"nvdisasm listed {len(lines)} instructions of {first}"
    return codes


def _relative(instruction: str, origin: int) -> str:
    """With the number of an instruction instead of its address in all of the machine code."""
    branch = re.fullmatch(r"(.*\bBRA\b.* )0x([0-9a-f]+)", instruction)
    return f"{branch[1]}0x{(int(branch[2], 16) - origin) // 16:x}" if branch else instruction


def _machine_code(cubin: bytes) -> bytes:
    """The .text sections of an ELF file of 64 bits, by its section headers."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(number)]
    where_names = sections[names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin[where_names + name :].startswith(b".text.")
    )


def _tool(name: str, *arguments: str, content: bytes, suffix: str) -> str:
    """What an NVIDIA tool prints about a file with this content."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        command = [str(BINARIES / name), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table_of(architectures: Sequence[int], names: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Resources by kernel and architecture."""
    items = {item.name: item for item in shipped()}
    table: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    for architecture in architectures:
        wanted = [items[name] for name in names if architecture in items[name].architectures]
        binaries = [compile_one(item, architecture) for item in wanted]
        for binary, code in zip(binaries, disassemble(binaries) if binaries else [], strict=True):
            found = {key: value for key, value in asdict(resources(binary, code)).items() if value is not None}
            table[binary.item.name][f"sm_{architecture}"] = found
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name starts with one of these")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    table: dict[str, dict[str, dict[str, Any]]] = {}
    names = [item.name for item in shipped() if item.name.startswith(tuple(options.only))]
    batches = [names[first : first + BATCH] for first in range(0, len(names), BATCH)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for found in pool.imap(partial(table_of, options.architectures), batches):
            table |= found
            for name, by_architecture in found.items():
                for architecture, numbers in by_architecture.items():
                    values = (f"{key} {value}" for key, value in numbers.items())
                    print(f"{name:<40} {architecture:<7}", *values, flush=True)
    if options.json:
        lines = [f" {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(table.items())]
        head = f'{{"triton": {json.dumps(triton.__version__)}, "kernels": {{'
        options.json.write_text("\n".join([head, ",\n".join(lines), "}}"]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
