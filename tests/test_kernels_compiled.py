"""Every kernel in every shipped configuration, compiled for an H200 without having one (tests/kernel_table.py,
in a process of its own); and what the source of a kernel must not do."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels.dispatch import HAS_TRITON, triton

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "golden").glob("kernel_resources*.json"))  # one for each triton that was reviewed
KERNELS = sorted((HERE.parent / "kernels/megapar_kernels").glob("*.py"))
# They run once a step or hold a row of fp32 in registers; all others hide latency with 16 warps and more on each SM.
FEWEST_WARPS = 16
# Kernels of matrix products keep sums in registers and wait for tensor cores: a warp group or two on each SM.
OF_PRODUCTS = ("tiled_attention", "grouped", "scaled", "delta_rule")
# Of these the delta rule has two that add decays, and solve for a triangle in fp32 without tensor cores.
WITHOUT_PRODUCTS = ("delta_rule sums", "delta_rule inverse")
WITHOUT_WIDE_LOADS = (
    "adamw square sum, elements = 1",  # it reads a single number
    "delta_rule sums 64/64, decays of heads",  # and it one number of each token
    *(f"short_conv {way} of 4, before, place, bias, length = channels" for way in ("forward", "backward")),
)
FEWEST_WARPS_OF_PRODUCTS = 4
# Asynchronous copies keep the memory busy in place of warps.
FEWEST_WARPS_BESIDE_COPIES = 8
# It has the tiles of all taps in registers. No GPU has timed fewer.
OF_ALL_TAPS = ("short_conv backward",)
WITHOUT_AMPERE = ("quantize", "scaled", "packed")  # Triton converts to e4m3 from sm_89 on, and torch serves older GPUs
MOST_SHARED = 99 << 10  # bytes that a program may have on every GPU from sm_80 on
OF_PROGRAM = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}  # and on these
# They spill on Hopper, and were timed on an H200: tiles without spills are slower.
FASTER_WITH_SPILLS = (
    "tiled_attention keys and values",
    *(f"tiled_attention forward {widths}" for widths in ("128/128", "192/128", "256/256")),
    *("tiled_attention queries 128/128", "tiled_attention queries 192/128", "tiled_attention queries 256/256"),
)
# Their names go on with a number of columns. Those of wide rows, which go on with "wide", have no copies.
COPIES_AHEAD = tuple(f"norms add_{name}_norm backward {digit}" for name in ("rms", "layer") for digit in range(1, 10))
# Of its budget of instructions an element (tests/kernel_table.py): beyond it a kernel no longer reaches the copy rate.
MOST_OF_BUDGET = 0.95

# A compilation takes half a second, and there are 200. These represent each file of kernels, forward and backward, rows
# in registers and rows too wide for them, what may spill, and integer arguments that are 1.
FEW = (
    *("activations swiglu weighted backward 14336", "activations swiglu forward 4096, rows = 1", "adamw bf16 moments"),
    *("adamw square sum, elements = 1", "cross_entropy statistics bf16 131072"),
    *("dropout forward 4096", "norms add_rms_norm backward 4096 bf16"),
    *("norms add_layer_norm backward wide", "rope 4 heads of 128", "token_rows sum of 8, 4096"),
    *("grouped weight gradient first", "tiled_attention keys and values 64/64, plain"),
    *("tiled_attention forward 64/64, dropout", "quantize rows 4096", "scaled products of 128"),
    *("packed norms add_rms_norm forward 4096", "delta_rule outputs 64/64", "short_conv forward of 4, before"),
)

Table = dict[str, dict[str, dict[str, Any]]]
EVERY = ("",)
ALL_OF_AN_H200 = pytest.param((EVERY, ("90",)), id="all", marks=pytest.mark.slow)
ALL_OF_THREE = pytest.param((EVERY, ("80", "90", "100")), id="80-90-100", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param((FEW, ("90",)), id="few"), ALL_OF_AN_H200, ALL_OF_THREE])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Resources by kernel and architecture: of few kernels on an H200, of all kernels on one, and on all three."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    file = tmp_path_factory.mktemp("kernels") / "table.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names, architectures = request.param
    command = [sys.executable, str(HERE / "kernel_table.py"), "--json", str(file)]
    command += ["--only", *names, "--architectures", *architectures]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found: Table = json.loads(file.read_text())["kernels"]
    return found


def reviewed() -> tuple[Path, Table]:
    """The golden table of this triton. Kernels must compile with any triton; what each makes of them was reviewed for
    some."""
    versions = []
    for path in GOLDEN:
        golden = json.loads(path.read_text())
        if golden["triton"] == triton.__version__:
            return path, golden["kernels"]
        versions.append(golden["triton"])
    pytest.skip(f"resources were reviewed for triton {' and '.join(versions)}, this is {triton.__version__}")


def test_nothing_spills_loads_are_wide_and_warps_enough(table: Table) -> None:
    """Those with integer arguments of 1 are compiled for an H200 alone."""
    architectures = {architecture for by_architecture in table.values() for architecture in by_architecture}
    assert len(table) >= len(FEW)
    assert any(" = 1" in name for name in table)
    wrong = []
    for name, by_architecture in table.items():
        expected = architectures - {"sm_80"} if name.startswith(WITHOUT_AMPERE) else architectures
        assert set(by_architecture) == ({"sm_90"} if " = 1" in name else expected)
        for architecture, found in by_architecture.items():
            # The tiles of products are those of Hopper. The tables say what others spill.
            may_spill = FASTER_WITH_SPILLS if architecture == "sm_90" else OF_PRODUCTS
            if (found["spills"] or found["stack"]) and not name.startswith(may_spill):
                wrong.append(f"{name}, {architecture}: {found['spills']} spills, {found['stack']} bytes of stack")
            if not found["wide_loads"] and not name.startswith(WITHOUT_WIDE_LOADS):
                wrong.append(f"{name}, {architecture}: no 128-bit load")
            fewest = FEWEST_WARPS_OF_PRODUCTS if name.startswith(OF_PRODUCTS) else FEWEST_WARPS
            fewest = FEWEST_WARPS_BESIDE_COPIES if name.startswith(COPIES_AHEAD) else fewest
            fewest = FEWEST_WARPS_BESIDE_COPIES if name.startswith(OF_ALL_TAPS) else fewest
            most_shared = OF_PROGRAM[architecture] if name.startswith(OF_PRODUCTS) else MOST_SHARED
            if found["shared"] > most_shared:
                wrong.append(f"{name}, {architecture}: {found['shared']} bytes of shared memory")
            if found["warps_per_sm"] < fewest:
                wrong.append(f"{name}, {architecture}: {found['warps_per_sm']} warps on an SM")
    reviewed()
    assert not wrong, "\n".join(wrong)


def test_kernels_wait_for_the_memory_and_not_for_their_instructions(table: Table) -> None:
    counted = {name: found["sm_90"] for name, found in table.items() if "budget" in found["sm_90"]}
    operations = {name.split()[0] for name in table} - {*OF_PRODUCTS, "short_conv"}
    assert {name.split()[0] for name in counted} == operations, "no kernel of an operation was counted"
    shares = {name: found["instructions_per_element"] / found["budget"] for name, found in counted.items()}
    over = {name: share for name, share in shares.items() if share > MOST_OF_BUDGET}
    reviewed()
    assert not over, f"more than {MOST_OF_BUDGET} of the instructions that there is time for: {over}"


def test_tensor_cores_multiply_matrices(table: Table) -> None:
    """By the instructions of their generation."""
    of_generation = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    seen = 0
    for name, by_architecture in table.items():
        for architecture, found in by_architecture.items():
            wanted = None
            if name.startswith(OF_PRODUCTS) and not name.startswith(WITHOUT_PRODUCTS):
                seen += 1
                wanted = of_generation[architecture]
            assert found.get("matrix_products") == wanted, (name, architecture)
    assert seen > 1


def test_resources_are_those_that_were_reviewed(table: Table, request: pytest.FixtureRequest) -> None:
    path, golden = reviewed()
    names, _ = request.node.callspec.params["table"]
    assert table.keys() == {name for name in golden if name.startswith(names)}
    assert len(golden) > 50
    assert sum(" = 1" in name for name in golden) > 20
    # The reviewed resources are those of all architectures.
    changed = [name for name in table if any(golden[name][where] != found for where, found in table[name].items())]
    again = f"python tests/kernel_table.py --json {path.relative_to(HERE.parent)}"
    assert not changed, f"{sorted(changed)} take other resources: review the diff of `{again}`"


def program_ids(tree: ast.AST) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == "tl.program_id"]


def test_program_numbers_are_64_bit_before_anything_is_multiplied() -> None:
    """Fault tensors-beyond-32-bits: rows times columns may exceed 2^31."""
    wrong = []
    seen = 0
    for path in KERNELS:
        tree = ast.parse(path.read_text())
        widened = {
            ast.dump(node.func.value) + str(node.func.value.lineno) + str(node.func.value.col_offset)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "to"
            and [ast.unparse(argument) for argument in node.args] == ["tl.int64"]
        }
        for call in program_ids(tree):
            seen += 1
            if ast.dump(call) + str(call.lineno) + str(call.col_offset) not in widened:
                wrong.append(f"{path.name}:{call.lineno}")
    assert seen > 10
    assert not wrong, wrong


def test_kernels_use_nothing_that_one_of_the_tritons_lacks() -> None:
    """3.6 to 3.9: no block pointers, no libdevice; and no autotuning, for its choices would differ between ranks."""
    text = "\n".join(path.read_text() for path in KERNELS)
    for name in ("make_block_ptr", "libdevice", "autotune", "atomic_"):
        assert name not in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_a_kernel_runs_natively() -> None:
    from megapar_kernels.activations import swiglu

    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(swiglu(x, impl="triton"), swiglu(x), rtol=1e-2, atol=1e-2)
