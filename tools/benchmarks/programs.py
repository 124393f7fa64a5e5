"""Runs of pretrain.py as a process of its own, for benchmarks of the whole program."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks import BenchmarkError

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "pretrain_scripts/pretrain.py"
TINY = PRETRAIN.parent / "configs/tiny.toml"


def pretrain(run_dir: Path, flags: Sequence[object], code: str = "", **environment: str) -> list[dict[str, Any]]:
    """Train from the root of the project, and return the lines of metrics.jsonl.

    `code` is Python that runs the program in another way. Raises BenchmarkError with what a failed run said.
    """
    # The packages of this checkout, however it is installed.
    variables = {"PYTHONPATH": ":".join(str(ROOT / part) for part in ("", "tools", "models", "kernels")), **environment}
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable]
    command += ["-c", code] if code else [str(PRETRAIN)]
    command += ["--run_dir", str(run_dir), *map(str, flags)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        words = " ".join(map(str, flags))
        raise BenchmarkError(f"pretrain.py {words} ended with {ended.returncode}:\n{ended.stderr}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
