"""Prints facts about this machine's GPUs as JSON: python tools/gpu_facts.py [--json FILE] [--missing].

The facts are the versions of Python, torch, CUDA, Triton and the driver; the name, memory and multiprocessors of each
GPU; the speed of torch's copy of a large buffer and of an 8192^3 bf16 matrix product; and the missing packages of this
project. It needs only torch, so it also runs if packages are missing.
"""

import argparse
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
# Dependencies of pyproject.toml for launch scripts of other frameworks and for log.prometheus_port: no check on a GPU
# needs them.
NOT_NEEDED = ("tree-sitter", "tree-sitter-bash", "prometheus-client")
# Modules that no dependency of pyproject.toml names. tyro's own requirements are among them, because on a machine
# without an index packages are installed one by one.
ALSO_NEEDED = ("docstring_parser", "typeguard", "typing_extensions", "pytest", "hypothesis")
COPY_BYTES = 4 << 30
SIDE = 8192
REPETITIONS = 20


def missing_packages() -> list[str]:
    """Return the modules of pyproject.toml's dependencies missing from this Python."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = [name for name in (line.partition(">")[0].strip() for line in lines) if name not in NOT_NEEDED]
    return [name for name in (*required, *ALSO_NEEDED) if importlib.util.find_spec(name) is None]


def driver() -> str:
    """The version of the NVIDIA driver by nvidia-smi; "" if there is no such program or it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, check=False)
    if run.returncode != 0 or not run.stdout.strip():
        return ""
    return run.stdout.strip().splitlines()[0]  # a line for each GPU, all with the same driver


def median_seconds(work: Any) -> float:
    """The median seconds of one call of `work` on the current GPU, measured by CUDA events."""
    for _ in range(3):  # the first calls also load kernels and allocate memory
        work()
    times = []
    for _ in range(REPETITIONS):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def copy_gb_per_second() -> float:
    """The speed of torch's copy of a large buffer on the first GPU, in 10^9 bytes read and written a second."""
    source = torch.randint(0, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda")  # zeros can be faster than data
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source)) / 1e9


def product_tflops() -> float:
    """The speed of a square bf16 matrix product on the first GPU, in 10^12 FLOP/s."""
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * SIDE**3 / median_seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def gpus() -> list[dict[str, Any]]:
    """The properties of each GPU visible to torch."""
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "name": properties.name,
                "memory_gib": properties.total_memory / 2**30,
                "multiprocessors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return rows


def machine() -> dict[str, Any]:
    """All facts, as JSON types. Without a GPU the measurements are left out."""
    triton = importlib.util.find_spec("triton")
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__ if triton else None,
        "driver": driver(),
        "missing": missing_packages(),
        "gpus": gpus() if torch.cuda.is_available() else [],
    }
    if report["gpus"]:
        report["cudnn"] = torch.backends.cudnn.version()
        report["nccl"] = list(torch.cuda.nccl.version())
        report["copy_gb_per_second"] = copy_gb_per_second()
        report["bf16_tflops"] = product_tflops()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the facts to this file too")
    parser.add_argument("--missing", action="store_true", help="print the missing packages alone, one a line")
    options = parser.parse_args()
    if options.missing:
        print("\n".join(missing_packages()))
        return
    text = json.dumps(machine(), indent=1)
    print(text)
    if options.json:
        # Here, because --missing runs before anything is installed.
        sys.path.insert(0, str(ROOT))
        from megapar.system.atomic_files import write_text

        write_text(options.json, text + "\n")


if __name__ == "__main__":
    main()
