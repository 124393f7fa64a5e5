"""The lane `-m gpus`: no file of tests starts CUDA while it is imported, or no forked rank could use a GPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.source_tree import ROOT

# Imports tests' files as the lane `-m gpus` does on a machine with a GPU, and says which would start CUDA.
COLLECT = """
import os, sys
os.environ["MEGAPAR_TEST_LANE"] = "gpus"
import pytest
import torch

def refuse():
    raise RuntimeError("starts CUDA")

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = refuse
sys.exit(pytest.main(["-m", "gpus", "--collect-only", "-q", *sys.argv[1:]]))
"""


PLANTED = """
import torch
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    raise RuntimeError(f"planted: {error}")
"""


def files_with_tensors_on_gpus() -> list[str]:
    """The tests' files that name a device of the lanes. On a GPU, tests/conftest.py asks after all files."""
    words = ("kernel_checks", "rank_device", "mark.gpus")
    return [str(path) for path in sorted(ROOT.glob("tests/test_*.py")) if any(x in path.read_text() for x in words)]


def test_no_file_starts_cuda_while_it_is_imported(tmp_path: Path) -> None:
    """None but a planted one."""
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_NVML", "MEGAPAR"))}
    command = [sys.executable, "-c", COLLECT, "-c", "pyproject.toml", *files_with_tensors_on_gpus(), str(planted)]
    run = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    (error,) = [line for line in run.stdout.splitlines() if line.startswith("ERROR ")]
    assert error.endswith("RuntimeError: planted: starts CUDA")
